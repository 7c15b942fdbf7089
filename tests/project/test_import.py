"""``import tileweave`` activates the plugin once, and only beside a TileLang it knows."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

import pytest
from tilelang.cache.kernel_cache import KernelCache

from tileweave.builtins import versions
from tileweave.codegen import hook
from tileweave.codegen.backends import lower_of_cuda


def hooks() -> tuple[object, ...]:
    """Return the functions of TileLang that TileWeave has replaced."""
    return lower_of_cuda(), KernelCache._generate_key


def test_activation_is_idempotent():
    before = hooks()
    hook.activate()
    hook.activate()
    assert all(a is b for a, b in zip(hooks(), before, strict=True))


def test_reloading_the_hook_wraps_nothing_twice():
    before = hooks()
    importlib.reload(hook).activate()
    assert all(a is b for a, b in zip(hooks(), before, strict=True))


IMPORT_TWICE = """
import sys
from tilelang.backend import pass_pipeline
from tilelang.cache.kernel_cache import KernelCache
try:
    from tilelang.backend.module import _BACKENDS
    lower = lambda: _BACKENDS["cuda"].pipelines["cuda"]._lower
except ImportError:
    lower = lambda: pass_pipeline.get_pipeline("cuda")._lower

def hooks():
    return lower(), KernelCache._generate_key

stock = hooks()
import tileweave
first = hooks()
for name in [name for name in sys.modules if name.split(".")[0] == "tileweave"]:
    del sys.modules[name]
import tileweave
print(*(a is not b for a, b in zip(stock, first)), *(a is b for a, b in zip(first, hooks())))
"""


def test_importing_again_wraps_nothing_twice():
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_TWICE], capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == ["True"] * 4, run.stderr


@pytest.fixture
def installed(monkeypatch):
    def install(release: str | None) -> None:
        def version(package: str) -> str:
            assert package == "tilelang"
            if release is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return release

        monkeypatch.setattr(versions, "version", version)

    return install


@pytest.mark.parametrize("release", [*versions.SUPPORTED_TILELANG, "0.1.15+cu128"])
def test_supported_tilelang(installed, release):
    installed(release)
    versions.require_supported_tilelang()


@pytest.mark.parametrize("release", ["0.1.11", "0.1.16", "0.1.150", "0.2.0"])
def test_other_tilelang_is_one_clear_error(installed, release):
    installed(release)
    with pytest.raises(ImportError) as error:
        versions.require_supported_tilelang()
    assert str(error.value) == (
        f"tileweave: tilelang {release} is not supported; expected tilelang==0.1.12 or "
        "tilelang==0.1.13 or tilelang==0.1.14 or tilelang==0.1.15"
    )


def test_no_tilelang(installed):
    installed(None)
    with pytest.raises(ImportError, match=r"not installed; expected tilelang==0\.1\.12 or"):
        versions.require_supported_tilelang()


def test_all_names_exist():
    import tileweave

    assert [name for name in tileweave.__all__ if not hasattr(tileweave, name)] == []


DIR_OF_A_FRESH_IMPORT = """
import sys
import tileweave
print(*sorted(set(tileweave.__all__) - set(dir(tileweave))))
print("tileweave.simulator" in sys.modules)
"""


def test_dir_lists_lazy_names_without_importing_them():
    run = subprocess.run(
        [sys.executable, "-c", DIR_OF_A_FRESH_IMPORT], capture_output=True, text=True, check=False
    )
    assert run.stdout == "\nFalse\n", run.stderr


@pytest.mark.parametrize(
    ("module", "former", "name"),
    [("tileweave", "Steps", "PlanBuilder"), ("tileweave.language", "own_last", "swizzle_ranks")],
)
def test_former_names_warn(module, former, name):
    module = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(module, former) is getattr(module, name)


@pytest.mark.parametrize("name", ["alloc_packed", "pad"])
def test_removed_names_say_what_to_use(name):
    language = importlib.import_module("tileweave.language")
    with pytest.raises(AttributeError, match=rf"W\.{name} is removed; expected W\.alloc_ragged"):
        getattr(language, name)
