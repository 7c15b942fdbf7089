"""The TileLang releases this TileWeave was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED_TILELANG = ("0.1.15",)


def require_supported_tilelang() -> None:
    """Raise ImportError, naming the supported releases, unless one of them is installed."""
    supported = " or ".join(f"tilelang=={v}" for v in SUPPORTED_TILELANG)
    try:
        found = version("tilelang")
    except PackageNotFoundError:
        raise ImportError(f"tileweave: tilelang is not installed; expected {supported}") from None
    if found.split("+")[0] not in SUPPORTED_TILELANG:
        raise ImportError(f"tileweave: tilelang {found} is not supported; expected {supported}")
