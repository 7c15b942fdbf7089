"""Tile kernels of attention, without plans, torch functions or gradients."""
