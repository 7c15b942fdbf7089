"""Named barriers: of a number of threads, such as ``T.sync_threads(3, 64)``."""

import re

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

X, Y = T.Tensor((256,), "int32"), T.Tensor((256,), "int32")
ARCHITECTURES = pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
VALUES = np.random.default_rng(0).integers(0, 4, 256).astype(np.int32)


@factory
def met_by_parts(late, x: X, y: Y):
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        a[tx] = x[tx]
        if tx < 64:
            T.sync_threads(3, 128)
            if late:
                a[tx] = 1
                a[tx + 64] = 2
        else:
            T.sync_threads(3, 128)
        y[tx] = a[127 - tx]


@pytest.mark.parametrize("late", [False, True])
@ARCHITECTURES
def test_accesses_after_an_arrival_are_not_ordered_by_it(late, arch):
    expected = np.repeat([2, 1], 64) if late else VALUES[127::-1]
    (out,) = tw.simulate(met_by_parts(late), 1, [{"x": VALUES}], level="device", arch=arch)
    np.testing.assert_array_equal(out["y"][:128], expected)


@factory
def met_by_branches(case, x: X, y: Y):
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        a[tx] = x[tx]
        for _ in T.serial(1 if case == "in sequence" else x[0] + 1):
            if tx < 64:
                if case == "unknown condition":
                    if x[1] > 2:
                        T.sync_threads(3, 128)
                else:
                    T.sync_threads(3, 128)
            if case == "barrier between":
                T.sync_threads()
            if case == "jump between":
                if x[1] > 2:
                    break
            if tx >= 64:
                if case == "other order":
                    T.sync_threads(4, 128)
                T.sync_threads(3, 128)
            if case == "other order":
                if tx < 64:
                    T.sync_threads(4, 128)
        y[tx] = a[127 - tx]


@pytest.mark.parametrize("case", ["in sequence", "in a loop"])
@ARCHITECTURES
def test_branches_in_sequence_meet_at_one_barrier(case, arch):
    (out,) = tw.validate(met_by_branches(case), 1, [{"x": VALUES}], arch)
    np.testing.assert_array_equal(out["y"][:128], VALUES[127::-1])


WAITS = {
    "unknown condition": "whether all 128 threads of barrier 3 reach it depends on a condition",
    "jump between": "whether all 128 threads of barrier 3 reach it depends on a condition, a jump",
    "barrier between": "64 of the 128 threads of barrier 3 reach the barrier of the block before "
    r"the others reach barrier 3; expected all 128 threads .*\n barrier 3 --> .*\n the barrier",
    "other order": "64 of the 128 threads of barrier 4 reach barrier 3 before the others",
}


@pytest.mark.parametrize("case", WAITS)
@ARCHITECTURES
def test_threads_that_may_wait_forever(case, arch):
    with pytest.raises(tw.TileWeaveError, match=WAITS[case]):
        tw.emit(met_by_branches(case), arch=arch, world_size=1)


@pytest.mark.parametrize("case", ["barrier between", "other order"])
def test_threads_that_wait_forever_are_simulated(case):
    with pytest.raises(tw.SimulationError, match=r"deadlock(.|\n)*barrier 3: 64 of 128 threads"):
        tw.simulate(met_by_branches(case), 1, [{"x": VALUES}])


@factory
def one_barrier(number, count, threads, x: X, y: Y):
    with T.Kernel(1, threads=128):
        tx = T.get_thread_binding()
        W.fence("gpu")
        if tx < threads:
            T.sync_threads(number, count)
        y[tx] = x[tx]


ONE_BARRIER = {
    (16, 128, 128): "barrier 16; expected a number from 0 to 15",
    (3, 100, 128): "a barrier of 100 threads; expected a multiple of 32",
    (3, 256, 128): "a barrier of 256 threads in a block of 128; expected at most 128",
    (0, 64, 64): "64 threads at barrier 0, which is that of all 128 threads; expected a number",
    (3, 64, 16): "16 threads, a part of a warp, reach barrier 3; expected whole warps",
    (3, 64, 128): r"128 threads reach a barrier that counts 64; expected T.sync_threads\(3, 128",
    (3, 128, 64): "only 64 threads reach a barrier of 128; expected all threads",
}


@pytest.mark.parametrize("operands", ONE_BARRIER)
@ARCHITECTURES
def test_barriers_that_the_hardware_does_not_have(operands, arch):
    with pytest.raises(tw.TileWeaveError, match=ONE_BARRIER[operands]) as error:
        tw.emit(one_barrier(*operands), arch=arch, world_size=1)
    assert "test_named_barriers.py:" in str(error.value)


@factory
def several_barriers(case, x: X, y: Y):
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        a[tx] = x[tx]
        if case == "lanes":
            if tx % 2 == 0:
                T.sync_threads(3, 128)
            else:
                T.sync_threads(3, 128)
        if case == "two counts":
            if tx < 32:
                T.sync_threads(3, 96)
            if tx >= 32:
                T.sync_threads(3, 128)
        if case == "two sets":
            if tx < 64:
                T.sync_threads(3, 64)
            else:
                T.sync_threads(3, 64)
        if case == "return":
            if tx < 64:
                T.sync_threads(3, 128)
            if x[0] > 100:
                T.thread_return()
            if tx >= 64:
                T.sync_threads(3, 128)
        y[tx] = a[127 - tx]


@factory
def after_a_return(case, x: X, y: Y):
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        if case == "tile before":
            T.copy(x[0:128], a)
        for k in T.serial(100):
            if k == 50:
                if tx < 32:
                    T.thread_return()
            a[tx] = x[tx] + k
            if case == "inserted":
                a[159 - tx] = 1
            elif case == "all threads":
                T.sync_threads(3, 128)
            elif k >= 50:
                T.sync_threads(3, 96)
            else:
                T.sync_threads(3, 128)
            y[tx] = a[159 - tx]
            T.sync_threads()
        if case == "tile after":
            T.copy(x[0:128], a)


@pytest.mark.parametrize("case", ["remaining threads", "inserted", "tile before"])
@ARCHITECTURES
def test_barriers_after_some_threads_have_returned(case, arch):
    kernel = _kernel(after_a_return(case), arch)
    if case == "inserted":
        between = kernel[kernel.index("a[((int)threadIdx.x)] =") : kernel.index("] = 1;")]
        assert "__syncthreads();" in between


RETURNED = {
    "all threads": "96 of the 128 threads of barrier 3 reach",
    "tile after": "some threads left the iteration, loop or kernel by a break, continue or T",
}


@pytest.mark.parametrize("case", RETURNED)
@ARCHITECTURES
def test_what_threads_that_have_returned_do_not_reach(case, arch):
    with pytest.raises(tw.TileWeaveError, match=RETURNED[case]) as error:
        tw.emit(after_a_return(case), arch=arch, world_size=1)
    assert "test_named_barriers.py:" in str(error.value)


@factory
def in_a_loop(case, x: X, y: Y):
    with T.Kernel(1, threads=128):
        tx = T.get_thread_binding()
        W.fence("gpu")
        for k in T.serial(2):
            if case == "loop variable":
                T.sync_threads(3 + k, 128)
            if case == "count of data":
                T.sync_threads(3, 64 * x[0])
            if case == "again":
                if tx < 64:
                    T.sync_threads(3, 128)
        y[tx] = x[tx]


REFUSED = {
    several_barriers: {
        "lanes": "64 threads, a part of a warp, reach barrier 3; expected whole warps",
        "two counts": r"barrier 3 counts 96 and 128 threads; expected one count\n 96 threads --> ",
        "two sets": "different warps may be at barrier 3 at the same time; expected a number",
        "return": "whether all 128 threads of barrier 3 reach it depends on a condition, a jump",
    },
    in_a_loop: {
        "loop variable": "a number or a count of threads that is not a constant; expected const",
        "count of data": "a number or a count of threads that is not a constant; expected const",
        "again": "64 of the 128 threads of barrier 3 reach barrier 3 again before the others",
    },
}


@pytest.mark.parametrize(
    ("program", "case"), [(program, case) for program in REFUSED for case in REFUSED[program]]
)
@ARCHITECTURES
def test_barriers_that_hang(program, case, arch):
    text = f"T.sync_threads: {REFUSED[program][case]}"
    with pytest.raises(tw.TileWeaveError, match=text) as error:
        tw.emit(program(case), arch=arch, world_size=1)
    assert "test_named_barriers.py:" in str(error.value)


@factory
def before_loads(x: T.Tensor((4, 128), "int32"), y: T.Tensor((2, 128), "int32")):
    with T.Kernel(1, threads=128):
        tile, total = T.alloc_shared((128,), "int32"), T.alloc_fragment((128,), "int32")
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        a[tx] = x[3, tx]
        T.sync_threads(3, 128)
        y[1, tx] = a[127 - tx]
        T.clear(total)
        for j in T.Pipelined(3, num_stages=2):
            T.copy(x[j, 0], tile)
            for i in T.Parallel(128):
                total[i] = total[i] + tile[i]
        T.copy(total, y[0, 0])


def test_producer_warps_reach_what_is_before_the_loop():
    tw.emit(before_loads(), arch="sm_80", world_size=1)
    with pytest.raises(
        tw.TileWeaveError, match=r"256 threads .* counts 128, because those of producer"
    ):
        tw.emit(before_loads(), arch="sm_90a", world_size=1)


@factory
def of_two_groups(case, x: X, y: Y):
    """Two groups of warps synchronize in turn; TileLang inserts the barrier of one of them."""
    with T.Kernel(1, threads=256):
        a, tx = T.alloc_shared((256,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        if case == "inserted before":
            if tx < 128:
                a[tx] = x[tx]
                y[tx] = a[127 - tx]
            else:
                a[tx] = x[tx]
                T.sync_threads(3, 128)
                y[tx] = a[383 - tx]
        elif case == "inserted after":
            if tx < 128:
                a[tx] = x[tx]
                T.sync_threads(3, 128)
                y[tx] = a[127 - tx]
            else:
                a[tx] = x[tx]
                y[tx] = a[383 - tx]
        else:
            a[tx] = x[tx]
            if tx < 192:
                T.sync_threads(3, 192)
            if tx >= 64:
                T.sync_threads(3, 192)
            T.sync_threads()
            y[tx] = a[(tx // 128) * 128 + 127 - tx % 128]


@pytest.mark.parametrize("case", ["inserted before", "inserted after", "overlapping"])
@ARCHITECTURES
def test_one_number_is_of_one_group_of_warps_at_a_time(case, arch):
    program = of_two_groups(case)
    (out,) = tw.validate(program, 1, [{"x": VALUES}], arch)
    np.testing.assert_array_equal(out["y"], VALUES.reshape(2, 128)[:, ::-1].ravel())
    pattern = r"__sync_thread_partial\((\d+), \d+\)|(__syncthreads)\("
    barriers = re.findall(pattern, _kernel(program, arch))
    if case == "overlapping":
        assert barriers[-4:] == [("3", ""), ("", "__syncthreads"), ("3", ""), ("", "__syncthreads")]
    else:
        assert len({number for number, _ in barriers if number}) == 2


@factory
def part_of_a_warp(threads, x: X, y: Y):
    """Two writes need a barrier in the loop, which TileLang does not insert."""
    with T.Kernel(1, threads=128):
        a, tx = T.alloc_shared((128,), "int32"), T.get_thread_binding()
        W.fence("gpu")
        if tx < threads:
            for k in T.serial(2):
                if tx < 64:
                    a[tx] = x[tx] + k
                if tx < 32:
                    a[63 - tx] = 1
        if tx < 64:
            y[tx] = a[tx]


@ARCHITECTURES
def test_an_inserted_barrier_counts_whole_warps(arch):
    (out,) = tw.validate(part_of_a_warp(96), 1, [{"x": VALUES}], arch)
    assert out["y"][:64].tolist() == [*VALUES[:32] + 1, *[1] * 32]
    with pytest.raises(tw.TileWeaveError, match=r"no place .* in whole warps"):
        tw.emit(part_of_a_warp(100), arch=arch, world_size=1)


@factory
def reduced_twice(x: T.Tensor((3, 128), "int32"), y: T.Tensor((4, 128), "int32")):
    """All warps reduce by barriers 1 and 2 of TileLang, then the consumers do."""
    with T.Kernel(1, threads=128):
        tile, total = T.alloc_shared((128,), "int32"), T.alloc_fragment((128,), "int32")
        f, r = T.alloc_fragment((2, 128), "int32"), T.alloc_fragment((2,), "int32")
        g, s = T.alloc_fragment((2, 128), "int32"), T.alloc_fragment((2,), "int32")
        W.fence("gpu")
        for k in T.serial(2):
            T.copy(x[1, 0], f)
            T.reduce_sum(f, r, dim=1)
            for i in T.Parallel(2):
                y[2, i] = r[i]
            T.clear(total)
            for j in T.Pipelined(3, num_stages=2):
                T.copy(x[j, 0], tile)
                for i in T.Parallel(128):
                    total[i] = total[i] + tile[i]
                T.copy(x[1, 0], g)
                T.reduce_sum(g, s, dim=1)
            T.copy(total, y[k, 0])
            for i in T.Parallel(2):
                y[3, i] = s[i]


def test_reductions_by_all_warps_and_by_consumers():
    """A barrier of the block is before the reduction of all warps, in each iteration."""
    x = VALUES[np.arange(384) % 256].reshape(3, 128)
    (out,) = tw.validate(reduced_twice(), 1, [{"x": x}], "sm_90a")
    assert out["y"][2:, :2].tolist() == [[x[1].sum(), x[2].sum()]] * 2
    kernel = _kernel(reduced_twice(), "sm_90a")
    loop = kernel[kernel.index("for (int k") : kernel.index("NamedBarrier<256>")]
    assert "__syncthreads();" in loop


def _kernel(program, arch):
    text = str(tw.emit(program, arch=arch, world_size=1))
    return text[text.index("__launch_bounds__") :]
