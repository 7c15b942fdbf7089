"""Passes inside TileLang's pipeline, before it flattens indices."""
