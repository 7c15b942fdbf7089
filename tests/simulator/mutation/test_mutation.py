"""Each kind of change of a synchronization operation: where it is detected, and where it changes
nothing."""

import functools
import json
import re

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.modules import load_module
from tests.releases import needs_lines
from tileweave import language as W
from tileweave.cli.main import main

N = 32


@factory
def exchange(
    ordered_anyhow,
    mail: W.Symmetric((2, N), "int32"),
    flags: W.Symmetric((2,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    """Two buffers in turn with one flag each; with ``ordered_anyhow``, barriers order everything
    again."""
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
        half = epoch % 2
        for i in T.Parallel(N):
            mail[peer, half, i] = epoch * 1000 + me * 100 + i
        if ordered_anyhow:
            W.sync_ranks()
        W.signal(flags[peer, half])
        W.wait_reached(flags[me, half], epoch // 2 + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, half, i]
        if ordered_anyhow:
            W.sync_ranks()
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


@factory
def transfers(
    through_a_flag,
    mine: T.Tensor((N,), "int32"),
    mail: W.Symmetric((N,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    """A tile that is loaded, stored to the peer and published by an explicit fence."""
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size() if through_a_flag else me
        tile = T.alloc_shared((N,), "int32")
        loaded = T.alloc_barrier([1])
        if T.get_thread_binding() == 0:
            W.bulk_load(tile[0], mine[0], N, loaded[0])
            T.mbarrier_arrive(loaded[0])
            T.mbarrier_wait_parity(loaded[0], 0)
            W.bulk_store(mail[peer, 0], tile[0], N)
            W.bulk_commit()
            if through_a_flag:
                W.fence("sys", "sc")
                W.st(flags[peer, 0], 1, scope="sys")
            else:
                W.bulk_wait(0)
        if through_a_flag:
            W.wait_eq(flags[me, 0], 1)
            for i in T.Parallel(N):
                out[i] = mail[me, i]


@factory
def counted(last_waits, state: T.Tensor((2,), "uint32"), out: T.Tensor((2, 4), "uint32")):
    """Every block counts itself; the last one publishes the iteration to the next launch."""
    with T.Kernel(4, threads=N) as block:
        round_ = T.alloc_var("uint32")
        round_ = W.ld(state[0], sem="relaxed")
        out[T.Cast("int32", round_ % 2), block] = round_
        if last_waits:
            W.sync_grid()
        if T.get_thread_binding() == 0:
            before = W.atom_add(state[1], 1, sem="acq_rel")
            if before == 3:
                W.st(state[1], 0)
                W.st(state[0], round_ + 1)


def inputs_of(program, ranks):
    values = {}
    for b in program.buffer_map.values():
        if b.name != "mail":
            shape = [int(n) for n in b.shape[b.name == "flags" :]]
            values[b.name] = np.zeros(shape, str(b.dtype))
    return [values] * ranks


@functools.cache
def mutants(make, variant):
    ranks, epochs = {exchange: (2, 3), transfers: (2, 1), counted: (1, 3)}[make]
    program = make(variant)
    return tw.mutate(program, ranks, inputs_of(program, ranks), schedules=5, epochs=epochs)


def outcomes(make, variant, name):
    """Return the outcome of each effective mutant of this name: the fault, or that it survives."""
    results = [m for m in mutants(make, variant) if m.name == name and "proven" not in m.why]
    assert results, [m.name for m in mutants(make, variant)]
    return {m.why.partition(":")[0] if m.verdict == "killed" else m.verdict for m in results}


@pytest.mark.parametrize(
    ("make", "variant", "name", "kind"),
    [
        (exchange, False, "sync_threads drop", "race"),
        (exchange, False, "signal drop", "deadlock"),
        (exchange, False, "signal sem=relaxed", "race"),
        (exchange, False, "signal scope=gpu", "race"),
        (exchange, False, "signal scope=cta", "race"),
        (exchange, False, "signal value+1", "race"),
        (exchange, True, "signal value+1", "arrival"),
        (exchange, False, "signal axis 1 flipped", "deadlock"),
        (exchange, False, "signal rank+1", "race"),
        (exchange, False, "signal write after", "poison"),
        (exchange, False, "wait_reached drop", "race"),
        (exchange, False, "wait_reached sem=relaxed", "race"),
        (exchange, False, "wait_reached scope=gpu", "race"),
        (exchange, False, "wait_reached target+1", "deadlock"),
        (exchange, False, "wait_reached target-1", "race"),
        (exchange, False, "wait_reached epoch-1", "race"),
        (exchange, False, "wait_reached axis 1 flipped", "deadlock"),
        (exchange, False, "wait_reached read before", "race"),
        (transfers, True, "complete_bulk_stores drop", "race"),
        (transfers, True, "complete_bulk_stores read=True", "race"),
        (transfers, True, "fence drop", "race"),
        (transfers, True, "fence scope=gpu", "race"),
        (transfers, True, "st scope=gpu", "race"),
        (transfers, True, "mbarrier_arrive drop", "deadlock"),
        (transfers, True, "mbarrier_wait_parity drop", "poison"),
        (transfers, True, "mbarrier_wait_parity parity flipped", "deadlock"),
        (transfers, False, "bulk_commit drop", "reuse"),
        (transfers, False, "bulk_wait drop", "reuse"),
        (transfers, False, "bulk_wait n=1", "reuse"),
        (counted, False, "sync_threads drop", "race"),
        (counted, False, "atom_add sem=release", "race"),
        (counted, False, "atom_add sem=acquire", "race"),
        (counted, False, "atom_add sem=relaxed", "race"),
        (counted, False, "atom_add scope=cta", "race"),
        (counted, False, "atom_add value+1", "output"),
    ],
)
def test_fault_is_killed(make, variant, name, kind):
    assert outcomes(make, variant, name) == {kind}


@pytest.mark.parametrize(
    ("make", "variant", "name"),
    [
        (exchange, True, "sync_threads drop"),
        (exchange, True, "sync_ranks drop"),
        (exchange, True, "signal sem=relaxed"),
        (exchange, True, "signal rank+1"),
        (exchange, True, "wait_reached drop"),
        (exchange, True, "wait_reached sem=relaxed"),
        (exchange, True, "wait_reached target-1"),
        (exchange, True, "wait_reached read before"),
        (transfers, True, "bulk_commit drop"),
        (transfers, True, "fence sem=acq_rel"),
        (transfers, False, "bulk_wait read=True"),
        (counted, False, "ld scope=cta"),
        (counted, False, "atom_add write after"),
        (counted, True, "sync_grid drop"),
        (counted, True, "atom_add sem=relaxed"),
    ],
)
def test_equivalent_survives(make, variant, name):
    assert outcomes(make, variant, name) == {"survived"}


def test_operations_that_do_nothing_are_proven():
    idle = [m for m in mutants(exchange, False) if m.op == "complete_bulk_stores"]
    assert [m.verdict for m in idle] == ["explained", "explained"]
    assert {m.why for m in idle} == {"proven: no bulk store is in flight when it runs"}
    alone = tw.mutate(exchange(False), 1, inputs_of(exchange(False), 1), schedules=2, epochs=1)
    assert {m.name for m in alone if "rank" in m.change} == set()


PROGRAM = """
import tilelang.language as T
from tileweave import language as W

@T.prim_func
def ping(flags: W.Symmetric((1,), "uint32"), turn: T.uint32):
    with T.Kernel(1, threads=32) as _:
        peer = 1 - W.rank()
        W.signal(flags[peer, 0], op="add")
        W.wait_reached(flags[W.rank(), 0], turn + T.uint32(1))
        if W.rank() == 5:
            W.sync_ranks()
"""
SIGNAL = "W.signal(flags[peer, 0], op='add')"
NO_DATA = {"ping": {SIGNAL: {"signal sem=relaxed": "no data", "sync_threads drop": "no data"}}}


def ping(tmp_path, explanations=None, program=PROGRAM, sidecar="ping.equivalent.json", **arguments):
    """Return the mutants of a program with a sidecar file, by name."""
    file = tmp_path / "ping.py"
    file.write_text(program)
    if explanations is not None:
        (tmp_path / sidecar).write_text(json.dumps(explanations, indent=2))
    inputs = [{"flags": np.zeros(1, np.uint32), "turn": lambda e: e}] * 2
    mutants = tw.mutate(load_module(file).ping, 2, inputs, schedules=3, **arguments)
    return {m.name: m for m in mutants if "proven" not in m.why or m.op == "sync_ranks"}


@needs_lines
def test_without_a_sidecar_file_a_survivor_is_unexplained(tmp_path):
    mutants = ping(tmp_path)
    assert mutants["signal sem=relaxed"].verdict == "survived"
    assert not mutants["signal sem=relaxed"].is_accounted_for
    assert mutants["sync_ranks drop"].why == "proven: no block of any rank reaches it"
    assert mutants["wait_reached turn-1"].verdict == "survived"
    assert (mutants["signal drop"].line, mutants["signal drop"].seed) == (9, 0)
    assert (mutants["signal drop"].function, mutants["signal drop"].statement) == ("ping", SIGNAL)


@needs_lines
@pytest.mark.parametrize(
    "program",
    [
        PROGRAM,
        PROGRAM.replace("        peer", "        # The peer:\n\n        peer"),
        PROGRAM.replace('flags[peer, 0], op="add")', "\n  flags[peer,0], op='add',\n  )  # on"),
    ],
)
@pytest.mark.parametrize("statement", [SIGNAL, 'W.signal(flags[peer,0], op="add")'])
def test_a_sidecar_file_explains(tmp_path, program, statement):
    mutants = ping(tmp_path, {"ping": {statement: NO_DATA["ping"][SIGNAL]}}, program)
    for name in ("signal sem=relaxed", "sync_threads drop"):
        assert (mutants[name].verdict, mutants[name].why) == ("explained", "no data")
    assert mutants["signal drop"].verdict == "killed"
    assert mutants["wait_reached sem=relaxed"].verdict == "survived"


@needs_lines
def test_a_sidecar_file_may_have_any_path(tmp_path):
    mutants = ping(tmp_path, NO_DATA, sidecar="x.json", equivalent=tmp_path / "x.json")
    assert mutants["signal sem=relaxed"].verdict == "explained"


@needs_lines
def test_explanation_of_a_killed_mutant_is_wrong(tmp_path):
    mutants = ping(tmp_path, {"ping": {SIGNAL: {"signal drop": "who needs it"}}})
    assert mutants["signal drop"].verdict == "wrong explanation"
    assert "who needs it" in mutants["signal drop"].why and "deadlock" in mutants["signal drop"].why


@needs_lines
@pytest.mark.parametrize(
    ("function", "statement", "name", "expected"),
    [
        ("ping", SIGNAL, "signal sem=acquire", "signal sem=relaxed"),
        ("ping", "W.signal(flags[1, 0])", "signal sem=relaxed", SIGNAL),
        ("pong", SIGNAL, "signal sem=relaxed", "ping"),
    ],
)
def test_stale_explanation_is_wrong(tmp_path, function, statement, name, expected):
    mutants = ping(tmp_path, {"ping": {}, function: {statement: {name: "no such thing"}}})
    (wrong,) = [m for m in mutants.values() if m.verdict == "wrong explanation"]
    assert wrong.name == name and not wrong.is_accounted_for
    what, _, legal = wrong.why.partition("; expected ")
    assert statement in what and expected in legal
    assert wrong.file == str(tmp_path / "ping.equivalent.json")
    assert name in (tmp_path / "ping.equivalent.json").read_text().splitlines()[wrong.line - 1]


def test_explanations_of_other_programs_of_the_file_are_not_stale(tmp_path):
    program = PROGRAM + "def pong():\n    pass\n"
    mutants = ping(tmp_path, {**NO_DATA, "pong": {SIGNAL: {"signal drop": "its own"}}}, program)
    assert "wrong explanation" not in {m.verdict for m in mutants.values()}


@needs_lines
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[]", r"\[\]"),
        ('{"ping": 1}', "ping: 1"),
        ('{"ping": {"pass": ["signal drop"]}}', r"ping: pass: \['signal drop'\]"),
        ('{"ping": {"pass": {"signal drop": 2}}}', "ping: pass: signal drop: 2"),
    ],
)
def test_malformed_sidecar_file_is_refused(tmp_path, content, message):
    (tmp_path / "ping.equivalent.json").write_text(content)
    with pytest.raises(tw.TileWeaveError, match=f"ping.equivalent.json: {message}.*; expected "):
        ping(tmp_path)


def test_sidecar_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(tw.TileWeaveError, match=r"mutate: .*none.json: .*No such file.*; expected"):
        ping(tmp_path, equivalent=tmp_path / "none.json")


def test_a_faulty_program_is_refused():
    program = exchange(False)
    inputs = [{**values, "flags": np.ones(2, np.int32)} for values in inputs_of(program, 2)]
    with pytest.raises(tw.SimulationError):
        tw.mutate(program, 2, inputs, schedules=2)


@pytest.mark.parametrize("wrong", [{"schedules": 0}, {"epochs": 0}, {"world_size": 0}])
def test_wrong_arguments(wrong):
    arguments = {"world_size": 2, "inputs": inputs_of(exchange(False), 2), **wrong}
    with pytest.raises(tw.TileWeaveError, match="expected an integer from 1"):
        tw.mutate(exchange(False), **arguments)


def test_mutants_of_a_plan(tmp_path):
    program = exchange(False)

    @tw.plan
    def twice(
        steps: tw.PlanBuilder,
        mail: W.Symmetric((2, N), "int32"),
        flags: W.Symmetric((2,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        steps.launch(program, mail, flags, state, out)
        steps.launch(program, mail, flags, state, out)

    outcomes = tw.mutate(twice, 2, inputs_of(program, 2), schedules=2, epochs=2)
    assert [m.name for m in outcomes] == [m.name for m in mutants(exchange, False)]
    assert {m.verdict for m in outcomes if m.op == "signal"} == {"killed"}


def test_barrier_at_the_words_of_another_rank():
    @T.prim_func
    def program(words: W.Symmetric((4,), "uint32")):
        with T.Kernel(1, threads=N) as _:
            W.sync_ranks(words[W.rank(), 0])

    mutants = {m.name: m for m in tw.mutate(program, 2, [{"words": np.zeros(4, np.uint32)}] * 2)}
    assert mutants["sync_ranks rank+1"].verdict == "killed"
    assert mutants["sync_ranks rank+1"].why.startswith("arrival")
    assert mutants["sync_ranks drop"].verdict == "survived"  # there is nothing to order


def test_steps_of_a_plan():
    """A stream copies to the peer and signals it; another stream later copies the received data."""

    @T.prim_func
    def wait(flags: W.Symmetric((1,), "uint32"), epoch: T.int32):
        with T.Kernel(1, threads=32) as _:
            W.wait_reached(flags[W.rank(), 0], T.Cast("uint32", epoch + 1))

    @tw.plan
    def shift(
        p: tw.PlanBuilder,
        data: T.Tensor((N,), "int32"),
        mail: W.Symmetric((3, N), "int32"),
        flags: W.Symmetric((1,), "uint32"),
        out: T.Tensor((N,), "int32"),
        epoch: T.int32,
    ):
        (peer,) = p.peers()
        p.copy(mail[peer, epoch], data, stream="away")
        p.write_value(flags[peer, 0], epoch + 1, stream="away")
        p.launch(wait, flags, epoch, stream="here")
        p.wait_stream("here", stream="beside")
        p.copy(out, mail[p.rank, epoch], stream="beside")

    inputs = [
        {
            "data": np.arange(N, dtype=np.int32),
            "mail": np.zeros((3, N), np.int32),
            "flags": np.zeros(1, np.uint32),
            "epoch": lambda e: e,
        }
    ] * 2
    mutants = {m.name: m for m in tw.mutate(shift, 2, inputs, schedules=5)}
    kinds = {name: m.why.partition(":")[0] for name, m in mutants.items() if m.verdict == "killed"}
    assert kinds.items() >= {
        ("write_value drop", "deadlock"),
        ("write_value write after", "race"),
        ("write_value value+1", "race"),
        ("write_value value-1", "deadlock"),
        ("wait_stream drop", "race"),
        ("wait_reached drop", "race"),
    }
    assert {"fork drop", "join drop"} <= mutants.keys()


def test_streams_that_wait_for_values():
    """A stream copies what two blocks have written, and resets their counter."""

    @T.prim_func
    def fill(data: T.Tensor((2, N), "int32"), done: T.Tensor((1,), "uint32"), epoch: T.int32):
        with T.Kernel(2, threads=32) as block:
            for i in T.Parallel(N):
                data[block, i] = epoch * 100 + block + i
            W.signal(done[0])

    @tw.plan
    def send(
        p: tw.PlanBuilder,
        data: T.Tensor((2, N), "int32"),
        done: T.Tensor((1,), "uint32"),
        mail: W.Symmetric((2, N), "int32"),
        epoch: T.int32,
    ):
        p.launch(fill, data, done, epoch)
        p.wait_value(done[0], 2, stream="away")
        p.write_value(done[0], 0, stream="away")
        p.copy(mail[p.rank], data, stream="away")

    inputs = [{"done": np.zeros(1, np.uint32), "epoch": lambda e: e}]
    mutants = {m.name: m for m in tw.mutate(send, 1, inputs, schedules=5)}
    kinds = {name: m.why.partition(":")[0] for name, m in mutants.items() if m.verdict == "killed"}
    assert kinds.items() >= {
        ("wait_value drop", "race"),
        ("wait_value value+1", "deadlock"),
        ("wait_value value-1", "race"),
        ("write_value drop", "race"),
    }
    assert not {"wait_value write after", "wait_value rank+1"} & mutants.keys()


def command(tmp_path, *arguments):
    file = tmp_path / "ping.py"
    file.write_text(PROGRAM)
    return ["mutate", str(file), "--ranks", "2", "--schedules", "2", "--set", "turn=0", *arguments]


@needs_lines
def test_command_lists_mutants_and_fails_for_an_unexplained_one(tmp_path, capsys):
    with pytest.raises(SystemExit) as status:
        main(command(tmp_path))
    assert status.value.code == 1
    out = capsys.readouterr().out
    assert "ping.py:9: signal drop: killed: deadlock: ping.py:10 (seed 0)" in out
    assert "ping.py:9: signal sem=relaxed: survived: no fault and no other output" in out
    assert re.search(r"ping: 2 ranks, 2 schedules: \d+ explained, \d+ killed, \d+ survived", out)


def test_command_is_content_when_all_is_explained(tmp_path, capsys):
    arguments = [*command(tmp_path), "--json"]
    with pytest.raises(SystemExit):
        main(arguments)
    (ping,) = map(json.loads, capsys.readouterr().out.splitlines())
    survivors = [m for m in ping["mutants"] if m["verdict"] == "survived"]
    assert ping["unaccounted"] == len(survivors) > 4
    explained = {}
    for m in survivors:
        at = explained.setdefault(m["function"], {}).setdefault(m["statement"], {})
        at[f"{m['op']} {m['change']}"] = "no data"
    sidecar = tmp_path / "ping.equivalent.json"
    sidecar.write_text(json.dumps(explained))
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["unaccounted"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "turn"], "--set turn; expected NAME=NUMBER or NAME=epoch"),
        (["--set", "turn=much"], "--set turn=much; expected NAME=NUMBER or NAME=epoch"),
        (["--schedules", "0"], "schedules=0; expected an integer from 1"),
    ],
)
def test_command_refuses(tmp_path, capsys, arguments, message):
    assert main(command(tmp_path, *arguments)) == 1
    assert message in capsys.readouterr().err


def test_command_names_parameters_without_a_value(tmp_path, capsys):
    arguments = command(tmp_path)
    arguments = arguments[: arguments.index("--set")]
    assert main(arguments) == 1
    assert "no value for turn" in capsys.readouterr().err


def test_extents_are_set_like_scalars(tmp_path, capsys):
    file = tmp_path / "copies.py"
    file.write_text("""
import tilelang.language as T
from tileweave import language as W
n = T.dynamic("n")

@T.prim_func
def copies(src: T.Tensor((n,), "float32"), dst: T.Tensor((n,), "float32")):
    with T.Kernel(1, threads=32) as _:
        W.put_block(src[0], dst[0], n)
""")
    assert main(["simulate", str(file), "--ranks", "1", "--schedules", "1", "--set", "n=40"]) == 0
    assert main(["mutate", str(file), "--ranks", "1", "--schedules", "1", "--set", "n=40"]) == 0
    assert "no mutants" in capsys.readouterr().out
    assert main(["simulate", str(file), "--ranks", "1"]) == 1
    assert "n of src is dynamic" in capsys.readouterr().err
    assert main(["simulate", str(file), "--ranks", "1", "--set", "n=1.5"]) == 1
    assert "extent n=1.5; expected a whole number" in capsys.readouterr().err
