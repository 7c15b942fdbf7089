"""Passes over lowered device functions, after TileLang's pipeline."""
