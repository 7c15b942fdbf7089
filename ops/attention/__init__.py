"""Attention over a sharded sequence."""
