"""Locations and hints in the errors and faults that commands print."""

from __future__ import annotations

import argparse
import os


def relative_paths(text: str) -> str:
    """Return ``text`` with the locations below the current folder relative to it."""
    return text.replace(f"--> {os.getcwd()}{os.sep}", "--> ")


def ranks_hint(options: argparse.Namespace) -> str:
    """Return a line that says how to set the number of ranks; "" if the user has set it."""
    if not getattr(options, "ranks_by_default", False):
        return ""
    return f"\n(for {options.ranks} ranks, the default; --ranks N sets another number)"
