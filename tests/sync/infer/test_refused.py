"""Programs for which nothing can be inferred: the access, its line and what is legal."""

import inspect
import re

import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tileweave import language as W
from tileweave import passes
from tileweave.passes.sync.infer.infer_sync import explained

F32 = "float32"
N = 8


def grouped(func, ranks=2, configs=None):
    func, _ = passes.split_options(func, configs or {})
    return passes.run_group(tvm.IRModule({"program": func}), ranks, 1 << 40)


CASES = []


def refused(message, ranks=2, **options):
    """The program that the function below makes is refused with ``message``, which ends with the
    lines marked ``# HERE``."""

    def put(make):
        configs = {f"tileweave.{name}": value for name, value in options.items()}
        CASES.append(pytest.param(make, message, ranks, configs, id=make.__name__))
        return make

    return put


def marked_lines(make) -> set[int]:
    text, first = inspect.getsourcelines(make)
    return {first + n for n, line in enumerate(text) if line.rstrip().endswith("# HERE")}


@refused(
    "T.copy reads S[1 - W.rank(), 0]: S[0, 0:8] is read, but no rank writes it in this launch; "
    "expected a write of it in the same program, or W.unordered"
)
def nobody_writes():
    @T.prim_func
    def program(S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            T.copy(S[1 - W.rank(), 0], Y)  # HERE

    return program


@refused("T.copy reads S[me, 0]: S[0, 4:8] is read, but no rank writes it in this launch")
def half_is_written():
    @T.prim_func
    def program(S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            me = W.rank()
            for i in T.Parallel(N // 2):
                S[1 - me, i] = Y[i]
            T.copy(S[me, 0], Y)  # HERE

    return program


@refused("S[0, 0:8] is written 2 times in one launch, by rank 1; expected once")
def two_blocks_write():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(2, threads=32):
            other = 1 - W.rank()
            T.copy(X, S[other, 0])  # HERE
            T.copy(S[W.rank(), 0], Y)

    return program


@refused(
    "T.copy writes S[1 - W.rank(), 0]: S[0, 0:8] is written 4 times in one launch, by rank 1; "
    "expected once, or a read of each before the next"
)
def written_again_unread():
    @T.prim_func
    def program(X: T.Tensor((4, N), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((4, N), F32)):
        with T.Kernel(2, threads=32) as block:
            for r in T.serial(4):
                if block == 0:
                    T.copy(X[r, 0:N], S[1 - W.rank(), 0])  # HERE
            for r in T.serial(4):
                if block == 1:
                    T.copy(S[W.rank(), 0], Y[r, 0:N])

    return program


@refused(
    "T.copy reads S[W.rank(), 0], which is in some iterations what T.copy writes S[1 - W.rank(), "
    "0], in others what T.copy writes S[1 - W.rank(), 0], in versions that no loop counts; "
    "expected another tensor for it, or explicit signals and waits"
)
def reads_of_either_version():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((4, N), F32)):
        with T.Kernel(1, threads=32):
            T.copy(X, S[1 - W.rank(), 0])  # HERE
            for r in T.serial(4):
                T.copy(S[W.rank(), 0], Y[r, 0:N])  # HERE
                if r == 1:
                    T.copy(X, S[1 - W.rank(), 0])  # HERE

    return program


@refused(
    "T.copy reads S[W.rank(), 0]: S[0, 0:8] is written 4 times in one launch, all of them after "
    "this access; expected a write before it"
)
def reads_before_all_versions():
    @T.prim_func
    def program(S: W.Symmetric((N,), F32)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((N,), F32)
            for _ in T.serial(4):
                T.copy(S[W.rank(), 0], tile)  # HERE
                T.copy(tile, S[1 - W.rank(), 0])  # HERE

    return program


@refused(
    "a load reads S[W.rank(), i], and a store writes S[1 - W.rank(), i] in one statement of all "
    "threads, and S[0, 0:8] is written 4 times in one launch: the read may see either version"
)
def two_versions_in_one_statement():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            T.copy(X, S[1 - W.rank(), 0])
            for _ in T.serial(3):
                for i in T.Parallel(N):  # HERE
                    S[1 - W.rank(), i] = S[W.rank(), i] + 1.0
            T.copy(S[W.rank(), 0], Y)

    return program


@refused(
    "T.copy reads S[W.rank(), 0], and T.atomic_add adds to S[1 - W.rank(), 0] after that, and "
    "S[0, 0:8] is written 4 times in one launch: the read may see either version"
)
def adds_to_what_is_read():
    @T.prim_func
    def program(S: W.Symmetric((N,), F32), Y: T.Tensor((4, N), F32)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((N,), F32)
            for r in T.serial(4):
                T.clear(tile)
                T.copy(tile, S[W.rank(), 0])
                T.copy(S[W.rank(), 0], Y[r, 0:N])  # HERE
                T.atomic_add(S[1 - W.rank(), 0], tile)  # HERE

    return program


def rounds():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            S = W.alloc_symmetric((N,), F32)
            tile = T.alloc_shared((N,), F32)
            T.copy(X, tile)
            for _ in T.serial(100):
                T.copy(tile, S[1 - W.rank(), 0])  # HERE
                T.copy(S[W.rank(), 0], tile)
            T.copy(tile, Y)

    return program


refused(
    "T.copy writes S[1 - W.rank(), 0] in 100 versions in one launch, whose copies need 3200 bytes; "
    "expected at most 3199 (tileweave.round_bytes), fewer versions, or a smaller tensor",
    round_bytes=3199,
)(rounds)


def test_enough_memory_for_rounds():
    grouped(rounds(), configs={"tileweave.round_bytes": 3200})


@refused(
    "T.copy writes S[1 - W.rank(), 0] again in the same launch, and the version of S[W.rank(), "
    "0], which is not synchronized, is unknown; expected W.alloc_symmetric, another tensor"
)
def versions_and_unordered():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            for _ in T.serial(2):
                T.copy(X, S[1 - W.rank(), 0])  # HERE
                T.copy(S[W.rank(), 0:N], Y)
            W.unordered(S[W.rank(), 0], reason="the last round will do")
            T.copy(S[W.rank(), 0], Y)

    return program


@refused(
    "T.copy writes S[1 - W.rank(), r % 3, 0], and one part of it is the last version, for the "
    "caller, and another part is written again; expected W.alloc_symmetric, another tensor for it"
)
def last_in_no_order():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((3, N), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            for r in T.serial(6):
                if r != 4:
                    T.copy(X, S[1 - W.rank(), r % 3, 0])  # HERE
                    T.copy(S[W.rank(), r % 3, 0], Y)

    return program


@refused("T.call_extern writes S[1 - W.rank(), 0], and reads the previous version there")
def two_versions_of_one_region():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            T.copy(X, S[1 - W.rank(), 0])
            for _ in T.serial(2):
                T.call_extern("handle", "f", T.access_ptr(S[1 - W.rank(), 0], "rw", N))  # HERE
            T.copy(S[W.rank(), 0], Y)

    return program


@refused("S[0, 0:8] is written 2 times in one launch, by rank 0 and 1; expected once")
def two_ranks_write():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            if W.rank() == 0:
                T.copy(X, S[0, 0])  # HERE
            else:
                T.copy(X, S[0, 0])  # HERE
            if W.rank() == 0:
                T.copy(S[0, 0], Y)

    return program


def readers_first(pieces=1):
    @T.prim_func
    def program(X: T.Tensor((N, N), F32), S: W.Symmetric((N, N), F32), Y: T.Tensor((N, N), F32)):
        with T.Kernel(2 * N, threads=32) as block:
            tile = T.alloc_shared((1, N), F32)
            if block < N:
                T.copy(S[W.rank(), block, 0], tile)  # HERE
                T.copy(tile, Y[block, 0])
            else:
                T.copy(X[block - N, 0], tile)
                for at in T.serial(0, N, N // pieces):
                    T.copy(tile[0:1, at : at + N // pieces], S[1 - W.rank(), block - N, at])

    return program


refused(
    "T.copy reads S[W.rank(), bx, 0]: block 0 of rank 0 waits for block 8 of rank 1, and with 8 "
    "resident blocks a rank (tileweave.resident_blocks) the launch deadlocks; expected blocks to "
    "wait for earlier blocks, or fewer waiting blocks",
    resident_blocks=8,
)(readers_first)


@pytest.mark.parametrize("pieces", [1, 2])
def test_enough_resident_blocks(pieces):
    grouped(readers_first(pieces), configs={"tileweave.resident_blocks": 9})


@refused(
    "T.copy writes S[where, bx, 0], which depends on to[bx], which is known only at run time; "
    "expected indices and conditions made of the rank, block indices and loops, explicit signals "
    "and waits, or W.unordered"
)
def destination_from_memory():
    @T.prim_func
    def program(to: T.Tensor((4,), "int32"), S: W.Symmetric((4, N), F32), Y: T.Tensor((4, N), F32)):
        with T.Kernel(4, threads=32) as block:
            tile = T.alloc_shared((1, N), F32)
            where = to[block]
            T.copy(Y[block, 0], tile)
            T.copy(tile, S[where, block, 0])  # HERE
            T.copy(S[W.rank(), block, 0], tile)

    return program


@refused(
    "T.copy writes S[1 - W.rank(), 0], which depends on go[0], which is known only at run time"
)
def writes_if_memory_says_so():
    @T.prim_func
    def program(go: T.Tensor((1,), "int32"), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            if go[0] > 0:
                T.copy(Y, S[1 - W.rank(), 0])  # HERE
            T.copy(S[W.rank(), 0], Y)

    return program


@refused(
    "T.copy reads S[W.rank(), owner, 0]: S[0, 0, 0:8] may be read, but no rank writes it in this "
    "launch; expected a write of it in the same program, or W.unordered"
)
def nobody_writes_one_of_the_places():
    @T.prim_func
    def program(at: T.Tensor((1,), "int32"), S: W.Symmetric((2, N), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            owner = at[0]
            T.copy(Y, S[1 - W.rank(), W.rank(), 0])
            T.copy(S[W.rank(), owner, 0], Y)  # HERE

    return program


@refused("a load reads S[at[i], i], which depends on at[i], which is known only at run time")
def each_thread_reads_from_another_rank():
    @T.prim_func
    def program(at: T.Tensor((N,), "int32"), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            T.copy(Y, S[W.rank(), 0])
            for i in T.Parallel(N):  # HERE
                Y[i] = S[at[i], i]

    return program


@refused("which depends on rank[0], which is known only at run time")
def a_register_of_each_thread_says_the_rank():
    @T.prim_func
    def program(at: T.Tensor((N,), "int32"), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            rank = T.alloc_local((1,), "int32")
            i = T.get_thread_binding()
            T.copy(Y, S[W.rank(), 0])
            rank[0] = at[i % N]
            Y[i % N] = S[rank[0], 0]  # HERE

    return program


@refused("T.copy reads S[1 - W.rank(), 0], which depends on n, which is known only at run time")
def blocks_of_the_launch_from_the_caller():
    @T.prim_func
    def program(n: T.int32, S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(n, threads=32):
            T.copy(S[1 - W.rank(), 0], Y)  # HERE

    return program


@refused("T.copy reads S[me, place, 0]: its granules of 1 x 8 elements receive 8 to 16 elements")
def places_that_get_more_and_less():
    @T.prim_func
    def program(at: T.Tensor((1,), "int32"), S: W.Symmetric((2, N), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((2, N), F32)
            me, place = W.rank(), at[0]
            for row in T.serial(2):
                T.copy(tile[row : row + 1, :], S[me, row, 0])
            T.atomic_add(S[1 - me, 0, 0], tile[0:1, :])
            T.atomic_add(S[1 - me, 1, 0], tile[0:1, :])
            T.atomic_add(S[me, 1, 0], tile[0:1, :])
            T.copy(S[me, place, 0], Y)  # HERE

    return program


@refused(
    "T.copy writes S[1 - W.rank(), 0], and a second kernel of the program begins; expected one "
    "T.Kernel in a program that accesses symmetric tensors"
)
def two_kernels():
    @T.prim_func
    def program(S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            T.copy(Y, S[1 - W.rank(), 0])  # HERE
        with T.Kernel(1, threads=32):  # HERE
            T.copy(S[W.rank(), 0], Y)

    return program


@refused(
    "T.copy writes S[(W.rank() + 1) % 3, 0]: tileweave.reuse=double_buffer is not sufficient: "
    "rank 0 writes it for rank 1 and does not wait for anything from that rank in the same "
    "launch; expected auto, barrier or credit",
    ranks=3,
    reuse="double_buffer",
)
def two_buffers_in_a_ring():
    @T.prim_func
    def program(Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            S = W.alloc_symmetric((N,), F32)
            T.copy(Y, S[(W.rank() + 1) % 3, 0])  # HERE
            T.copy(S[W.rank(), 0], Y)

    return program


def tiles():
    @T.prim_func
    def program(S: W.Symmetric((16, N), F32), Y: T.Tensor((16, N), F32)):
        with T.Kernel(4, threads=32) as block:
            tile = T.alloc_shared((4, N), F32)
            T.copy(Y[block * 4, 0], tile)
            T.copy(tile, S[1 - W.rank(), block * 4, 0])  # HERE
            T.copy(S[W.rank(), block * 4, 0], tile)
            T.copy(tile, Y[block * 4, 0])

    return program


refused(
    "T.copy writes S[1 - W.rank(), bx * 4, 0]: tileweave.granule=(6, 8) of S divides what it "
    "accesses on axis 0; expected a multiple of 4 there",
    granule={"S": (6, 8)},
)(tiles)


@pytest.mark.parametrize(
    ("granule", "message"),
    [
        ({"S": (4,)}, "tileweave.granule=(4,) of S has 1 axes; expected 2"),
        ({"R": (4, 8)}, "tileweave.granule: 'R' is no tensor that ranks exchange; expected 'S'"),
    ],
)
def test_granules_that_fit_nothing(granule, message):
    with pytest.raises(tw.LanguageError, match=re.escape(message)):
        grouped(tiles(), configs={"tileweave.granule": granule})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reus", "auto", "tileweave.reus; expected tileweave.reuse, tileweave.granule"),
        ("reuse", "fast", "tileweave.reuse='fast'; expected 'auto' or 'double_buffer'"),
        ("verify", "no", "tileweave.verify='no'; expected 'error' or 'warn' or 'off'"),
        ("resident_blocks", 0, "tileweave.resident_blocks=0; expected a positive integer"),
        ("granule", [1], "tileweave.granule=[1]; expected a dict, tensor name -> elements"),
        ("granule", {"S": (0,)}, "tileweave.granule={'S': (0,)}; expected a dict, tensor name"),
        ("round_bytes", -1, "tileweave.round_bytes=-1; expected bytes, 0 or more"),
        ("delays", -1, "tileweave.delays=-1; expected an integer, 0 or more"),
    ],
)
def test_options(name, value, message):
    with pytest.raises(tw.TileWeaveError, match=re.escape(f"pass_configs: {message}")):
        grouped(tiles(), configs={f"tileweave.{name}": value})


@refused("T.copy writes S[W.rank() + 1, 0], which has rank index 2; expected 0 to 1")
def after_the_last_rank():
    @T.prim_func
    def program(S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            T.copy(Y, S[W.rank() + 1, 0])  # HERE
            T.copy(S[W.rank(), 0], Y)

    return program


@refused("T.atomic_add adds to S[0, i]: S[0, 0:8] is added to, but no rank clears it first")
def an_element_added_to_what_nobody_clears():
    @T.prim_func
    def program(S: W.Symmetric((8,), F32), Y: T.Tensor((8,), F32)):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(8):  # HERE
                T.atomic_add(S[0, i], 1.0)
            T.copy(S[0, 0:8], Y)

    return program


@refused("T.atomic_add adds to S[0, 0]: S[0, 0:8] is added to, but no rank clears it first")
def nobody_clears():
    @T.prim_func
    def program(S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((N,), F32)
            T.copy(Y, tile)
            T.atomic_add(S[0, 0], tile)  # HERE

    return program


@refused(
    "T.copy writes S[1 - W.rank(), 0], which repeats while the condition i < n[0] of its "
    "loop holds; expected a loop over a range"
)
def unknown_rounds():
    @T.prim_func
    def program(n: T.Tensor((1,), "int32"), S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            i = T.alloc_var("int32")
            i = 0
            while i < n[0]:
                T.copy(Y, S[1 - W.rank(), 0])  # HERE
                i = i + 1
            T.copy(S[W.rank(), 0], Y)

    return program


@refused(
    "which depends on m, which is known only at run time; expected indices and conditions made "
    "of the rank, block indices and loops, or T.dynamic('n'), T.dynamic('m') as extents of tensors "
    "instead of scalar parameters, explicit signals"
)
def scalars_that_may_be_sizes():
    @T.prim_func
    def program(
        n: T.int32, k: T.int32, m: T.int32, S: W.Symmetric((4, N), F32), Y: T.Tensor((4, N), F32)
    ):
        with T.Kernel(m, threads=32):
            tile = T.alloc_shared((1, N), F32)
            last = n - 1
            for i in T.serial(last):
                T.copy(tile, S[1 - W.rank(), i, 0])  # HERE
            T.copy(S[W.rank(), 0, 0], tile)
            Y[0, 0] = T.cast(k, F32)

    return program


@refused("which depends on n, which is known only at run time")
def rounds_from_the_caller():
    @T.prim_func
    def program(n: T.int32, S: W.Symmetric((4, N), F32), Y: T.Tensor((4, N), F32)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((1, N), F32)
            for i in T.serial(n):
                T.copy(tile, S[1 - W.rank(), i, 0])  # HERE
            T.copy(S[W.rank(), 0, 0], tile)

    return program


@refused("S[1 - W.rank(), i * 2], which touches elements that do not fill a box; expected")
def every_second_element():
    @T.prim_func
    def program(S: W.Symmetric((2 * N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):  # HERE
                S[1 - W.rank(), i * 2] = Y[i]
            for i in T.Parallel(N):
                Y[i] = S[W.rank(), i * 2]

    return program


@refused("W.put_block writes S[1 - W.rank(), 0, 4], which extends past the end of a row; expected")
def over_the_end_of_a_row():
    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
        with T.Kernel(1, threads=32):
            W.put_block(X[0], S[1 - W.rank(), 0, 4], N)  # HERE
            T.copy(S[W.rank(), 0, 0], Y)

    return program


@refused(
    "T.copy writes S[1 - W.rank(), 0, 0], which depends on rows, which is known only at run time"
)
def an_extent_from_the_caller():
    rows = T.dynamic("rows")

    @T.prim_func
    def program(S: W.Symmetric((rows, N), F32), Y: T.Tensor((1, N), F32)):
        with T.Kernel(1, threads=32):
            T.copy(Y, S[1 - W.rank(), 0, 0])  # HERE
            T.copy(S[W.rank(), 0, 0], Y)

    return program


@refused("S[W.rank()]: block 0 of rank 0 waits for block 0 of rank 1, and with 132 resident blocks")
def one_number_by_one_thread():
    """A tensor of one number a rank is no exception: what one thread does is ordered as a whole."""

    @T.prim_func
    def program(S: W.Symmetric((), F32), Y: T.Tensor((1,), F32)):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:  # HERE
                S[1 - W.rank()] = Y[0]
                Y[0] = S[W.rank()]

    return program


@pytest.mark.parametrize(("make", "message", "ranks", "configs"), CASES)
def test_refused(make, message, ranks, configs):
    with pytest.raises(tw.LanguageError) as error:
        grouped(make(), ranks, configs)
    assert message in str(error.value)
    named = {int(n) for n in re.findall(r"test_refused\.py:(\d+)", str(error.value))}
    assert marked_lines(make) == named, str(error.value)


@pytest.mark.parametrize("shape", [(0,), (-3, N), ("n",)])
def test_scratch_without_positive_extents(shape):
    with pytest.raises(tw.LanguageError, match=r"alloc_symmetric: shape=.*expected positive const"):

        @T.prim_func
        def program(Y: T.Tensor((N,), F32)):
            with T.Kernel(1, threads=32):
                S = W.alloc_symmetric(shape, F32)
                T.copy(Y, S[W.rank(), 0])


def test_a_rank_s_own_tensor_may_have_the_stride_of_the_heap():
    """Every rank writes its own ``Y``, which is no symmetric tensor for all that."""
    rows, stride = 4, 1 << 10

    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((rows, 256), F32)):
        with T.Kernel(1, threads=32):
            T.copy(X, S[1 - W.rank(), 0])
            for row in T.serial(rows):
                T.copy(S[W.rank(), 0], Y[row, 0:N])

    mod = passes.run_group(tvm.IRModule({"p": program}), 2, stride, passes.PREPARE_PASSES)
    _, found = explained(mod["p"], 2, stride)
    kinds = {(op.kind, op.tensor) for op in found.ops}
    assert kinds == {("signal", "S"), ("wait", "S"), ("signal", "started")}
