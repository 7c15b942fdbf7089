"""The releases of Python, TileLang and torch that this TileWeave supports."""

from __future__ import annotations

import functools
import re
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.2.0"
SUPPORTED_TILELANG = ("0.1.12", "0.1.13", "0.1.14", "0.1.15")
SUPPORTED_TORCH = ((2, 11), (2, 15))
"""The oldest and the newest supported minor release."""
SUPPORTED_FFI = ("0.1.11", "0.1.12")
SUPPORTED_PYTHON = ((3, 10), (3, 13))
"""The oldest and the newest supported minor release."""
SUPPORTED = {
    "python": " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED_PYTHON),
    "torch": " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED_TORCH),
    "tilelang": f"{SUPPORTED_TILELANG[0]} to {SUPPORTED_TILELANG[-1]}",
    "apache-tvm-ffi": " to ".join(SUPPORTED_FFI),
}
"""Supported releases of Python and each package, for people."""


def require_supported_tilelang() -> None:
    """Raise ImportError, which names the supported releases, if none of them is installed."""
    supported = " or ".join(f"tilelang=={v}" for v in SUPPORTED_TILELANG)
    try:
        installed = version("tilelang")
    except PackageNotFoundError:
        raise ImportError(f"tileweave: tilelang is not installed; expected {supported}") from None
    if installed.split("+")[0] not in SUPPORTED_TILELANG:
        raise ImportError(f"tileweave: tilelang {installed} is not supported; expected {supported}")


@functools.cache
def installed_tilelang() -> tuple[int, ...]:
    """Return the numbers of the installed release of TileLang."""
    return numbers_of(version("tilelang"))


def unsupported_torch(release: str) -> str:
    """Return the reason why a release of torch is not supported; "" if it is supported."""
    low, high = SUPPORTED_TORCH
    if low <= numbers_of(release)[:2] <= high:
        return ""
    return f"torch is {release}; expected {SUPPORTED['torch']}"


def numbers_of(release: str) -> tuple[int, ...]:
    """Return the leading numbers of a release; local and pre-release parts are left out."""
    leading = re.match(r"[\d.]*\d", release)
    return tuple(int(number) for number in leading[0].split(".")) if leading else ()
