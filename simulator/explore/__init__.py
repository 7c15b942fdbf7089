"""Exhaustive simulation: one schedule for each Mazurkiewicz trace."""
