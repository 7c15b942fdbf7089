"""Normalization fused with communication."""
