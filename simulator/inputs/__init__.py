"""Inputs of a simulation: checks, and random values."""
