"""Processes of tests that need TileWeave imported, not a new Python: see tools/warm_python.py."""

from __future__ import annotations

import os
import shlex
import sys

from tools import warm_python

# No server cares about variables of pytest, and all workers of pytest-xdist inherit them.
_VARIABLE = "PYTEST_WARM_PYTHON"


def start() -> None:
    """Start the server of this run. It imports nothing before the first request."""
    os.environ[_VARIABLE] = shlex.join(warm_python.start(sys.executable, os.environ))


def python() -> list[str]:
    """Return the command that runs a program as ``python`` does, in a fork of the server.

    With environment variables other than pytest's, it starts a new Python: see ``PER_PROGRAM`` for
    those that may differ.
    """
    return shlex.split(os.environ[_VARIABLE])
