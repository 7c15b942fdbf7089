"""Analyses and helpers that passes share; no pass."""
