"""Passes on tile-level IR that work around faults of TileLang and TVM."""
