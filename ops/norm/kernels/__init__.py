"""Tile programs of normalizations."""
