"""Tile kernels of the GEMM operators, without plans, torch functions or gradients."""
