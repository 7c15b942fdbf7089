"""Tile programs of mixture-of-experts layers."""
