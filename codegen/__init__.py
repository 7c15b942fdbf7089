"""Lowering of builtins to CUDA: the hook into TileLang, and the device headers."""
