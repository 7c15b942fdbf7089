"""Passes on lowered device functions, after TileLang's pipeline."""
