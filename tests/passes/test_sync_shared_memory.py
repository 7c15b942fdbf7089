"""Barriers of shared memory where places, iterations or their number are unknown."""

import re

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W
from tileweave.passes.ir.shared_memory.footprints import Footprints

X, O = T.Tensor((512,), "int32"), T.Tensor((512,), "int32")  # noqa: E741


@T.prim_func
def register(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, tx, place = T.alloc_shared((512,), "int32"), T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        place = tx + 100
        a[place] = 1
        if x[1] == 5:
            T.sync_threads()
        a[455 - tx] = 2
        T.sync_threads()
        y[tx] = a[tx + 100]


@T.prim_func
def scalar(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, tx = T.alloc_shared((512,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        a[n + tx] = 1
        if x[1] == 5:
            T.sync_threads()
        a[511 - tx // 4] = 2
        T.sync_threads()
        y[tx] = a[tx + n]


@T.prim_func
def inner_loop(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, tx = T.alloc_shared((512,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        if tx == 0:
            for k in T.serial(n):
                a[k] = 1
        if x[1] == 5:
            T.sync_threads()
        a[tx + 100] = 2
        T.sync_threads()
        y[tx] = a[tx + 100]


@T.prim_func
def loop_begin(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, tx = T.alloc_shared((512,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        if tx == 0:
            for k in T.serial(n, n + 4):
                a[k] = 1
        if x[1] == 5:
            T.sync_threads()
        a[tx + 100] = 2
        T.sync_threads()
        y[tx] = a[tx + 100]


@factory
def late(turn, of_unknown, x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, b = T.alloc_shared((256,), "int32"), T.alloc_shared((512,), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        for k in T.serial(n if of_unknown else 40):
            for i in T.Parallel(512):
                b[i] = x[i] + k
            for i in T.Parallel(512):
                y[i] = b[511 - i]
            if k == turn:
                a[tx] = 1
                a[255 - tx] = 2
        T.sync_threads()
        y[tx] = a[tx]


@T.prim_func
def gather(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, table = T.alloc_shared((256,), "int32"), T.alloc_shared((256,), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        table[tx] = 2
        for i in T.Parallel(256):
            a[x[i]] = table[(x[i] * 7) % 256]
        T.sync_threads()
        y[tx] = a[255 - tx]


@T.prim_func
def alone(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, tx, k = T.alloc_shared((256,), "int32"), T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        k = 0
        if tx == 0:
            while k < 256:
                a[k] = 2
                k = k + 1
        T.sync_threads()
        y[tx] = a[tx]


@T.prim_func
def own_element(x: X, n: T.int32, y: O):
    """Each thread reads and writes one element, in one statement."""
    with T.Kernel(1, threads=256):
        a, tx, place = T.alloc_shared((512,), "int32"), T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        T.copy(x, a)
        place = tx * 2
        a[place] = a[place] + 1
        T.copy(a, y)


@pytest.mark.parametrize(
    ("program", "n", "expected"),
    [
        (register, 0, [1] * 100 + [2] * 156),
        (scalar, 250, [1] * 198 + [2] * 58),
        (inner_loop, 300, [2] * 256),
        (loop_begin, 120, [2] * 256),
        (late(20, False), 0, [2] * 256),
        (late(6, True), 9, [2] * 256),
        (gather, 0, [2] * 256),
        (alone, 0, [2] * 256),
        (own_element, 0, [i + (i + 1) % 2 for i in range(256)]),
    ],
    ids=lambda value: value.attrs["global_symbol"] if hasattr(value, "attrs") else "",
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_unknown(program, n, expected, arch):
    """A barrier orders the writes; neither program is refused."""
    inputs = [{"x": np.arange(512, dtype=np.int32), "n": n}]
    (actual,) = tw.validate(program, 1, inputs, arch)
    assert actual["y"][:256].tolist() == expected


@T.prim_func
def register_condition(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, tx, value = T.alloc_shared((256,), "int32"), T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        value = x[tx]
        a[tx] = 1
        if value > 3:
            T.sync_threads()
        y[tx] = a[tx]


@T.prim_func
def register_count(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        tx, value = T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        value = n
        if tx == 5:
            value = 7
        for _ in T.serial(value):
            y[tx] = x[tx]
            T.sync_threads()


@T.prim_func
def index_of_register(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        tx, value = T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        value = x[tx]
        for k in T.serial(value, value + 4):
            if k == 5:
                T.sync_threads()
            y[tx] = k


@T.prim_func
def loop_register(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        tx, value = T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        value = n
        while value > 0:
            T.sync_threads()
            y[tx] = value
            value = value - x[tx]


@pytest.mark.parametrize(
    "program", [register_condition, register_count, index_of_register, loop_register]
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_barrier_under_register(program, arch):
    """Registers that may differ between threads decide whether they reach the barrier."""
    with pytest.raises(tw.TileWeaveError, match=r"T.sync_threads: a condition, a break"):
        tw.emit(program, arch=arch)


@T.prim_func
def reduced(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, part = T.alloc_shared((256,), "int32"), T.alloc_fragment((256,), "int32")
        most = T.alloc_fragment((1,), "int32")
        W.fence("gpu")
        T.copy(x[0:256], part)
        T.reduce_max(part, most)
        if most[0] > 3:
            for _ in T.serial(most[0] % 5 + 2):
                T.copy(x[0:256], a)
                for i in T.Parallel(256):
                    y[i] = a[255 - i]


@T.prim_func
def voted(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, tx = T.alloc_shared((256,), "int32"), T.get_thread_binding()
        vote = T.alloc_var("int32")
        W.fence("gpu")
        vote = T.syncthreads_or(x[tx] > 254)
        while vote != 0:
            T.copy(x[0:256], a)
            for i in T.Parallel(256):
                y[i] = a[255 - i]
            vote = vote - vote


@T.prim_func
def counted(x: X, n: T.int32, y: O):
    with T.Kernel(1, threads=256):
        a, count = T.alloc_shared((256,), "int32"), T.alloc_var("int32")
        W.fence("gpu")
        count = n
        while count > 0:
            T.copy(x[0:256], a)
            for i in T.Parallel(256):
                y[i] = a[255 - i]
            count = count - 1


@pytest.mark.parametrize("program", [reduced, voted, counted])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_uniform_register(program, arch):
    """All threads have the result of a reduction or vote, so a barrier under it is right."""
    inputs = [{"x": np.arange(512, dtype=np.int32), "n": 2}]
    (actual,) = tw.validate(program, 1, inputs, arch)
    assert actual["y"][:256].tolist() == list(range(255, -1, -1))


@factory
def same_threads(shift, x: X, n: T.int32, y: O):
    """TVM joins loops of which only a part of the threads executes an iteration."""
    with T.Kernel(1, threads=128):
        a = T.alloc_shared((128,), "int32")
        W.fence("gpu")
        for i in T.Parallel(100):
            a[i] = x[i]
        for i in T.Parallel(100):
            a[(i + shift) % 100 if shift else 99 - i] = x[i + 1]
        for i in T.Parallel(100):
            y[i] = a[i]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_barrier_divides_a_branch(shift, arch):
    x, index = np.arange(512, dtype=np.int32), np.arange(100)
    expected = np.empty(100, np.int32)
    expected[(index + shift) % 100 if shift else 99 - index] = x[1:101]
    program = same_threads(shift)
    (out,) = tw.simulate(program, 1, [{"x": x, "n": 0}], level="device", arch=arch)
    np.testing.assert_array_equal(out["y"][:100], expected)


@T.macro
def add_rows(x, tile, total):
    """Add three rows by producer and consumer warps."""
    T.clear(total)
    for j in T.Pipelined(3, num_stages=2):
        T.copy(x[j, 0], tile)
        for i in T.Parallel(128):
            total[i] = total[i] + tile[i]


@factory
def rewritten_element(in_loop, x: T.Tensor((4, 128), "int32"), y: T.Tensor((5, 128), "int32")):
    """Producers store ``y[4]`` before the specialized part, and consumers store it again in it."""
    with T.Kernel(1, threads=128):
        tile, total = T.alloc_shared((128,), "int32"), T.alloc_fragment((128,), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        for k in T.serial(2 if in_loop else 1):
            y[4, tx] = k
            add_rows(x, tile, total)
            T.copy(total, y[k, 0])
            y[4, tx] = k + 10


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_one_element_in_both_roles_of_warps(in_loop, arch):
    x = np.arange(512, dtype=np.int32).reshape(4, 128)
    (actual,) = tw.validate(rewritten_element(in_loop), 1, [{"x": x}], arch, schedules=2)
    assert actual["y"][4].tolist() == [11 if in_loop else 10] * 128


@factory
def moved_threads(x: T.Tensor((3, 128), "int32"), y: T.Tensor((5, 128), "int32")):
    """Threads from 128 on are consumers before the specialized part, and other consumers in it."""
    with T.Kernel(1, threads=256):
        tile, total = T.alloc_shared((128,), "int32"), T.alloc_fragment((128,), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        for k in T.serial(2):
            if tx >= 128:
                y[4, tx - 128] = 3
            add_rows(x, tile, total)
            T.copy(total, y[k, 0])
            if tx >= 128:
                y[4, tx - 128] += 4


@factory
def accesses_of_both_roles(
    case, x: T.Tensor((3, 128), "int32"), y: T.Tensor((128,), "int32"),
    z: T.Tensor((128,), "int32"),
):  # fmt: skip
    """Producers access ``y`` before the specialized part, and consumers in it."""
    S = W.alloc_symmetric((128,), "int32")
    with T.Kernel(1, threads=128):
        tile, total = T.alloc_shared((128,), "int32"), T.alloc_fragment((128,), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        y[tx] = 1
        T.sync_threads()
        if case == "store":
            W.st(y[tx], 3)
        elif case == "reduction":
            W.red_add(y[tx], 3)
        elif case == "symmetric store":
            W.st(S[W.rank(), tx], 3)
        elif case == "symmetric load":
            S[W.rank(), tx] = 3
        elif case == "atomics" or case == "result":
            T.atomic_add(y[tx], 9)
        elif case == "atomic stores":
            T.atomic_store(y[tx], 9)
        elif case == "equal atomics":
            W.red_add(y[tx], 9)
        add_rows(x, tile, total)
        T.copy(total, z)
        if case == "symmetric store":
            S[W.rank(), tx] = 7
            y[tx] = S[W.rank(), tx]
        elif case == "symmetric load":
            y[tx] = W.ld(S[W.rank(), tx]) + 4
        elif case == "atomics":
            T.atomic_min(y[tx], 7)
        elif case == "atomic stores":
            T.atomic_store(y[tx], 7)
        elif case == "equal atomics":
            T.atomic_add(y[tx], -3)
        elif case == "result":
            z[tx] = T.atomic_add(y[tx], -3, return_prev=True)
        else:
            y[tx] = 7


def test_threads_of_the_program_that_are_other_consumers():
    x = np.arange(384, dtype=np.int32).reshape(3, 128)
    (actual,) = tw.validate(moved_threads(), 1, [{"x": x}], "sm_90a", schedules=2)
    assert actual["y"][4].tolist() == [7] * 128


@pytest.mark.parametrize(
    "case",
    [
        "store", "reduction", "symmetric store", "symmetric load", "atomics", "atomic stores",
        "equal atomics", "result",
    ],
)  # fmt: skip
def test_builtins_and_atomics_in_both_roles_of_warps(case):
    x = np.arange(384, dtype=np.int32).reshape(3, 128)
    program = accesses_of_both_roles(case)
    (actual,) = tw.validate(program, 1, [{"x": x}], "sm_90a", schedules=2)
    assert actual["y"].tolist() == [7] * 128
    kernel = str(tw.emit(program, arch="sm_90a", world_size=1))
    after_barrier = kernel[: kernel.index("for (int j")].rsplit("__syncthreads();", 1)[1]
    assert bool(re.search(r"\b[yS]\[", after_barrier)) == (case == "equal atomics")


@factory
def read_by_a_condition(x: T.Tensor((3, 128), "int32"), y: T.Tensor((6, 128), "int32")):
    """The condition reads an element that consumers write in the previous iteration."""
    with T.Kernel(1, threads=128):
        tile, total = T.alloc_shared((128,), "int32"), T.alloc_fragment((128,), "int32")
        tx = T.get_thread_binding()
        y[4, tx] = 1
        W.fence("gpu")
        for k in T.serial(2):
            if y[4, tx] > 0:
                y[5, tx] = k
            add_rows(x, tile, total)
            T.copy(total, y[k, 0])
            y[4, tx] = 0


def test_a_condition_reads_what_consumers_write():
    x = np.arange(384, dtype=np.int32).reshape(3, 128)
    (actual,) = tw.validate(read_by_a_condition(), 1, [{"x": x}], "sm_90a", schedules=2)
    assert actual["y"][4:].tolist() == [[0] * 128] * 2


@T.prim_func
def steady(x: X, y: O):
    with T.Kernel(1, threads=256):
        a, tx = T.alloc_shared((512,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        for k in T.serial(64):
            a[tx] = x[tx + k]
            T.sync_threads()
            y[tx] = a[255 - tx]
            T.sync_threads()


def test_iterations_share_footprints(monkeypatch):
    """The pass follows 12 iterations, and computes the bytes of each access once."""
    spans, computed = Footprints._spans, []

    def count(self, root, start, length, mask, access):
        computed.append(access)
        return spans(self, root, start, length, mask, access)

    monkeypatch.setattr(Footprints, "_spans", count)
    tw.emit(steady, "device")
    assert len(computed) == 2


@factory
def rows(other, n: T.int32, y: O):
    """Move some elements of a row to places of another row that only the program knows."""
    with T.Kernel(1, threads=128):
        a, count = T.alloc_shared((2, 512), "int32"), T.alloc_shared((2,), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        for row in T.serial(2):
            a[row, tx] = tx
        if tx < 2:
            count[tx] = 0
        T.sync_threads()
        for turn in T.serial(2):
            own = turn % 2
            for s in T.serial(n):
                T.sync_threads()
                if s * 128 + tx < 100:
                    if a[own, s * 128 + tx] % 2 == turn:
                        place = T.atomic_add(count[own ^ 1], 1, return_prev=True)
                        a[own ^ other, place] = a[own, s * 128 + tx]
            T.sync_threads()
        y[tx] = a[1, tx]


def test_unknown_elements_of_different_rows_need_no_barrier():
    (result,) = tw.simulate(rows(1), 1, [{"n": 1}], 1, epochs=1, level="device")
    assert sorted(result["y"][:50]) == list(range(0, 100, 2))
    assert result["y"][50:128].tolist() == list(range(50, 128))
    with pytest.raises(tw.LanguageError, match="a write of a after a read of a"):
        tw.emit(rows(0), world_size=1)


@T.prim_func
def iterations_of_blocks(
    A: T.Tensor((128, 64), "float16"), B: T.Tensor((128, 64), "float16"),
    C: T.Tensor((2, 64, 64), "float32"),
):  # fmt: skip
    with T.Kernel(2, threads=128) as block:
        a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
        c = T.alloc_fragment((64, 64), "float32")
        W.fence("gpu")
        T.clear(c)
        for k in T.Pipelined(block + 1, num_stages=2):
            T.copy(A[k * 64, 0], a)
            T.gemm(a, a, c, transpose_B=True)
            T.copy(B[k * 64, 0], b)
            T.gemm(b, b, c, transpose_B=True)
        T.copy(c, C[block, 0, 0])


def test_a_loop_has_at_most_the_iterations_of_the_last_block():
    """Its tiles have two versions, of which TileLang takes that with the number of the loop."""
    assert "__global__" in tw.emit(iterations_of_blocks, world_size=1)
