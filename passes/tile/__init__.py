"""Passes on tile-level IR, before TileLang's pipeline."""
