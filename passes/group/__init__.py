"""Passes that compile a program for a group of ranks."""
