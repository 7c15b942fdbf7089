"""Passes inside TileLang's pipeline, after it has lowered tiles to elements."""
