"""Traces of programs on several ranks: their schema, their JSON, their drawing, their summary."""
