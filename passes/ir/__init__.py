"""Analyses and helpers that passes share."""
