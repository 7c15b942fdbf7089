"""Verification: check that explicit synchronization orders all accesses."""
