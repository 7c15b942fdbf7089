"""Breaks and continues that only some threads of a block execute."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

X, Y = T.Tensor((256,), "int32"), T.Tensor((256,), "int32")
ARCHITECTURES = pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
VALUES = np.random.default_rng(0).integers(0, 4, 256).astype(np.int32)


@T.prim_func
def ended_by_thread(x: X, y: Y):
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        for k in T.serial(16):
            if k > tx:
                break
            a[tx] = x[tx] + k
        y[tx] = a[127 - tx]


@factory
def left_by_value(jump, x: X, y: Y):
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((256,), "int32"), T.alloc_shared((128,), "int32")
        W.fence("gpu")
        T.copy(x, a)
        for i in T.Parallel(128):
            b[i] = 0
            for k in T.serial(8):
                if a[i + k] > 2:
                    if jump == "break":
                        break
                    else:
                        continue
                b[i] = b[i] + a[i + k]
        for i in T.Parallel(128):
            y[i] = b[127 - i]


ended_by_value, skipped_by_value = left_by_value("break"), left_by_value("continue")


@T.prim_func
def skipped_after_barrier(x: X, y: Y):
    """All threads reach the barriers before the continue, in each iteration."""
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((128,), "int32"), T.alloc_fragment((128,), "int32")
        tx, total = T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        total = 0
        for k in T.serial(2):
            T.copy(x[k * 128], b)
            T.copy(b, a)
            T.sync_threads()
            if a[127 - tx] > 2:
                continue
            total = total + a[127 - tx]
        y[tx] = total


def expected(program):
    sums = []
    for t in range(128):
        window = VALUES[t : t + 8].tolist()
        ends = next((k for k, v in enumerate(window) if v > 2), 8)
        sums.append({
            ended_by_thread: VALUES[t] + min(t, 15),
            ended_by_value: sum(window[:ends]),
            skipped_by_value: sum(v for v in window if v <= 2),
            skipped_after_barrier: sum(v for v in VALUES[t::128] if v <= 2),
        }[program])  # fmt: skip
    return np.array(sums[::-1], np.int32)


@pytest.mark.parametrize(
    "program", [ended_by_thread, ended_by_value, skipped_by_value, skipped_after_barrier]
)
@ARCHITECTURES
def test_threads_meet_after_the_loop(program, arch):
    for level in ("tile", "device"):
        (out,) = tw.simulate(program, 1, [{"x": VALUES}], level=level, arch=arch)
        np.testing.assert_array_equal(out["y"][:128], expected(program))


@factory
def explicit(sync, jumps, x: X, y: Y):
    with T.Kernel(1, threads=128):
        flags, tx = W.alloc_symmetric((1,), "uint32"), T.get_thread_binding()
        W.fence("gpu")
        for k in T.serial(4):
            if jumps == "break":
                if x[tx] > k:
                    break
            elif jumps == "return":
                if x[tx] > k:
                    T.thread_return()
            else:
                if x[tx] > k:
                    continue
            if sync == "T.sync_threads":
                T.sync_threads()
            elif sync == "signal":
                W.signal(flags[W.rank(), 0])
            elif sync == "red_add":
                W.red_add(flags[W.rank(), 0], 1, sem="release")
            else:
                W.sync_grid()
            y[tx] = k


REFUSALS = {
    "T.sync_threads": "T.sync_threads: a condition, a break, a continue or a number of iterations",
    "signal": "signal: called under a condition on a register, a break, a continue or a return",
    "sync_grid": "sync_grid: called under a condition on a register, a break, a continue or a",
}


@pytest.mark.parametrize("jumps", ["break", "continue", "return"])
@pytest.mark.parametrize("sync", REFUSALS)
@ARCHITECTURES
def test_synchronization_that_some_threads_skip(sync, jumps, arch):
    with pytest.raises(tw.TileWeaveError, match=REFUSALS[sync]):
        tw.emit(explicit(sync, jumps), arch=arch, world_size=1)


@factory
def set_unless_left(jump, x: X, y: Y):
    with T.Kernel(1, threads=128):
        tx, n = T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        n = 0
        for k in T.serial(2):
            if x[tx] > k:
                if jump == "break":
                    break
                else:
                    continue
            n = 5
        if n == 5:
            T.sync_threads()
        y[tx] = n


@pytest.mark.parametrize("jump", ["break", "continue"])
@ARCHITECTURES
def test_barrier_under_a_register_that_some_threads_set(jump, arch):
    with pytest.raises(tw.TileWeaveError, match=REFUSALS["T.sync_threads"]):
        tw.emit(set_unless_left(jump), arch=arch, world_size=1)


@factory
def left_by_known_threads(jump, place, x: X, y: Y):
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        a[tx] = 0
        for k in T.serial(3):
            if place == "before":
                T.sync_threads()
            if place == "value":
                if x[0] > k:
                    if tx < 64:
                        if jump == "break":
                            break
                        else:
                            continue
            elif place == "iteration":
                if k >= 1:
                    if jump == "break":
                        break
                    else:
                        continue
            else:
                if tx < 64:
                    if jump == "break":
                        break
                    else:
                        continue
            if place != "before" and place != "none":
                T.sync_threads()
            a[tx] = a[tx] + x[tx] + k
        y[tx] = a[127 - tx]


@pytest.mark.parametrize(
    ("jump", "place"),
    [(jump, place) for jump in ("break", "continue") for place in ("after", "value")]
    + [("break", "before")],
)
@ARCHITECTURES
def test_barrier_that_known_threads_skip(jump, place, arch):
    with pytest.raises(tw.TileWeaveError, match=r"T\.sync_threads: "):
        tw.emit(left_by_known_threads(jump, place), arch=arch, world_size=1)


@pytest.mark.parametrize(
    ("jump", "place", "iterations"),
    [
        ("break", "none", (0, 3)),
        ("continue", "none", (0, 3)),
        ("continue", "before", (0, 3)),
        ("break", "iteration", (1, 1)),
        ("continue", "iteration", (1, 1)),
    ],
)
@ARCHITECTURES
def test_barriers_that_all_threads_reach(jump, place, iterations, arch):
    """``iterations`` are those that the first and the second half of the threads end."""
    program = left_by_known_threads(jump, place)
    sums = [VALUES[t] * (n := iterations[t // 64]) + sum(range(n)) for t in range(127, -1, -1)]
    for level in ("tile", "device"):
        (out,) = tw.simulate(program, 1, [{"x": VALUES}], level=level, arch=arch)
        assert out["y"][:128].tolist() == sums


def test_release_that_some_threads_skip():
    with pytest.raises(tw.TileWeaveError, match=r"releases after a continue that some threads"):
        tw.emit(explicit("red_add", "continue"), world_size=1)


@factory
def pipelined(stages, jumps, x: T.Tensor((4, 256), "int32"), y: Y):
    with T.Kernel(1, threads=128):
        a, total = T.alloc_shared((256,), "int32"), T.alloc_fragment((256,), "int32")
        W.fence("gpu")
        T.clear(total)
        for k in T.Pipelined(4, num_stages=stages):
            T.copy(x[k, 0], a)
            if jumps == "break":
                if k == 2:
                    break
            else:
                if k == 2:
                    continue
            for i in T.Parallel(256):
                total[i] = total[i] + a[i]
        T.copy(total, y)


@pytest.mark.parametrize("jumps", ["break", "continue"])
@pytest.mark.parametrize("stages", [1, 2])
@ARCHITECTURES
def test_jumps_out_of_pipelined_loops(stages, jumps, arch):
    with pytest.raises(tw.TileWeaveError, match=r"T\.Pipelined: the loop has a break, continue"):
        tw.emit(pipelined(stages, jumps), arch=arch, world_size=1)


@pytest.mark.parametrize(("jumps", "rows"), [("break", [0, 1]), ("continue", [0, 1, 3])])
@ARCHITECTURES
def test_jumps_without_stages(jumps, rows, arch):
    x = np.arange(1024, dtype=np.int32).reshape(4, 256)
    (out,) = tw.simulate(pipelined(0, jumps), 1, [{"x": x}], level="device", arch=arch)
    np.testing.assert_array_equal(out["y"], x[rows].sum(0))


@T.prim_func
def left_in_last_iteration(x: X, y: Y):
    """TileLang inserts a barrier after the break, and one before the read of the other threads."""
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((128,), "int32"), T.alloc_shared((256,), "int32")
        tx, s = T.get_thread_binding(), W.alloc_symmetric((256,), "int32")
        a[tx] = 0
        for k in T.serial(2):
            if k > tx:
                break
            a[tx] = a[tx] + x[tx]
        y[tx] = a[127 - tx]
        T.copy(x, b)
        T.copy(b, s[(W.rank() + 1) % 2, 0:256])


@ARCHITECTURES
def test_only_the_barrier_in_the_loop_is_removed(arch):
    sums = [VALUES[t] * min(t + 1, 2) for t in range(127, -1, -1)]
    for out in tw.simulate(
        left_in_last_iteration, 2, [{"x": VALUES}] * 2, level="device", arch=arch
    ):
        assert out["y"][:128].tolist() == sums


@factory
def left_after_skip(case, x: X, y: Y):
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        a[tx] = 0
        for k in T.serial(2):
            if case == "threads":
                T.sync_threads()
                if x[tx] > k:
                    continue
                if tx >= 0:
                    break
            else:
                a[tx] = x[tx + k]
                T.sync_threads()
                y[tx + 128] = a[127 - tx]
                if x[0] >= 0:
                    continue
                if case == "break":
                    if k == 0:
                        break
                T.sync_threads()
        y[tx] = a[127 - tx]


@pytest.mark.parametrize("case", ["break", "barrier"])
@ARCHITECTURES
def test_continue_skips_breaks_and_barriers(case, arch):
    """The device level finds a race if the next iteration misses a barrier."""
    (out,) = tw.simulate(left_after_skip(case), 1, [{"x": VALUES}], level="device", arch=arch)
    assert out["y"].tolist() == VALUES[128:0:-1].tolist() * 2


@ARCHITECTURES
def test_threads_that_skip_a_break_reach_the_next_iteration(arch):
    with pytest.raises(tw.TileWeaveError, match=REFUSALS["T.sync_threads"]):
        tw.emit(left_after_skip("threads"), arch=arch, world_size=1)


XR, YR = T.Tensor((6, 128), "int32"), T.Tensor((6, 128), "int32")


@factory
def lacking_elements(what, x: XR, y: YR):
    with T.Kernel(1, threads=128):
        c, tx = T.alloc_fragment((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        for k in T.serial(2):
            if what == "parallel":
                for i in T.Parallel(128):
                    if x[k, i] > 2:
                        continue
                    y[k, i] = 1
            elif what == "axes":
                for i, j in T.Parallel(16, 8):
                    if x[k, i * 8 + j] > 2:
                        break
                    y[k, i * 8 + j] = 1
            elif what == "once":
                for _ in T.serial(T.min(k + 1, 1)):
                    if x[k, tx] > 1:
                        break
                    y[k, tx] = 1
            else:
                T.copy(x[k, 0], c)
                if tx >= 64:
                    continue
                T.copy(c, y[k, 0])


@factory
def around_pipelined(what, x: XR, y: YR):
    with T.Kernel(1, threads=128):
        a, c = T.alloc_shared((128,), "int32"), T.alloc_fragment((128,), "int32")
        W.fence("gpu")
        for k in T.serial(2):
            if what != "condition" or T.get_thread_binding() < 64:
                T.clear(c)
                if what == "before":
                    if x[0, k] > 1:
                        break
                for j in T.Pipelined(3, num_stages=2):
                    T.copy(x[j, 0], a)
                    for i in T.Parallel(128):
                        c[i] = c[i] + a[i]
                if what == "after":
                    if x[0, k] > 1:
                        break
            T.copy(c, y[k, 0])


REFUSED = {
    "parallel": r"T\.Parallel or T\.serial: a break or continue in T\.Parallel, which",
    "axes": r"T\.Parallel or T\.serial: a break or continue in T\.Parallel, which",
    "once": r"T\.Parallel or T\.serial: a break or continue in a loop of one iteration, which",
    "copy": r"T\.Parallel, T\.copy or T\.gemm: some threads left the iteration, loop or kernel by",
    "after": r"T\.Pipelined: a break or return follows it in the loop around it",
    "condition": r"T\.Pipelined: a condition around it differs between threads",
}


@pytest.mark.parametrize("what", REFUSED)
@ARCHITECTURES
def test_jumps_that_tilelang_compiles_wrongly(what, arch):
    make = around_pipelined if what in ("after", "condition") else lacking_elements
    has_producer, message = arch != "sm_80", REFUSED[what]
    if what == "after" and not has_producer:
        tw.emit(make(what), arch=arch, world_size=1)
        return
    if what == "condition" and not has_producer:
        message = "T.fill: "
    with pytest.raises(tw.TileWeaveError, match=message):
        tw.emit(make(what), arch=arch, world_size=1)


@ARCHITECTURES
def test_a_uniform_break_precedes_a_pipelined_loop(arch):
    x = np.arange(768, dtype=np.int32).reshape(6, 128) % 3
    (out,) = tw.simulate(around_pipelined("before"), 1, [{"x": x}], level="device", arch=arch)
    np.testing.assert_array_equal(out["y"][:2], [x[:3].sum(0)] * 2)


@T.prim_func
def read_unless_skipped(x: X, y: Y):
    """Only the place before the condition is reached by all threads in each iteration."""
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((2, 128), "int32"), T.get_thread_binding()
        W.fence("gpu")
        y[tx] = -1
        for k in T.serial(2):
            a[k, tx] = x[tx] + k
            if x[tx] > k + 1:
                continue
            y[tx] = a[k, 127 - tx]


@ARCHITECTURES
def test_a_barrier_precedes_the_condition(arch):
    expected = np.where(VALUES[:128] <= 2, VALUES[127::-1] + 1, -1)
    (out,) = tw.simulate(read_unless_skipped, 1, [{"x": VALUES}], level="device", arch=arch)
    np.testing.assert_array_equal(out["y"][:128], expected)


@factory
def mixed_condition(what, x: X, y: Y):
    """A condition of a value that all threads share, and of the thread index."""
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        a[tx] = x[tx]
        y[tx] = 7
        T.sync_threads()
        if what == "break":
            for k in T.serial(2):
                if x[0] > k + 5 or tx < 64:
                    break
                a[tx] = k
                y[tx] = a[191 - tx]
        elif what == "else":
            if x[0] >= 0 and tx < 64:
                y[tx] = a[127 - tx]
            else:
                a[tx] = 2
        else:
            if x[0] > 5 or tx < 64:
                T.sync_threads()


@T.prim_func
def changed_condition(x: X, y: Y):
    with T.Kernel(1, threads=128):
        tx, n = T.get_thread_binding(), T.alloc_var("int32")
        W.fence("gpu")
        n = 0
        if n == 0:
            n = x[tx]
        if n == 0:
            T.sync_threads()
        y[tx] = n


@ARCHITECTURES
def test_a_branch_changes_the_condition_of_the_next(arch):
    with pytest.raises(tw.TileWeaveError, match=REFUSALS["T.sync_threads"]):
        tw.emit(changed_condition, arch=arch, world_size=1)


@pytest.mark.parametrize("what", ["break", "else", "barrier"])
@ARCHITECTURES
def test_a_shared_value_and_the_thread_decide(what, arch):
    """A barrier of 64 threads in a part of them that depends on the value, or between cases that
    run at the same time."""
    with pytest.raises(tw.TileWeaveError, match=r"shared memory: |T\.sync_threads: "):
        tw.emit(mixed_condition(what), arch=arch, world_size=1)


@T.prim_func
def stored_by_one_thread(
    x: T.Tensor((2, 32, 64), "float16"), n: T.Tensor((4,), "int32"),
    y: T.Tensor((2, 32, 64), "float16"),
):  # fmt: skip
    with T.Kernel(1, threads=128) as bx:
        a, tx = T.alloc_shared((32, 64), "float16"), T.get_thread_binding()
        sent = W.alloc_symmetric((1, 32, 64), "float16")
        for s in T.serial(2):
            T.copy(x[s, 0, 0], a)
            if tx == 0:
                a[16, 1] = 2
            if n[0] > s:
                break
            T.copy(a, y[s, 0, 0])
        T.copy(a, sent[(W.rank() + 1) % 2, bx, :, :])


@ARCHITECTURES
def test_another_thread_than_the_first_may_be_elected_for_the_tma(arch):
    inputs = {"x": np.ones((2, 32, 64), np.float16), "n": np.ones(4, np.int32)}
    tw.validate(stored_by_one_thread, 2, [inputs] * 2, arch)
