"""Passes that need the target: what it lacks, and what TileLang would copy wrongly for it."""
