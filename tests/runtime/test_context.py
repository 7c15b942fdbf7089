"""The structures the host shares with the device have one layout, in Python and in C++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from tileweave.codegen.headers import INCLUDE_DIR
from tileweave.runtime.host.context import DeviceContext, Record, TraceBuffer, TraceEvent

TWINS = {
    "Record": Record,
    "Context": DeviceContext,
    "TraceEvent": TraceEvent,
    "TraceBuffer": TraceBuffer,
}


def layout_in_cxx(name: str, fields: list[str], folder) -> list[list[str]]:
    """Return name, offset and size of each field as a C++ compiler lays them out, then the total
    size."""
    print_fields = "\n".join(
        f'  std::printf("{f} %zu %zu\\n", offsetof(tw::{name}, {f}), sizeof(tw::{name}::{f}));'
        for f in fields
    )
    # The binding names all fields: a field that Python does not know is an error.
    source = f"""
#include <tileweave/context.cuh>
#include <cstddef>
#include <cstdio>
int main() {{
  auto [{", ".join(fields)}] = tw::{name}{{}};
{print_fields}
  std::printf("whole 0 %zu\\n", sizeof(tw::{name}));
}}
"""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "a C++ compiler is needed to see the layout"
    (folder / "layout.cpp").write_text(source)
    subprocess.run(
        [compiler, "-std=c++17", f"-I{INCLUDE_DIR}", "layout.cpp", "-o", "layout"],
        cwd=folder,
        check=True,
    )
    run = subprocess.run([folder / "layout"], capture_output=True, text=True, check=True)
    return [line.split() for line in run.stdout.splitlines()]


@pytest.mark.parametrize("name", TWINS)
def test_layout(name, tmp_path):
    twin = TWINS[name]
    fields = [field for field, _ in twin._fields_]
    expected = [[f, str(getattr(twin, f).offset), str(getattr(twin, f).size)] for f in fields]
    expected.append(["whole", "0", str(ctypes.sizeof(twin))])
    assert layout_in_cxx(name, fields, tmp_path) == expected
