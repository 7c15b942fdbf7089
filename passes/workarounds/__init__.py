"""Passes that work around faults of TileLang and TVM."""
