"""``import tileweave`` activates the plugin once, and only beside a TileLang it knows."""

from __future__ import annotations

import importlib.metadata

import pytest
from tilelang.backend import module as tilelang_backends
from tilelang.cache.kernel_cache import KernelCache

from tileweave import versions
from tileweave.codegen.hook import activate


def test_activation_is_idempotent():
    backend, key = tilelang_backends._BACKENDS["cuda"], KernelCache._generate_key
    activate()
    assert tilelang_backends._BACKENDS["cuda"] is backend
    assert KernelCache._generate_key is key


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


@pytest.mark.parametrize("release", ["0.1.14", "0.1.150", "0.2.0"])
def test_other_tilelang_is_one_clear_error(installed, release):
    installed(release)
    with pytest.raises(ImportError) as error:
        versions.require_supported_tilelang()
    assert str(error.value) == (
        f"tileweave: tilelang {release} is not supported; expected tilelang==0.1.15"
    )


def test_no_tilelang(installed):
    installed(None)
    with pytest.raises(ImportError, match=r"not installed; expected tilelang==0\.1\.15"):
        versions.require_supported_tilelang()


def test_all_names_exist():
    import tileweave

    assert [name for name in tileweave.__all__ if not hasattr(tileweave, name)] == []
