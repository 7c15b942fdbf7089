"""Inference: insert the signals, waits and guards that a program needs."""
