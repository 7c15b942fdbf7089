"""Reads completely outside of their tensor, and axes with only one counter."""

import inspect
import warnings

import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.factory import factory
from tests.releases import RECORDS_LINES
from tileweave import language as W
from tileweave import passes
from tileweave.cli.main import main

N = 64


@factory
def passes_on(
    first,
    explicit,
    X: T.Tensor((N,), "float32"),
    S: W.Symmetric((N,), "float32"),
    Y: T.Tensor((N // 2,), "float32"),
    *,
    copies=False,
):
    """Each rank sends N numbers and reads half of them, from ``first`` on."""
    with T.Kernel(1, threads=32):
        me = W.rank()
        tile = T.alloc_shared((N,), "float32")
        half = T.alloc_shared((N // 2,), "float32")
        T.copy(X, tile)
        T.copy(tile, S[1 - me, 0])
        if explicit:
            W.sync_ranks()
        if copies:
            T.copy(S[me, first], half)  # read
            T.copy(half, Y)
        else:
            for i in T.Parallel(N // 2):  # read
                Y[i] = S[me, first + i]  # read
        if explicit:
            W.sync_ranks()


@factory
def tiles(
    read,
    X: T.Tensor((N,), "float32"),
    S: W.Symmetric((N,), "float32"),
    Y: T.Tensor((N,), "float32"),
):
    """Each rank sends tiles of 8 numbers; blocks read the range ``read``."""
    with T.Kernel(N // 8, threads=32) as b:
        tile = T.alloc_shared((8,), "float32")
        T.copy(X[b * 8], tile)
        T.copy(tile, S[(W.rank() + 1) % W.world_size(), b * 8])
        for i in T.Parallel(8):  # read
            Y[b * 8 + i] = S[W.rank(), read(b) + i]  # read


def warned(program):
    """Return the warnings of compiling a program for two ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tw.SyncWarning)
        passes.run_group(tvm.IRModule({"program": program}), 2, 1 << 40)
    return [str(w.message) for w in caught if issubclass(w.category, tw.SyncWarning)]


def lines_of(make):
    """Return ``--> file:line`` of the reads of a program."""
    lines, first = inspect.getsourcelines(make)
    numbers = [first + n for n, x in enumerate(lines) if x.endswith("# read\n")]
    return [f" --> {__file__}:{n}" if RECORDS_LINES else "" for n in numbers]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("first", [N, 3 * N // 2, 1000, -N // 2, -N])
def test_a_read_wholly_outside_is_named(first, explicit):
    (message,) = warned(passes_on(first, explicit))
    assert "S[me, " in message
    assert "in some iteration wholly outside of the tensor, where it yields zeros" in message
    assert message.endswith(tuple(lines_of(passes_on)[1:]))


@pytest.mark.parametrize("explicit", [False, True])
def test_a_copy_wholly_outside_is_named(explicit):
    (message,) = warned(passes_on(N, explicit, copies=True))
    assert message.startswith(f"T.copy reads S[me, {N}], in some iteration wholly outside")
    assert message.endswith(lines_of(passes_on)[0])


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("first", [0, 8, N // 2, 3 * N // 4])
def test_a_read_that_touches_the_tensor_is_not(first, explicit):
    assert warned(passes_on(first, explicit)) == []


def test_one_block_outside_is_enough():
    (message,) = warned(tiles(lambda b: b * 8 + 8))
    assert "wholly outside" in message


def test_tiles_that_overlap_the_sent_part_give_no_warning():
    assert warned(tiles(lambda b: b * 8)) == []


def test_a_counter_of_a_whole_axis_names_the_read():
    (message,) = warned(tiles(lambda b: b * 7))
    assert message.startswith("a load reads S[")
    assert f"no granule smaller than the {N} elements of axis 0 fits" in message
    assert message.endswith(tuple(lines_of(tiles)))


def test_the_command_line_prints_the_warning(tmp_path, capsys):
    source = inspect.getsource(passes_on)
    path = tmp_path / "outside.py"
    path.write_text(
        "import tilelang.language as T\nfrom tests.factory import factory\n"
        "from tileweave import language as W\nN = 64\n"
        f"{source}\nprogram = passes_on(1000, False)\n"
    )
    main(["simulate", f"{path}:program", "--ranks", "2", "--schedules", "1"])
    shown = capsys.readouterr().out
    assert "warning: a load reads S[me, 1000 + i], in some iteration wholly outside" in shown


def words_of_blocks(sessions, operation):
    """Each of four blocks synchronizes on words or flags of its own."""

    @T.prim_func
    def program(
        words: W.Symmetric((sessions * 4,), "uint32"),
        box: W.Symmetric((4, N), "int32"),
        out: T.Tensor((4, N), "int32"),
    ):
        with T.Kernel(4, threads=N) as block:
            me, tx = W.rank(), T.get_thread_binding()
            box[1 - me, block, tx] = me
            if operation == "sync_ranks":
                W.sync_ranks(words[me, block * 4])
            else:
                W.signal(words[1 - me, block * 4], 1)
                W.wait_reached(words[me, block * 4], 1)
            out[block, tx] = box[me, block, tx]
            W.sync_ranks()

    return program


@pytest.mark.parametrize(
    ("operation", "call"),
    [("sync_ranks", r"sync_ranks\(words\[me, "), ("signal", r"signal\(words\[1 - me, ")],
)
def test_flags_outside_of_their_tensor(operation, call):
    """The last block uses words after the tensor, which are other memory."""
    message = rf"W.{call}.*: index 12 of axis 1 is outside of words; expected 0 to 11"
    with pytest.raises(tw.TileWeaveError, match=message):
        tw.emit(words_of_blocks(3, operation), world_size=2)
    tw.emit(words_of_blocks(4, operation), world_size=2)
