"""Errors for arguments that operators no longer have. They name the argument for one release."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .checks import refused

P, R = ParamSpec("P"), TypeVar("R")


def removed(**expected: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse removed arguments of an operator.

    Args:
        expected: what a call does instead of passing the argument, by its name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            for name in expected.keys() & options.keys():
                problem = f"{name}={options[name]!r}, which is removed"
                raise refused(function.__name__, problem, expected[name])
            return function(*args, **options)

        return call

    return decorate
