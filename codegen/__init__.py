"""Lowering of builtins to CUDA: the hook into TileLang, the device headers, and their stamp."""
