"""Simulation of lowered device functions: what a GPU really runs.

TileLang's pipeline and the device passes turn a tile program into device functions of single
threads. This package runs them with the machine, the memory and the reports of the tile level.
"""
