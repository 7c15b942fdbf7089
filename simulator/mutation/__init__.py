"""Mutation testing: change each synchronization operation of a program, and check that the
simulator reports it."""

from .mutate import Mutant, changed, mutate

__all__ = ["Mutant", "changed", "mutate"]
