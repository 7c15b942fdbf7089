"""Mutation testing: break each synchronisation operation of a program, and see who notices."""

from .mutate import Mutant, mutate

__all__ = ["Mutant", "mutate"]
