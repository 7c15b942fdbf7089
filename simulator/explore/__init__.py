"""Exhaustive simulation: one schedule of each set of schedules that differ in nothing visible."""
