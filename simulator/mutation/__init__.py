"""Mutation testing: break each synchronisation operation of a program, and see who notices."""

from .mutate import Mutant, changed, mutate

__all__ = ["Mutant", "changed", "mutate"]
