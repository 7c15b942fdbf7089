"""Passes that bind run-time values, and give a program the form that TileLang compiles rightly."""
