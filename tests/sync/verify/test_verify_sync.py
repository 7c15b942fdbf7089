"""Programs with explicit synchronization: which faults the compiler refuses."""

import inspect
import warnings

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm
from tvm import tirx

import tileweave as tw
from tests.corpus import FAULTS, PROGRAMS
from tests.factory import factory
from tests.releases import names_line, needs_lines
from tileweave import language as W
from tileweave import passes
from tileweave.passes import dynamic_sizes, with_sizes
from tileweave.passes.sync.verify import conflicts, launches
from tileweave.passes.sync.verify.verification import find_fault
from tileweave.runtime.plans.parameters import shapes_of

STRIDE = 1 << 40
N = 32

REFUSED = {
    # the data is not announced, or too weakly
    "flag_before_data": "no signal follows it (the W.signal before it",
    "relaxed_signal": "has sem='relaxed'; expected 'release'",
    "gpu_scope_signal": "has scope='gpu'; expected 'sys'",
    "cta_scope_signal": "has scope='cta'; expected 'sys'",
    "signal_to_oneself": "does not wait for what the writer signals",
    "signal_to_the_wrong_rank": "does not wait for what the writer signals",
    "no_fence": "has sem='relaxed'; expected 'release'",
    "fence_of_the_block": "has scope='cta'; expected 'sys'",
    "fence_of_the_gpu": "has scope='gpu'; expected 'sys'",
    "flag_stored_at_gpu_scope": "has scope='gpu'; expected 'sys'",
    "bulk_store_only_read": "has sem='relaxed'; expected 'release'",
    "tile_store_and_relaxed_flag": "has sem='relaxed'; expected 'release'",
    "put_block_and_relaxed_flag": "has sem='relaxed'; expected 'release'",
    "ll_flag_in_another_word": "has sem='relaxed'; expected 'release'",
    "tail_not_counted": "does not wait for what the writer signals",
    # the reader does not wait, or too weakly
    "no_wait": "no wait comes before it (the W.sync_ranks after it",
    "load_before_the_wait": "no wait comes before it (the W.wait_reached after it",
    "get_block_before_the_signal": "no wait comes before it (the W.wait_reached after it",
    "relaxed_wait": "has sem='relaxed'; expected 'acquire'",
    "gpu_scope_wait": "has scope='gpu'; expected 'sys'",
    "spin_on_relaxed_loads": "has sem='relaxed'; expected 'acquire'",
    "spin_at_gpu_scope": "has scope='gpu'; expected 'sys'",
    "relaxed_relay": "has sem='relaxed'; expected 'acquire'",
    "wait_by_some_blocks": "no wait comes before it",
    "rank_missing_in_the_barrier": "does not wait for what the writer signals",
    "count_too_low": "does not wait for what the writer signals",
    "count_off_by_an_epoch": "does not wait for what the writer signals",
    "barrier_of_the_grid_across_ranks": "W.sync_grid() before it does not wait",
    "barrier_of_ranks_by_one_block": "no wait comes before it",
    # no rank signals
    "no_signal": "which no rank signals",
    "signal_in_one_branch": "which no rank signals",
    "wait_for_the_wrong_flag": "which no rank signals",
    # the next launch
    "single_buffer_without_credit": "may still be reading in the launch before",
    "wrong_parity": "may still be reading in the launch before",
    "two_buffers_in_a_ring_of_three": "may still be reading in the launch 2 before it",
    "credit_before_the_read": "may still be reading in the launch 2 before it",
    "relaxed_credit": "has sem='relaxed'; expected 'release'",
    "own_memory_changed_under_a_get": "may still be reading in the launch before",
}
"""Of the faults that the simulator finds, those that need no run, and what is said of them."""


def grouped(func, ranks, configs=None):
    func, _ = passes.split_options(func, configs or {})
    mod = tvm.IRModule({"program": func})
    (func,) = passes.run_group(mod, ranks, STRIDE).functions.values()
    return func


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_refused_faults(case):
    if case.name not in REFUSED:
        grouped(case.make(True), case.ranks)
        return
    with pytest.raises(tw.LanguageError) as error:
        grouped(case.make(True), case.ranks)
    message = str(error.value)
    assert REFUSED[case.name] in message
    assert case.lines & case.lines_in(message), message


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_twins_are_accepted(case):
    grouped(case.make(False), case.ranks)


VERIFIABLE = [name for name in PROGRAMS if not name.startswith("ragged_")]
"""Programs without ragged tensors, whose waits await numbers that only the running kernel knows."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", VERIFIABLE)
def test_inferred_synchronization_is_accepted(name, ranks):
    """Verify the kernels, those of plans included. The copies of plans are no part of them: the
    simulator checks these in ``tests/sync/test_programs.py``."""
    program, sizes = PROGRAMS[name].make(ranks), PROGRAMS[name].sizes[:1]
    if isinstance(program, tirx.PrimFunc):
        kernels = [with_sizes(program, dict(zip(dynamic_sizes(program), sizes, strict=True)))]
    else:
        inputs, *_ = PROGRAMS[name].inputs(np.random.default_rng(0), ranks)
        shapes = {tensor: np.shape(value) for tensor, value in inputs.items()}
        shapes = shapes_of(program.parameters, shapes, name)
        kernels = [launch.program for launch in program.launches(ranks, shapes, {})]
    for kernel in kernels:
        assert find_fault(grouped(kernel, ranks), ranks) == ("", [])


def racing():
    return FAULTS["no_wait"].make(True)


def test_warn():
    with pytest.warns(tw.SyncWarning, match="no wait comes before it"):
        grouped(racing(), 2, {"tileweave.verify": "warn"})


def test_warn_where_nothing_can_be_inferred():
    @T.prim_func
    def program(S: W.Symmetric((N,), "float32"), Y: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N):
            T.copy(S[(W.rank() + 1) % 2, 0], Y)

    with pytest.warns(tw.SyncWarning, match=r"no rank writes it(.|\n)*nothing orders its accesses"):
        func = grouped(program, 2, {"tileweave.verify": "warn"})
    assert len(func.params) == 2


def test_off():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grouped(racing(), 2, {"tileweave.verify": "off"})


def test_the_simulator_reports_refused_programs():
    with pytest.raises(tw.SimulationError, match="race"):
        case = FAULTS["no_wait"]
        program = case.make(True)
        tw.simulate(program, 2, case.inputs(program), schedules=20)
    with pytest.raises(tw.LanguageError, match="no wait comes before it"):
        error = {"tileweave.verify": "error"}
        tw.simulate(program, 2, case.inputs(program), pass_configs=error)


@factory
def exchange(
    mail: W.Symmetric((2, N), "int32"),
    flags: W.Symmetric((2,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
    given: T.int32,
    *,
    parity="data",
):
    """Two buffers in turn; ``parity`` says whether the epoch is in memory, a parameter, or
    constant."""
    turns = 1 if parity == "constant" else 2
    with T.Kernel(1, threads=N):
        me = W.rank()
        epoch = T.alloc_var("int32")
        epoch = {"memory": state[0], "given": given, "constant": T.int32(0)}[parity]
        half = epoch % 2
        for i in T.Parallel(N):
            mail[1 - me, half, i] = i
        W.signal(flags[1 - me, half])
        W.wait_reached(flags[me, half], given // turns + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, half, i]
        if T.get_thread_binding() == 0:
            state[0] = state[0] + 1


@pytest.mark.parametrize("parity", ["memory", "given"])
def test_an_epoch_may_come_from_memory_or_from_the_caller(parity):
    grouped(exchange(parity), 2)


def test_buffers_that_do_not_alternate():
    with pytest.raises(tw.LanguageError, match="may still be reading"):
        grouped(exchange("constant"), 2)


def test_flags_that_the_caller_resets_are_judged_in_one_launch():
    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"), flags: W.Symmetric((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=N):
            me = W.rank()
            for i in T.Parallel(N):
                mail[1 - me, i] = i
            W.signal(flags[1 - me, 0])
            W.wait_reached(flags[me, 0], 1)
            for i in T.Parallel(N):
                out[i] = mail[me, i]

    grouped(program, 2)


def test_data_dependent_accesses_are_not_verified():
    @T.prim_func
    def program(
        to: T.Tensor((4,), "int32"), mail: W.Symmetric((4, N), "int32"),
        flags: W.Symmetric((1,), "int32"), out: T.Tensor((N,), "int32"),
    ):  # fmt: skip
        with T.Kernel(4, threads=N) as block:
            for i in T.Parallel(N):
                mail[to[block], block, i] = i
            W.signal(flags[to[block], 0])
            W.sync_ranks()
            for i in T.Parallel(N):
                out[i] = mail[W.rank(), block, i]

    grouped(program, 2)


@factory
def in_two_kernels(ordered, mail: W.Symmetric((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=N):
        for i in T.Parallel(N):
            mail[1 - W.rank(), i] = i
        W.sync_ranks()
    with T.Kernel(2, threads=N):
        for i in T.Parallel(N):
            out[i] = mail[W.rank(), i]
    with T.Kernel(1, threads=N):
        if ordered:
            W.sync_ranks()


def test_kernels_of_one_program_follow_each_other():
    grouped(in_two_kernels(True), 2)
    with pytest.raises(tw.LanguageError, match="may still be reading in the launch before"):
        grouped(in_two_kernels(False), 2)


def test_large_grids():
    """Accesses and flags of many blocks are arrays, not lists."""

    @T.prim_func
    def program(
        mail: W.Symmetric((512, N), "int32"), flags: W.Symmetric((512,), "int32"),
        out: T.Tensor((512, N), "int32"), epoch: T.int32,
    ):  # fmt: skip
        with T.Kernel(512, threads=N) as block:
            me = W.rank()
            for i in T.Parallel(N):
                mail[(me + 1) % 4, block, i] = i
            W.signal(flags[(me + 1) % 4, block])
            W.wait_reached(flags[me, (block + 1) % 512], epoch + 1)
            for i in T.Parallel(N):
                out[block, i] = mail[me, block, i]

    with pytest.raises(tw.LanguageError, match="does not wait for what the writer signals"):
        grouped(program, 4)


def rows_in_parts(unordered: bool):
    """Each block sends a row in eight parts, with a signal for each, and waits for all."""

    @T.prim_func
    def program(
        mail: W.Symmetric((16, N), "int32"), flags: W.Symmetric((16,), "int32"),
        out: T.Tensor((16, N), "int32"), epoch: T.int32,
    ):  # fmt: skip
        with T.Kernel(16, threads=N) as bx:
            me = W.rank()
            part = T.alloc_shared((N // 8,), "int32")
            tile = T.alloc_shared((N,), "int32")
            T.clear(part)
            for turn in T.serial(8):
                T.copy(part, mail[1 - me, bx, turn * 4])  # part
                W.signal(flags[1 - me, bx])  # signal
            if not unordered:
                W.wait_reached(flags[me, bx], epoch * 8 + 8)
            T.copy(mail[me, bx, 0], tile)
            T.copy(tile, out[bx, 0])
            W.sync_ranks()

    return program


@needs_lines
@pytest.mark.parametrize(
    ("limit", "most", "line", "text"),
    [
        (launches, 255, "signal", "W.signal(flags[1 - me, bx]): 256 times on all ranks in one "
         "launch, more than the limit of 255"),
        (conflicts, 2047, "part", "T.copy writes mail[1 - me, bx, turn * 4]: 2048 cells into "
         "which its accesses divide it in the analyzed launches, more than the limit of 2047"),
    ],
)  # fmt: skip
def test_too_many_accesses_are_reported(monkeypatch, limit, most, line, text):
    """A part that is too large to verify is reported, and nothing is refused because of it."""
    program = rows_in_parts(unordered=True)
    with pytest.raises(tw.LanguageError, match="or another wait for a flag"):
        grouped(program, 2)
    monkeypatch.setattr(limit, "_MAX_COUNT", most)
    with pytest.warns(tw.SyncWarning) as caught:
        grouped(program, 2)
    lines, first = inspect.getsourcelines(rows_in_parts)
    at = first + next(n for n, code in enumerate(lines) if code.endswith(f"# {line}\n"))
    message = f"verify_sync of program: {text}; it is not verified\n --> {__file__}:{at}"
    assert message in [str(one.message) for one in caught]
    explanation = tw.explain(program, 2)
    (told,) = (o for o in explanation.unverified if o.line == at)
    assert (told.kind, told.reason) == ("unverified", text)
    _, listed = str(explanation).split("not verified:\n")
    assert f"  test_verify_sync.py:{at}  {told.tensor}: {text}\n" in f"{listed}\n"


def test_few_accesses_are_verified():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grouped(rows_in_parts(unordered=False), 2)
        assert tw.explain(rows_in_parts(unordered=False), 2).unverified == ()


@T.macro
def spin_on_cas(lock, ticket, sem):
    while W.atom_cas(lock[0, 0], 0, 1, scope="sys", sem=sem) != 0:
        pass


@T.macro
def spin_on_exch(lock, ticket, sem):
    while W.atom_exch(lock[0, 0], 1, scope="sys", sem=sem) != 0:
        pass


@T.macro
def spin_on_add(lock, ticket, sem):
    while W.atom_add(lock[0, 0], 0, scope="sys", sem=sem) != ticket:
        pass


@factory
def locked(
    spin,
    leave,
    lock: W.Symmetric((2,), "int32"),
    data: W.Symmetric((N,), "int32"),
    out: T.Tensor((N,), "int32"),
    *,
    sem="acquire",
):
    """Each rank adds one to data of rank 0 inside a lock that it enters by ``spin``."""
    with T.Kernel(1, threads=N):
        ticket = T.alloc_var("int32")
        if T.get_thread_binding() == 0:
            ticket = W.atom_add(lock[0, 1], 1, scope="sys")
            spin(lock, ticket, sem)
        T.sync_threads()
        for i in T.Parallel(N):
            data[0, i] = data[0, i] + 1
            out[i] = data[0, i]
        W.signal(lock[0, 0], 1 if leave == "add" else 0, op=leave)


@factory
def in_a_register(
    lock: W.Symmetric((1,), "int32"), data: W.Symmetric((N,), "int32"), *, sem="acquire"
):
    """A lock whose loop tests a register that holds the result of the operation."""
    with T.Kernel(1, threads=N):
        held = T.alloc_var("int32")
        if T.get_thread_binding() == 0:
            held = 1
            while held != 0:
                held = W.atom_cas(lock[0, 0], 0, 1, scope="sys", sem=sem)
        T.sync_threads()
        for i in T.Parallel(N):
            data[0, i] = data[0, i] + 1
        W.signal(lock[0, 0], 0, op="set")


LOCKS = {
    "cas": lambda sem: locked(spin_on_cas, "set", sem),
    "exch": lambda sem: locked(spin_on_exch, "set", sem),
    "add": lambda sem: locked(spin_on_add, "add", sem),
    "register": in_a_register,
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_spin_lock_orders_what_it_protects(name):
    program, ranks, epochs = LOCKS[name]("acquire"), 3, 2
    grouped(program, ranks)
    shapes = {"lock": 1 if name == "register" else 2, "data": N}
    inputs = [{n: np.zeros(s, np.int32) for n, s in shapes.items()} for _ in range(ranks)]
    outputs = tw.simulate(program, ranks, inputs, schedules=5, epochs=epochs)
    assert (outputs[0]["data"] == ranks * epochs).all()


@pytest.mark.parametrize("name", LOCKS)
def test_a_spin_lock_must_acquire(name):
    with pytest.raises(tw.LanguageError, match=r"W\.atom_.* has sem='relaxed'; expected 'acquire'"):
        grouped(LOCKS[name]("relaxed"), 3)


@factory
def work_list(
    S: W.Symmetric((8, N), "float32"),
    flags: W.Symmetric((8,), "int32"),
    head: W.Symmetric((1,), "int32"),
    out: T.Tensor((8, N), "float32"),
    epoch: T.int32,
):
    """The flags that a block signals depend on the tickets that it draws; a reader
    waits for all."""
    with T.Kernel(4, threads=N) as b:
        me = W.rank()
        item = T.alloc_var("int32")
        item = W.atom_add(head[me, 0], 1) - 8 * epoch
        while item < 8:
            for i in T.Parallel(N):
                S[1 - me, item, i] = i
            W.signal(flags[1 - me, item])
            item = W.atom_add(head[me, 0], 1) - 8 * epoch
        for k in T.serial(2):
            W.wait_reached(flags[me, 2 * b + k], epoch + 1)
            for i in T.Parallel(N):
                out[2 * b + k, i] = S[me, 2 * b + k, i]
        W.barrier_blocks()


def test_a_work_list_signals_what_it_draws():
    grouped(work_list(), 2)


@factory
def flag_from_a_table(
    S: W.Symmetric((4, N), "float32"),
    flags: W.Symmetric((4,), "int32"),
    table: T.Tensor((4,), "int32"),
    out: T.Tensor((4, N), "float32"),
    epoch: T.int32,
    *,
    waits=True,
):
    """Known data, and a flag whose index is data."""
    with T.Kernel(4, threads=N) as b:
        me = W.rank()
        for i in T.Parallel(N):
            S[1 - me, b, i] = i
        W.signal(flags[1 - me, table[b]])
        if waits:
            W.wait_reached(flags[me, table[b]], epoch + 1)
        for i in T.Parallel(N):
            out[b, i] = S[me, b, i]
        W.barrier_blocks()


def mixed(scope="sys", *, waits=False):
    @T.prim_func
    def program(
        X: T.Tensor((N,), "float32"), S: W.Symmetric((N,), "float32"),
        F: W.Symmetric((1,), "uint32"), Y: T.Tensor((N,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            T.copy(X, S[1 - W.rank(), 0])
            W.signal(F[1 - W.rank(), 0], 1, scope=scope)  # HERE
            if waits:
                W.wait_reached(F[W.rank(), 0], 1)
            T.copy(S[W.rank(), 0], Y)

    return program


def test_a_wait_for_a_flag_whose_place_depends_on_data_orders():
    grouped(flag_from_a_table(), 2)
    with pytest.raises(tw.LanguageError, match="no wait comes before it"):
        grouped(flag_from_a_table(waits=False), 2)


@T.prim_func
def without_a_wait(S: W.Symmetric((64,), "float32"), X: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            S[(W.rank() + 1) % 2, i] = X[i]
        for i in T.Parallel(64):
            X[i] = S[W.rank(), i]
        W.sync_ranks()


@needs_lines
def test_arrows_label_their_locations():
    with pytest.raises(tw.LanguageError) as error:
        tw.emit(without_a_wait, stage="tile", world_size=2)
    arrows = [line for line in str(error.value).splitlines() if " --> " in line]
    assert [arrow.split(" --> ")[0] for arrow in arrows] == [
        " read", " barrier", " write", "",  # the last is of the note about W.sync_ranks
    ]  # fmt: skip


def test_the_operation_that_disables_the_inference_is_named():
    """One explicit signal disables the inference. It is not named if only its
    qualifiers are wrong."""
    lines, first = inspect.getsourcelines(mixed)
    line = next(first + n for n, text in enumerate(lines) if "# HERE" in text)
    with pytest.raises(tw.LanguageError) as error:
        grouped(mixed(), 2)
    assert "no wait comes before it" in str(error.value)
    assert "(W.signal synchronizes explicitly, so the compiler inserts nothing" in str(error.value)
    assert names_line(str(error.value).splitlines()[-1], f"test_verify_sync.py:{line}")
    with pytest.raises(tw.LanguageError, match="scope='gpu'; expected 'sys'") as error:
        grouped(mixed("gpu", waits=True), 2)
    assert "synchronizes explicitly" not in str(error.value)
