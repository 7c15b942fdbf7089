"""Accesses of tile statements before and after TileLang lowers them to elements."""
