"""The registries of programs of one block.

``make(True)`` is the faulty program and ``make(False)`` its twin. A faulty program names the lines
that its report must name by ``# FAULT``.
"""

from collections.abc import Callable
from typing import Any

from tests.factory import factory

N, THREADS = 256, 128
RACES: dict[str, Callable[[bool], Any]] = {}
CLEAN: dict[str, Callable[[], Any]] = {}


def race(make):
    make = RACES[make.__name__] = factory(make)
    return make


def clean(make):
    """Register a correct program that resembles a faulty one."""
    make = CLEAN[make.__name__] = factory(make)
    return make
