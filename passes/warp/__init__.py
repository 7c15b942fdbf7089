"""Passes inside TileLang's pipeline, after it has divided the warps."""
