"""Regions of symmetric tensors that a program reads and writes."""
