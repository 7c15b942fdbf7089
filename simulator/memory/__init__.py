"""Weak memory: clocks, the order of accesses, and races."""
