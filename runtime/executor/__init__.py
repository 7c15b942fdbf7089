"""Execution of plans on CUDA streams."""
