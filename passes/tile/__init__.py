"""Passes over tile-level IR, before TileLang's pipeline."""
