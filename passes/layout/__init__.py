"""Passes inside TileLang's pipeline, before it lowers tiles by their layouts."""
