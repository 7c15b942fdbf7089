"""One rank of a node compiles before the others, and a failure raises on all ranks."""

from __future__ import annotations

import threading

import pytest

from tests.groups import one_rank
from tileweave import TileWeaveError
from tileweave.runtime.host.group import Group
from tileweave.runtime.kernel.compile_once import compile_once


def test_the_first_rank_of_each_node_compiles_first(every_rank):
    lock, compiled = threading.Lock(), []

    def compile_gemm(group: Group) -> str:
        def compiler() -> str:
            with lock:
                compiled.append(group.rank)
            return f"kernel of rank {group.rank}"

        return compile_once(group, compiler, "gemm")

    results = every_rank(compile_gemm, world_size=6, local_size=3)
    assert results == [f"kernel of rank {rank}" for rank in range(6)]
    assert set(compiled[:2]) == {0, 3}
    assert sorted(compiled) == list(range(6))


def test_all_ranks_load_at_once_what_the_cache_has(every_rank):
    at_once = threading.Barrier(3)

    def load(group: Group) -> int:
        return compile_once(group, lambda: at_once.wait(timeout=60), "gemm", is_cached=True)

    assert sorted(every_rank(load, 3)) == [0, 1, 2]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_failure_is_an_error_on_every_rank(every_rank, broken):
    """The first rank of a node fails, or another one."""
    compiled = []

    def compile_gemm(group: Group) -> str:
        def compiler() -> str:
            if group.rank == broken:
                raise ValueError("nvcc does not like it")
            compiled.append(group.rank)
            return "kernel"

        return compile_once(group, compiler, "gemm")

    results = every_rank(compile_gemm, 3)
    for rank, error in enumerate(results):
        if rank == broken:
            assert isinstance(error, ValueError)
            assert str(error) == "nvcc does not like it"
        else:
            assert isinstance(error, TileWeaveError)
            assert str(error) == (
                f"compile gemm: failed on rank {broken}: ValueError: nvcc does not like it"
            )
    assert sorted(compiled) == ([] if broken == 0 else [0, 2])


def test_different_programs_are_refused_on_every_rank(every_rank):
    compiled = []

    def compile_something(group: Group) -> None:
        name = "gather" if group.rank == 1 else "scatter"
        compile_once(group, lambda: compiled.append(name), name)

    for error in every_rank(compile_something, 3):
        assert isinstance(error, TileWeaveError)
        assert str(error) == (
            "compile: the ranks compile different programs, ['scatter', 'gather', 'scatter']; "
            "expected the same on every rank"
        )
    assert compiled == []


def test_compilations_do_not_mix(every_rank):
    """A failure belongs to one compilation; the next one, also of the same program, runs."""

    def compile_three(group: Group) -> list[str]:
        def fail() -> str:
            raise ValueError("broken")

        said = [compile_once(group, lambda: "first", "gemm")]
        try:
            compile_once(group, fail, "gemm")
        except (ValueError, TileWeaveError) as error:
            said.append(str(error))
        return [*said, compile_once(group, lambda: "third", "gemm")]

    first, second = every_rank(compile_three)
    assert first == ["first", "broken", "third"]
    assert second == [
        "first",
        "compile gemm: failed on rank 0: ValueError: broken",
        "third",
    ]


def test_alone():
    alone = one_rank()
    assert compile_once(alone, lambda: "kernel", "gemm") == "kernel"
