"""Ranks, streams, blocks and their scheduler."""
