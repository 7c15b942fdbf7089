"""Accesses of shared memory by the threads of a block, and what orders them."""
