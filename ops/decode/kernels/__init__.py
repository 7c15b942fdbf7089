"""Tile programs of decode attention."""
