"""What older releases of TileLang lack, for the tests that need it."""

from importlib.metadata import version

import pytest

from tileweave.builtins.versions import installed_tilelang, numbers_of

RECORDS_LINES = installed_tilelang() >= (0, 1, 13)
RECORDS_DEVICE_LINES = installed_tilelang() >= (0, 1, 14)
"""Whether all statements of a device function have the line of the statement they come from."""


def since(release: str, lacks: str) -> pytest.MarkDecorator:
    """Return the mark of a test that a release before ``release`` cannot run."""
    reason = f"TileLang {version('tilelang')} {lacks}; expected {release} or later"
    return pytest.mark.skipif(installed_tilelang() < numbers_of(release), reason=reason)


needs_lines = since("0.1.13", "records no source lines")
needs_device_lines = since("0.1.14", "does not record all source lines of device functions")
needs_bulk_copies = since("0.1.13", "does not copy parts of strided tensors by the TMA")
needs_nested_pipelines = since("0.1.13", "does not specialize warps for a loop in another loop")
needs_consumer_barriers = since("0.1.13", "has no barrier of consumer warps only in this program")
needs_partial_barriers = since("0.1.13", "inserts no barrier for a part of the threads here")
needs_local_reductions = since("0.1.13", "does not reduce tensors of T.alloc_local")
needs_python_loops = since("0.1.15", "does not unroll a loop over a Python list")


def names_line(report: str, place: str) -> bool:
    """Return whether a report names a place; always true where TileLang records no lines."""
    return not RECORDS_LINES or place in report
