"""Compile, load and launch kernels."""
