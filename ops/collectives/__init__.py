"""Collectives: all-gather, reduce-scatter, all-reduce, all-to-all."""
