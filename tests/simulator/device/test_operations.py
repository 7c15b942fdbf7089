"""Operations of TileLang at the tile level and in device functions, against NumPy."""

import numpy as np
import pytest
import tilelang
import tilelang.language as T
import torch

import tileweave as tw
from tests.factory import factory

N = 64
LEVELS = ("tile", "sm_90a", "sm_80")
rng = np.random.default_rng(11)


@pytest.fixture(params=LEVELS)
def run(request):
    """Return a function that launches a program once at a level, and returns its tensors."""

    def launch(program, **tensors):
        options = {} if request.param == "tile" else {"level": "device", "arch": request.param}
        return tw.simulate(program, 1, [tensors], epochs=1, **options)[0]

    return launch


def integers(high, *shape, dtype="int32", low=0):
    return rng.integers(low, high, shape).astype(dtype)


def accumulated(A):
    """Return what the loops with ``break`` and ``continue`` below compute for each element."""
    out = np.zeros_like(A)
    for t in range(len(A)):
        for i in range(16):
            if i % 3 == 1:
                continue
            if i == t % 20:
                break
            for j in range(8):
                if (i + j) % 4 == t % 4:
                    continue
                if j == t % 9:
                    break
                out[t] += A[t] * j + 1
            out[t] += 2
    return out


@T.prim_func
def loops_of_threads(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        total = T.alloc_var("int32")
        total = 0
        for i in T.serial(16):
            if i % 3 == 1:
                continue
            if i == t % 20:
                break
            for j in T.serial(8):
                if (i + j) % 4 == t % 4:
                    continue
                if j == t % 9:
                    break
                total += A[t] * j + 1
            total += 2
        B[t] = total


@T.prim_func
def loops_of_points(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=32):
        total = T.alloc_fragment((N,), "int32")
        for t in T.Parallel(N):
            total[t] = 0
            for i in T.serial(16):
                if i % 3 == 1:
                    continue
                if i == t % 20:
                    break
                for j in T.serial(8):
                    if (i + j) % 4 == t % 4:
                        continue
                    if j == t % 9:
                        break
                    total[t] += A[t] * j + 1
                total[t] += 2
        T.copy(total, B)


@T.prim_func
def while_loop(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        i = T.alloc_var("int32")
        total = T.alloc_var("int32")
        total = 0
        i = -1
        while i < 15:
            i += 1
            if i % 3 == 1:
                continue
            if t % 2 == 0:
                if i == t % 20:
                    break
            else:
                if i == t % 20:
                    T.loop_break()
            for j in T.serial(8):
                if (i + j) % 4 == t % 4:
                    continue
                if j == t % 9:
                    break
                total += A[t] * j + 1
            total += 2
        B[t] = total


@pytest.mark.parametrize("program", [loops_of_threads, loops_of_points, while_loop])
def test_break_and_continue(run, program):
    A = integers(9, N)
    assert run(program, A=A)["B"].tolist() == accumulated(A).tolist()


@T.prim_func
def loop_over_threads(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=N):
        t = T.thread_binding(0, N, thread="threadIdx.x")
        B[t] = A[N - 1 - t]


def test_thread_binding(run):
    A = integers(9, N)
    assert run(loop_over_threads, A=A)["B"].tolist() == A[::-1].tolist()


@T.prim_func
def loops_of_two_roles(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        x = T.alloc_shared((N,), "int32")
        x[t] = A[t]
        T.sync_threads()
        for i in T.serial(5):
            if i == 2:
                continue
            if t < 32:
                if i == 3:
                    break
                x[t] += 1
                T.sync_threads(1, 32)
            else:
                if i == 4:
                    break
                T.sync_threads(2, 32)
                x[t] += 2
        T.sync_threads()
        B[t] = x[N - 1 - t]


def test_warps_leave_a_loop_in_different_iterations(run):
    A = integers(9, N)
    expected = (A + np.where(np.arange(N) < 32, 2, 6))[::-1]
    assert run(loops_of_two_roles, A=A)["B"].tolist() == expected.tolist()


@T.prim_func
def tiles_in_a_left_loop(A: T.Tensor((N,), "float32"), B: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32):
        x = T.alloc_shared((32,), "float32")
        total = T.alloc_fragment((32,), "float32")
        T.clear(total)
        for k in T.serial(8):
            if k == 5:
                break
            if k % 2 == 1:
                continue
            T.copy(A[k * 8 : k * 8 + 32], x)
            for i in T.Parallel(32):
                total[i] += x[i]
        T.copy(total, B)


def test_tile_operations_in_a_loop_that_is_left(run):
    A = integers(9, N, dtype="float32")
    expected = A[:32] + A[16:48] + A[32:64]
    assert run(tiles_in_a_left_loop, A=A)["B"].tolist() == expected.tolist()


@T.prim_func
def bounds_of_points(B: T.Tensor((N,), "int32"), C: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=32):
        count = T.alloc_fragment((N,), "int32")
        for i in T.Parallel(N):
            B[i] = 0
            for j in T.serial(i % 7, 7):
                if j == 5:
                    continue
                B[i] += j
        for i in T.Parallel(N):
            count[i] = 0
            while count[i] * 3 < i:
                if count[i] == 9:
                    break
                count[i] += 1
        T.copy(count, C)


def test_loops_may_differ_between_points(run):
    out = run(bounds_of_points)
    sums = [sum(j for j in range(i % 7, 7) if j != 5) for i in range(N)]
    assert out["B"].tolist() == sums
    assert out["C"].tolist() == [min(9, -(-i // 3)) for i in range(N)]


@T.prim_func
def skipped_points(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            if i % 3 == 0:
                continue
            B[i] = A[i]


def test_continue_skips_a_point_of_parallel():
    """No device function has it: TileLang would leave another loop."""
    A, B = integers(9, N), np.full(N, -1, np.int32)
    expected = np.where(np.arange(N) % 3 == 0, B, A)
    with pytest.warns(tw.SimulationWarning, match=r"a break or continue in T\.Parallel, which"):
        (out,) = tw.simulate(skipped_points, 1, [{"A": A, "B": B}])
    assert out["B"].tolist() == expected.tolist()


@T.prim_func
def left_parallel(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            if i == 9:
                break
            B[i] = A[i]


def test_break_of_parallel_is_refused():
    with pytest.raises(tw.SimulationError, match=r"break of a T\.Parallel, whose"):
        tw.simulate(left_parallel, 1)


@T.prim_func
def shared_atomics(
    A: T.Tensor((N,), "int32"),
    X: T.Tensor((N,), "float32"),
    counts: T.Tensor((16,), "int32"),
    before: T.Tensor((N,), "int32"),
    largest: T.Tensor((4,), "float32"),
    halves: T.Tensor((16,), "float16"),
    tile: T.Tensor((N,), "float32"),
):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        c = T.alloc_shared((16,), "int32")
        m = T.alloc_shared((4,), "float32")
        h = T.alloc_shared((16,), "float16")
        x = T.alloc_shared((N,), "float32")
        y = T.alloc_fragment((N,), "float32")
        T.clear(c)
        T.clear(m)
        T.clear(h)
        T.copy(X, x)
        T.copy(X, y)
        before[t] = T.atomic_add(c[A[t]], 1, return_prev=True)
        T.atomic_max(m[A[t] % 4], X[t])
        for i in T.Parallel(N):
            T.atomic_add(h[A[i]], T.cast(X[i], "float16"))
        T.atomic_add(x, y)
        if t < 3:
            T.atomic_addx2(x[2 * t], X[0])
        T.copy(c, counts)
        T.copy(m, largest)
        T.copy(h, halves)
        T.copy(x, tile)


def test_atomics_on_shared_memory(run):
    A, X = integers(16, N), integers(5, N, dtype="float32")
    out = run(shared_atomics, A=A, X=X)
    counts = np.bincount(A, minlength=16)
    assert out["counts"].tolist() == counts.tolist()
    for value in range(16):
        assert sorted(out["before"][A == value]) == list(range(counts[value]))
    assert out["largest"].tolist() == [X[A % 4 == i].max(initial=0) for i in range(4)]
    assert out["halves"].tolist() == [X[A == i].sum() for i in range(16)]
    tile = 2 * X
    tile[:6] += np.tile(X[:2], 3)
    assert out["tile"].tolist() == tile.tolist()


@T.prim_func
def atomic_on_uninitialized_memory(B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=N):
        x = T.alloc_shared((N,), "int32")
        T.atomic_add(x[0], 1)
        T.copy(x, B)


def test_an_atomic_on_uninitialized_shared_memory_is_poison(run):
    with pytest.raises(tw.SimulationError, match=r"poison: T\.atomic_add of .*uninitialized"):
        run(atomic_on_uninitialized_memory)


@T.prim_func
def bools(
    A: T.Tensor((N,), "bool"), B: T.Tensor((N,), "float32"), C: T.Tensor((N,), "bool"),
    D: T.Tensor((N,), "bool"),
):  # fmt: skip
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        x = T.alloc_shared((N,), "bool")
        y = T.alloc_fragment((N,), "bool")
        z = T.alloc_local((1,), "bool")
        T.copy(A, x)
        T.copy(x, y)
        z[0] = A[t]
        for i in T.Parallel(N):
            B[i] = T.if_then_else(A[i], 1.0, 0.0)
            C[i] = y[i] and i > 5
        D[t] = z[0] or x[N - 1 - t]


def test_bool(run):
    A = integers(2, N, dtype="bool")
    out = run(bools, A=A)
    assert out["B"].tolist() == A.astype(np.float32).tolist()
    assert out["C"].tolist() == (A & (np.arange(N) > 5)).tolist()
    assert out["D"].tolist() == (A | A[::-1]).tolist()


def scan(op, height, width, axis, reverse, dtype, threads):
    apply = getattr(T, op)

    @T.prim_func
    def program(A: T.Tensor((height, width), dtype), B: T.Tensor((height, width), dtype)):
        with T.Kernel(1, threads=threads):
            x = T.alloc_shared((height, width), dtype)
            T.copy(A, x)
            apply(x, dim=axis, reverse=reverse)
            T.copy(x, B)

    return program


@pytest.mark.parametrize(
    ("op", "height", "width", "axis", "reverse", "dtype", "threads"),
    [
        ("cumsum", 48, 72, 1, True, "int32", 128),
        ("cummax", 48, 72, 0, False, "int32", 64),
        ("cumsum", 20, 40, 0, True, "float16", 128),
        ("cumsum", 5, 32, 1, False, "float32", 32),
    ],
)
def test_scans(run, op, height, width, axis, reverse, dtype, threads):
    A = integers(5, height, width, dtype=dtype)
    ordered = np.flip(A, axis) if reverse else A
    ufunc = np.add if op == "cumsum" else np.maximum
    expected = ufunc.accumulate(ordered, axis=axis)
    expected = np.flip(expected, axis) if reverse else expected
    program = scan(op, height, width, axis, reverse, dtype, threads)
    assert run(program, A=A)["B"].tolist() == expected.tolist()


@T.prim_func
def scan_of_a_vector(A: T.Tensor((100,), "int32"), B: T.Tensor((100,), "int32")):
    with T.Kernel(1, threads=64):
        x = T.alloc_shared((100,), "int32")
        y = T.alloc_shared((100,), "int32")
        T.copy(A, x)
        T.cumsum(x, y)
        T.copy(y, B)


def test_scan_of_a_vector(run):
    A = integers(50, 100, low=-50)
    assert run(scan_of_a_vector, A=A)["B"].tolist() == A.cumsum().tolist()


def product(dtype, transposes):
    transposes_a, transposes_b = transposes

    @T.prim_func
    def program(
        A: T.Tensor((N, N), dtype), B: T.Tensor((N, N), dtype), C: T.Tensor((N, N), "int32")
    ):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((N, N), dtype)
            b = T.alloc_shared((N, N), dtype)
            c = T.alloc_fragment((N, N), "int32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c, transpose_A=transposes_a, transpose_B=transposes_b)
            T.copy(c, C)

    return program


@pytest.mark.parametrize(
    ("dtype", "transposes"),
    [("int8", (False, True)), ("uint8", (False, True)), ("int8", (True, False))],
)
def test_integer_products(run, dtype, transposes):
    legal = np.iinfo(dtype)
    A, B = (integers(legal.max + 1, N, N, dtype=dtype, low=legal.min) for _ in range(2))
    left, right = (x.T if t else x for x, t in zip((A, B), transposes, strict=True))
    expected = left.astype(np.int32) @ right.astype(np.int32)
    assert (run(product(dtype, transposes), A=A, B=B)["C"] == expected).all()


@pytest.mark.parametrize(("kernel", "stride", "dilation", "padding"), [(3, 1, 1, 1), (1, 2, 1, 0)])
def test_im2col(kernel, stride, dilation, padding):
    rows, columns = 32, 16

    @T.prim_func
    def windows(A: T.Tensor((2, 8, 8, 32), "float16"), B: T.Tensor((rows, columns), "float16")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((rows, columns), "float16")
            last = kernel * kernel * 2 - 1
            T.im2col(A, tile, 0, last, kernel, stride, dilation, padding)
            T.copy(tile, B)

    A = rng.standard_normal((2, 8, 8, 32)).astype(np.float16)
    padded = np.pad(A, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    place = (kernel - 1) * dilation
    right = padded[:, place::stride, place::stride, 16:].reshape(-1, columns)[:rows]
    for options in ({}, {"level": "device"}):
        assert (tw.simulate(windows, 1, [{"A": A}], epochs=1, **options)[0]["B"] == right).all()


@T.prim_func
def guarded(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32"), C: T.Tensor((4,), "int32")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        for k in T.serial(2):
            B[t * 2 + k] = A[t + 96 * k - 32] + 1
        T.atomic_add(C[t], 1)


def test_accesses_out_of_bounds_are_guarded(run):
    A = integers(9, N)
    out = run(guarded, A=A, C=np.zeros(4, np.int32))
    right = np.zeros((N, 2), np.int32)
    right[32:, 0] = A[:32]
    assert (out["B"] == right.reshape(-1)[:N] + 1).all()
    assert out["C"].tolist() == [1] * 4


@T.prim_func
def replicas(A: T.Tensor((32,), "int32"), B: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=128):
        t = T.get_thread_binding()
        B[t % 32] = A[t % 32] + 1


def test_equal_values_of_several_threads_are_stored(run):
    A = integers(9, 32)
    assert (run(replicas, A=A)["B"] == A + 1).all()


@T.prim_func
def workspaces(A: T.Tensor((N,), "int32"), B: T.Tensor((2, N), "int32")):
    between = T.alloc_global((2, N), "int32")
    with T.Kernel(2, threads=N) as block:
        own = T.alloc_global((2, N), "int32")
        for i in T.Parallel(N):
            own[block, i] = A[i] + block
        T.copy(own[block, :], between[1 - block, :])
    with T.Kernel(2, threads=N) as block:
        T.copy(between[block, :], B[block, :])


def test_alloc_global(run):
    A = integers(9, N)
    assert (run(workspaces, A=A)["B"] == [A + 1, A]).all()


@tw.stand_in("unpack<int32>")
def _unpack(packed, out, shift):
    out[:, ::2], out[:, 1::2] = packed & 15, packed >> 4
    out += shift


tw.stand_in("twice")(lambda x: 2 * x)


@T.prim_func
def external_functions(A: T.Tensor((N, 4), "int8"), B: T.Tensor((N, 8), "int32")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        packed, out = T.alloc_local((5,), "int8"), T.alloc_local((8,), "int32")
        for k in T.serial(4):
            packed[1 + k] = A[t, k]
        T.call_extern(
            "handle", "unpack<int32>",
            T.access_ptr(packed[1], "r", extent=4), T.access_ptr(out[0], "w", extent=8), t,
        )  # fmt: skip
        for k in T.serial(8):
            B[t, k] = T.call_extern("int32", "twice", out[k])


def test_stand_ins_of_external_functions(run):
    A = integers(127, N, 4, dtype="int8")
    right = np.stack([A & 15, A >> 4], axis=-1).reshape(N, 8) + np.arange(N)[:, None]
    assert (run(external_functions, A=A)["B"] == 2 * right).all()


@T.prim_func
def exchanges(A: T.Tensor((4, 16), "float32"), B: T.Tensor((4, 16), "float32")):
    with T.Kernel(1, threads=(16, 4)):
        x, y = T.get_thread_binding(0), T.get_thread_binding(1)
        own, most = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
        own[0] = A[y, x]
        with T.attr(
            T.comm_reducer(lambda a, b: T.max(a, b), [T.min_value("float32")]), "reduce_scope",
            T.reinterpret(T.uint64(0), dtype="handle"),
        ):  # fmt: skip
            T.evaluate(
                T.tvm_thread_allreduce(T.uint32(1), own[0], True, most[0], x, dtype="handle")
            )
        B[y, x] = most[0] + T.tvm_warp_shuffle(0xFFFFFFFF, own[0], x ^ 1, 16, 16)


def test_exchanges_of_threads_by_tvm(run):
    A = rng.standard_normal((4, 16)).astype(np.float32)
    assert (run(exchanges, A=A)["B"] == A.max(1)[:, None] + A[:, np.arange(16) ^ 1]).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not hasattr(T, "reducer_init"), reason="TileLang 0.1.14 and later")
def test_legacy_reducers(run):
    @T.prim_func
    def legacy(A: T.Tensor((16, N), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=N):
            x = T.alloc_fragment((16, N), "float32")
            total = T.alloc_reducer((16,), "float32", op="sum", replication="all")
            T.copy(A, x)
            T.clear(total)
            for i, j in T.Parallel(16, N):
                total[i] += x[i, j]
            T.finalize_reducer(total)
            T.copy(total, B)

    A = rng.standard_normal((16, N)).astype(np.float32)
    np.testing.assert_allclose(run(legacy, A=A)["B"], A.sum(1), rtol=1e-4, atol=1e-4)


@T.prim_func
def kernels_of_several_sizes(A: T.Tensor((32, N), "int32"), B: T.Tensor((32, N), "int32")):
    with T.Kernel(1, threads=256):
        with T.ws(1):
            x = T.alloc_fragment((32, N), "int32")
            T.copy(A, x)
            for i, j in T.Parallel(32, N):
                B[i, j] = x[i, j] + 1
    with T.Kernel(1, threads=32):
        for j in T.Parallel(N):
            B[0, j] = 0


def test_kernels_of_several_sizes(run):
    A = integers(9, 32, N)
    right = A + 1
    right[0] = 0
    assert (run(kernels_of_several_sizes, A=A)["B"] == right).all()


def test_packed_maximum_of_halves(run):
    @T.prim_func
    def packed(A: T.Tensor((N, 8), "float16"), B: T.Tensor((N,), "float16")):
        with T.Kernel(1, threads=32):
            x, y = T.alloc_fragment((N, 8), "float16"), T.alloc_fragment((N,), "float16")
            T.copy(A, x)
            T.reduce_max(x, y, dim=1)
            T.copy(y, B)

    A = rng.standard_normal((N, 8)).astype(np.float16)
    assert (run(packed, A=A)["B"] == A.max(1)).all()


@T.prim_func
def views_in_bulk(A: T.Tensor((4, 16, N), "float16"), B: T.Tensor((N, N), "float16")):
    with T.Kernel(1, threads=128):
        rows, tile = T.Tensor((N, N), "float16", A.data), T.alloc_shared((N, N), "float16")
        T.copy(rows, tile)
        T.copy(tile, B)


def test_bulk_copies_of_views(run):
    A = rng.standard_normal((4, 16, N)).astype(np.float16)
    assert (run(views_in_bulk, A=A)["B"] == A.reshape(N, N)).all()


@T.prim_func
def layout_of_a_tensor(A: T.Tensor((4, N), "float32"), B: T.Tensor((4, N), "float32")):
    with T.Kernel(1, threads=N):
        T.annotate_layout({A: T.Layout(A.shape, lambda i, j: [j, i])})
        T.copy(A[0:4, :], B[0:4, :])


def test_statements_of_tensors_with_a_layout_are_no_wrong_translation(run):
    A = rng.standard_normal((4, N)).astype(np.float32)
    run(layout_of_a_tensor, A=A)


@T.prim_func
def copies_of_threads(A: T.Tensor((N, 8), "float16"), B: T.Tensor((N, 8), "float16")):
    with T.Kernel(1, threads=N):
        t, tile = T.get_thread_binding(), T.alloc_shared((N, 8), "float16")
        T.ptx_cp_async(T.access_ptr(tile[t, 0], "w", 8), T.access_ptr(A[N - 1 - t, 0], "r", 8), 8)
        T.ptx_commit_group()
        T.ptx_wait_group(0)
        T.sync_threads()
        for i, j in T.Parallel(N, 8):
            B[i, j] = tile[N - 1 - i, j]


def test_cp_async(run):
    A = rng.standard_normal((N, 8)).astype(np.float16)
    assert (run(copies_of_threads, A=A)["B"] == A).all()


@T.prim_func
def copies_of_warps_to_one_row(A: T.Tensor((N, 8), "float16")):
    with T.Kernel(1, threads=N):
        t, tile = T.get_thread_binding(), T.alloc_shared((N // 2, 8), "float16")
        T.ptx_cp_async(T.access_ptr(tile[t % 32, 0], "w", 8), T.access_ptr(A[t, 0], "r", 8), 8)


def test_copies_of_one_instruction_race():
    A = np.ones((N, 8), np.float16)
    with pytest.raises(tw.SimulationError, match=r"is not ordered after cp\.async") as fault:
        tw.simulate(copies_of_warps_to_one_row, 1, [{"A": A}], level="device")
    assert fault.value.kind == "race"


@factory
def copies_with_an_mbarrier(
    arrive, A: T.Tensor((2, N, 8), "int32"), B: T.Tensor((2, N, 8), "int32")
):
    with T.Kernel(1, threads=2 * N):
        t, tile = T.get_thread_binding(), T.alloc_shared((N, 8), "int32")
        full, free = T.alloc_barrier(arrive_count=N), T.alloc_barrier(arrive_count=N)
        for k in T.serial(2):
            if t < N:
                T.barrier_wait(free, (k & 1) ^ 1)
                for j in T.serial(2):
                    T.ptx_cp_async(
                        T.access_ptr(tile[t, j * 4], "w", 4),
                        T.access_ptr(A[k, t, j * 4], "r", 4),
                        4,
                    )
                arrive(full)
            else:
                T.barrier_wait(full, k & 1)
                for j in T.serial(8):
                    B[k, t - N, j] = tile[2 * N - 1 - t, j]
                T.barrier_arrive(free)


def test_an_mbarrier_follows_copies_of_threads():
    A = torch.arange(2 * N * 8, dtype=torch.int32).reshape(2, N, 8)
    B = torch.zeros_like(A)
    for level in ("tile", "device"):
        with tw.interpret(level):
            tilelang.compile(copies_with_an_mbarrier(T.cp_async_barrier_noinc))(A, B)
        assert (B == A.flip(1)).all()
    with tw.interpret("device"), pytest.raises(tw.SimulationError, match="tile") as fault:
        tilelang.compile(copies_with_an_mbarrier(T.barrier_arrive))(A, B)
    assert fault.value.kind == "race"


@T.prim_func
def rows_of_one_head(A: T.Tensor((1, N, 1, N), "float16"), B: T.Tensor((N, N), "float16")):
    with T.Kernel(1, threads=128) as block:
        tile = T.alloc_shared((N // 2, N), "float16")
        for k in T.Pipelined(2, num_stages=2):
            T.copy(A[block, k * N // 2 : (k + 1) * N // 2, block, :], tile)
            T.copy(tile, B[k * N // 2, 0])


def test_a_box_of_a_tensor_with_axes_of_one_element(run):
    A = rng.standard_normal((1, N, 1, N)).astype(np.float16)
    assert (run(rows_of_one_head, A=A)["B"] == A.reshape(N, N)).all()
