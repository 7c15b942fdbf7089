"""Hooks that let models of other projects use the operators. Nothing here is imported before the
user imports it."""
