"""``tw.explain`` and ``tileweave explain``: every inserted operation, its line and its reason."""

import inspect
import json
from functools import cache
from xml.etree import ElementTree

import pytest

import tileweave as tw
from tests.corpus import PROGRAMS
from tileweave.cli.main import main
from tileweave.explain.operation import Operation
from tileweave.passes.ir.walk import calls_in, op_name


def line_of(case: str, text: str) -> int:
    """Return the line of this text in a program, which contains it once."""
    lines, first = inspect.getsourcelines(PROGRAMS[case].make)
    results = [first + n for n, line in enumerate(lines) if text in line]
    assert len(results) == 1, (text, results)
    return results[0]


@cache
def explained(case: str, ranks: int = 4) -> tw.Explanation:
    return explained_with(case, ranks)


def explained_with(case: str, ranks: int = 4, **options) -> tw.Explanation:
    return tw.explain(PROGRAMS[case].make(ranks), ranks, **options)


def of(explanation: tw.Explanation, **values) -> list:
    return [o for o in explanation.ops if all(getattr(o, k) == v for k, v in values.items())]


# kinds, tensors and lines


@pytest.mark.parametrize(
    ("case", "kind", "tensor", "text", "granule", "amount", "per_block"),
    [
        ("ring_shift", "signal", "S", "T.copy(tile, S[", "8 x 32", "1 x 256 elements", 1),
        ("ring_shift", "wait", "S", "T.copy(S[", "8 x 32", "1 x 256 elements", 1),
        ("ring_shift", "fence", "S", "T.copy(tile, S[", "", "", 1),
        ("ring_shift", "bulk_wait", "S", "T.copy(tile, S[", "", "", 1),
        ("ring_shift", "barrier", "S", "T.copy(tile, S[", "", "", 1),
        ("gemm_reduce_scatter", "signal", "parts", "T.copy(C_tile, parts", "16 x 16",
         "1 x 256 elements", 1),
        ("gemm_reduce_scatter", "wait", "parts", "T.copy(parts[", "16 x 16",
         "1 x 256 elements", 3),
        ("gemm_reduce_scatter", "bulk_wait", "parts", "T.copy(C_tile, parts", "", "", 1),
        ("all_gather_loads", "signal", "shared", "T.copy(tile, shared", "8 x 16",
         "1 x 128 elements", 4),
        ("two_producers", "wait", "S", "T.copy(S[", "4 x 32", "2 x 64 elements", 2),
    ],
)  # fmt: skip
def test_operation(case, kind, tensor, text, granule, amount, per_block):
    operations = of(explained(case), kind=kind, line=line_of(case, text))
    assert [(o.tensor, o.granule, o.amount, o.per_block) for o in operations] == [
        (tensor, granule, amount, per_block)
    ]
    file = inspect.getsourcefile(PROGRAMS[case].make)
    assert operations[0].file == file and operations[0].kernel == "program"


def test_counts_equal_those_of_the_program():
    """The counts equal those of the emitted program."""
    for case in ("ring_shift", "gemm_reduce_add", "halo_exchange", "persistent"):
        cuda = tw.emit(PROGRAMS[case].make(4))
        explanation = explained(case)
        waits = cuda.count("tw::wait_reached<")
        signals = cuda.count("tw::signal<") + cuda.count("tw::atom_add<")
        assert (len(of(explanation, kind="wait")), len(of(explanation, kind="signal"))) == (
            waits,
            signals,
        )
        assert len(of(explanation, kind="bulk_wait")) == cuda.count("tw::complete_bulk_stores(")
        assert len(of(explanation, kind="fence")) == cuda.count("tw::fence_proxy_async(")
        assert waits and signals and of(explanation, kind="barrier")


def test_order_around_one_access_is_that_of_the_program():
    at = line_of("ring_shift", "T.copy(tile, S[")
    kinds = [o.kind for o in of(explained("ring_shift"), line=at)]
    assert kinds == ["wait", "fence", "bulk_wait", "barrier", "signal"]


# reasons


def test_reasons_name_the_access_and_its_readers():
    explanation = explained("all_gather_loads")
    (signal,) = of(explanation, kind="signal", tensor="shared")
    assert signal.reason == "T.copy writes it for every rank"
    (wait,) = of(explanation, kind="wait")
    assert wait.reason == "T.copy reads the result of writes"


def test_a_wait_that_left_a_loop_says_so():
    explanation = explained("two_producers")
    (wait,) = of(explanation, kind="wait", flag="finished")
    assert wait.line == line_of("two_producers", "T.copy(tile, S[")
    assert wait.reason.endswith("has finished; moved out of the loop over part")
    (inside,) = of(explanation, kind="wait", flag="S_arrived")
    assert "moved" not in inside.reason and (wait.per_block, inside.per_block) == (1, 2)


def test_credits_and_the_count_of_launches_stand_at_the_kernel():
    explanation = explained("ring_shift")
    kernel = line_of("ring_shift", "with T.Kernel")
    signals = {o.tensor: o for o in of(explanation, kind="signal", line=kernel)}
    assert signals["started"].per_block == 3
    assert signals["started"].reason == (
        "the first block signals to the writers that this launch has started"
    )
    assert "counts the launch" in signals["launches"].reason


def test_exit_wait():
    (wait,) = of(explained("gemm_reduce_add"), kind="wait", granule="all")
    assert wait.amount == "8 x 256 elements"
    assert wait.reason == "the last block: the launch ends when all has arrived"


MERGED = """
import tilelang.language as T
from tileweave import language as W

@T.prim_func
def twice(X: T.Tensor((8, 32), "float32"), S: W.Symmetric((8, 32), "float32"),
          Y: T.Tensor((8, 32), "float32"), Z: T.Tensor((8, 32), "float32")):
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((8, 32), "float32")
        T.copy(X, tile)
        T.copy(tile, S[(W.rank() + 1) % 2, 0, 0])
        T.copy(S[W.rank(), 0, 0], tile)  # first
        T.copy(tile, Y)
        T.copy(S[W.rank(), 0, 0], tile)  # second
        T.copy(tile, Z)
"""


def lines_of(source: str) -> dict[str, int]:
    return {line.partition("# ")[2]: n for n, line in enumerate(source.splitlines(), 1)}


def test_merged_operations_are_listed(tmp_path, capsys):
    file = tmp_path / "twice.py"
    file.write_text(MERGED)
    assert main(["explain", str(file), "--ranks", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    lines = lines_of(MERGED)
    waits = [o["line"] for o in data["ops"] if o["flag"] == "S_arrived" and o["kind"] == "wait"]
    assert waits == [lines["first"]]
    (merged,) = data["merged"]
    assert (merged["kind"], merged["line"], merged["per_block"]) == ("wait", lines["second"], 0)
    assert merged["reason"] == f"the wait at {file}:{lines['first']} covers it, too"
    assert main(["explain", str(file), "--ranks", "2"]) == 0
    assert f"  twice.py:{lines['second']}  S: the wait at" in capsys.readouterr().out


# memory


def test_bytes_of_counters_and_scratch_memory():
    explanation = explained("gemm_reduce_scatter")
    # two buffers of (64 x 32) / (16 x 16) granules; launches, blocks
    assert explanation.flags == {"parts_arrived": 2 * 8 * 4, "launches": 2 * 4}
    assert explanation.flag_bytes == 72
    assert explanation.scratch == {"parts": 2 * 64 * 32 * 4}


@pytest.mark.parametrize(
    ("case", "configs", "reason"),
    [
        ("gemm_reduce_scatter", {}, "two buffers in turn: every writer waits for its readers"),
        ("gemm_reduce_scatter", {"tileweave.reuse": "credit"}, "writers wait for a credit"),
        ("gemm_reduce_scatter", {"tileweave.reuse": "barrier"}, "next launch has started"),
        ("gemm_reduce_add", {}, "writers first wait for what the readers write in the same launch"),
        ("ring_shift", {}, "writers wait until the owner's next launch has started"),
    ],
)
def test_reuse(case, configs, reason):
    explanation = explained_with(case, pass_configs=configs)
    (told,) = explanation.reuse.values()
    assert reason in told and f"  {told}" in str(explanation)


@pytest.mark.parametrize(
    ("case", "reasons"),
    [
        ("ring_all_reduce", {"S": "6 versions, each with its own copy, 3072 bytes"}),
        (
            "shift_again",
            {
                "S": "3 versions, each with its own copy, 2048 bytes; the last version is in "
                "place, the others in S_versions"
            },
        ),
        ("ring_shift", {}),
    ],
)
def test_versions(case, reasons):
    explanation = explained(case)
    assert explanation.versions == reasons
    assert ("again in the same launch because:" in str(explanation)) == bool(reasons)
    assert all(
        f"  {reason}" in str(explanation) and reason in explanation.html()
        for reason in reasons.values()
    )


# programs that need nothing, or order themselves

BY_HAND = """
import tilelang.language as T
from tileweave import language as W

@T.prim_func
def ring(S: W.Symmetric((8, 32), "float32"), F: W.Symmetric((1,), "uint32"),
         B: W.Symmetric((4,), "uint32"), Y: T.Tensor((8, 32), "float32"), epoch: T.uint32):
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((8, 32), "float32")
        T.clear(tile)
        T.copy(tile, S[(W.rank() + 1) % 2, 0, 0])
        W.signal(F[(W.rank() + 1) % 2, 0])  # signal
        for _ in T.serial(3):
            W.wait_reached(F[W.rank(), 0], epoch + T.uint32(1))  # wait
        W.fence_proxy_async()  # fence
        T.copy(S[W.rank(), 0, 0], tile)
        T.copy(tile, Y)
        W.sync_ranks(B[W.rank(), 0])  # barrier
"""


def test_program_with_explicit_signals(tmp_path, capsys):
    file, lines = tmp_path / "ring.py", lines_of(BY_HAND)
    file.write_text(BY_HAND)
    assert main(["explain", str(file), "--ranks", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    hand = [o for o in data["ops"] if o["reason"] == "explicit in the program"]
    assert [(o["kind"], o["tensor"], o["line"], o["per_block"]) for o in hand] == [
        ("signal", "F", lines["signal"], 1),
        ("wait", "F", lines["wait"], 3),
        ("fence", "", lines["fence"], 1),
        ("barrier", "B", lines["barrier"], 1),
    ]
    added = [(o["kind"], o["line"]) for o in data["ops"] if o not in hand]
    assert added == [
        ("bulk_wait", lines["signal"]), ("barrier", lines["signal"]), ("fence", lines["wait"]),
        ("bulk_wait", lines["barrier"]), *[("barrier", lines["barrier"])] * 2,
    ]  # fmt: skip
    assert data["flags"] == {} and data["reuse"] == {}


def test_verify_off_leaves_a_program_as_it_is():
    explanation = explained_with("ring_shift", pass_configs={"tileweave.verify": "off"})
    assert explanation.ops == () and explanation.flag_bytes == 0
    assert "nothing is inserted" in str(explanation)


def test_one_rank_takes_the_same_way():
    assert {o.kind for o in explained("ring_shift", 1).ops} >= {"signal", "wait", "barrier"}


UNORDERED = MERGED.replace(
    "T.copy(S[W.rank(), 0, 0], tile)  # second",
    'T.copy(W.unordered(S[W.rank(), 0, 0], reason="a copy is enough"), tile)  # second',
)


def test_unordered_accesses_are_listed_with_their_reasons(tmp_path, capsys):
    file, lines = tmp_path / "twice.py", lines_of(UNORDERED)
    file.write_text(UNORDERED)
    assert main(["explain", str(file), "--ranks", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["merged"] == []
    (told,) = data["unordered"]
    assert (told["kind"], told["tensor"], told["line"], told["reason"]) == (
        "unordered", "S", lines["second"], "a copy is enough",
    )  # fmt: skip
    assert main(["explain", str(file), "--ranks", "2"]) == 0
    assert f"  twice.py:{lines['second']}  S: a copy is enough" in capsys.readouterr().out


def test_refusals_of_the_compiler(tmp_path, capsys):
    file = tmp_path / "ring.py"
    file.write_text(BY_HAND.replace("W.wait_reached(F[W.rank(), 0], epoch + T.uint32(1))", "pass"))
    assert main(["explain", str(file), "--ranks", "2"]) == 1
    emitted = capsys.readouterr().err
    assert main(["emit", str(file), "--ranks", "2"]) == 1
    assert capsys.readouterr().err == emitted and str(file) in emitted


def test_warnings_instead_of_refusals():
    program = PROGRAMS["ring_shift"].make(2)  # made for two ranks: of four, others are not written
    with pytest.raises(tw.LanguageError):
        tw.explain(program, 4)
    with pytest.warns(tw.SyncWarning, match="nothing orders its accesses"):
        assert tw.explain(program, 4, {"tileweave.verify": "warn"}).ops == ()


# plans


def test_plan_is_explained_with_its_kernels_and_copies():
    explanation = explained("all_gather_gemm")
    assert [name for name, *_ in explanation.sources] == ["plan", "gemm"]
    sent = line_of("all_gather_gemm", "p.copy(gathered[peer")
    first, signal = of(explanation, line=sent)
    assert (first.kind, signal.kind, signal.tensor, signal.per_block) == (
        "wait", "signal", "gathered", 3,
    )  # fmt: skip
    assert signal.reason == "the stream signals to gemm that p.copy has finished"
    assert (first.tensor, first.flag, first.per_block) == ("gathered", "started", 3)
    assert first.reason == "before p.copy overwrites it: a peer may read it until its call begins"
    (wait,) = of(explanation, kernel="gemm", kind="wait")
    assert (wait.tensor, wait.line) == ("gathered", line_of("all_gather_gemm", "T.copy(gathered["))
    assert wait.reason == "T.copy reads the result of writes; moved out of the loop over k"
    assert not of(explanation, kernel="gemm", kind="signal", tensor="started")


def test_kernels_of_one_name_are_distinguished():
    explanation = explained("two_kernels")
    assert [name for name, *_ in explanation.sources] == [
        "plan",
        "program",
        "double",
        "program (2)",
    ]
    both = [of(explanation, kernel=k, kind="signal") for k in ("program", "program (2)")]
    assert both[0] and len(both[0]) == len(both[1])
    assert explanation.flag_bytes == 2 * 32 and "program (2).S" in explanation.reuse


# the table, the page and the command line


def test_table_is_aligned():
    explanation = explained("two_producers")
    title, head, *lines = str(explanation).splitlines()
    assert title == "program, 4 ranks"
    rows = lines[: len(explanation.ops)]
    for column in ("kind", "tensor", "granule", "per block", "why"):
        at = head.index(column)
        assert all(row[at - 2 : at] == "  " and row[at] != " " for row in rows), column
    assert "counters: 32 bytes on each rank (S_arrived 8, finished 16, launches 8)" in lines


def page_of(explanation: tw.Explanation) -> ElementTree.Element:
    return ElementTree.fromstring(explanation.html().partition("\n")[2])


@pytest.mark.parametrize("case", ["ring_shift", "wide_reader", "all_gather_gemm"])
def test_page_is_well_formed_and_has_every_operation_under_its_line(case):
    explanation = explained(case)
    shown, number = [], 0
    for span in page_of(explanation).iter("span"):
        kind = span.get("class", "")
        if kind == "number":
            number = int(span.text)
        elif kind.startswith("op "):
            shown.append((kind.removeprefix("op "), number, span.get("title")))
    assert sorted(shown) == sorted((o.kind, o.line, o.reason) for o in explanation.ops)


def test_page_shows_the_source_from_its_decorator_on():
    text = ["".join(s.itertext()) for s in page_of(explained("ring_shift")).iter("span")]
    assert any(t.endswith("@T.prim_func") for t in text)
    assert any("T.copy(tile, S[(W.rank() + 1) % ranks, row * b, 0])" in t for t in text)
    assert not any("def inputs" in t for t in text)


PLAN = """
import tilelang.language as T
import tileweave as tw
from tileweave import language as W

@T.prim_func
def step(S: W.Symmetric((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
    with T.Kernel(4, threads=32) as row:
        tile = T.alloc_shared((1, 8), "float32")
        T.copy(S[W.rank(), row, 0], tile)
        T.copy(tile, Y[row, 0])

@tw.plan
def gather(p, X: T.Tensor((1, 8), "float32"), S: W.Symmetric((4, 8), "float32"),
           Y: T.Tensor((4, 8), "float32")):
    for peer in p.peers():
        p.copy(S[peer, p.rank : p.rank + 1], X, stream="copies")
    p.copy(S[p.rank, p.rank : p.rank + 1], X)
    p.launch(step, S, Y)
"""


def test_command_explains_a_kernel_with_its_plan_only(tmp_path, capsys):
    """By itself the kernel reads data that no rank writes, and has nothing to order."""
    file = tmp_path / "gather.py"
    file.write_text(PLAN)
    assert main(["explain", str(file), "--json"]) == 0
    (data,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert data["name"] == "gather" and {o["kernel"] for o in data["ops"]} == {"gather", "step"}
    assert main(["explain", f"{file}:step", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"] == []


@pytest.fixture
def twice(tmp_path):
    path = tmp_path / "twice.py"
    path.write_text(MERGED)
    return path


def test_command_prints_the_table_and_writes_the_page(twice, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["explain", f"{twice}:twice", "--ranks", "2", "--html", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("twice, 2 ranks\n") and "S_arrived" in printed
    ElementTree.fromstring(out.read_text().partition("\n")[2])


def test_options_reach_the_compiler(twice, capsys):
    granule = ["--config", 'tileweave.granule={"S": [8, 64]}']
    assert main(["explain", str(twice), "--ranks", "2", *granule]) == 0
    assert "8 x 64" in capsys.readouterr().out
    off = ["--config", "tileweave.verify=off"]
    assert main(["emit", str(twice), "--stage", "tile", *off]) == 0
    assert "S_arrived" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["simulate", str(twice), "--ranks", "2", "--schedules", "2", *off])
    assert capsys.readouterr().out.startswith("twice: ")
    assert main(["simulate", str(twice), "--ranks", "2", "--schedules", "2"]) == 0
    assert "no fault" in capsys.readouterr().out


def test_simulate_takes_options():
    with pytest.raises(tw.SimulationError):
        tw.simulate(
            PROGRAMS["ring_shift"].make(2), 2, [{}, {}], pass_configs={"tileweave.verify": "off"}
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{file}:three"], "has no tw.plan or T.prim_func three; expected twice"),
        (["{file}x"], "there is no file"),
        (["{file}", "--ranks", "0"], "explain: --ranks 0; expected at least 1"),
        (["{file}", "--html", "a.txt"], "--html a.txt; expected a name that ends in .html"),
        (["{file}", "--config", "reuse"], "explain: --config reuse; expected NAME=VALUE"),
        (["{file}", "--config", "tileweave.reuse=never"], "tileweave.reuse='never'; expected"),
        (["{file}", "--config", "tileweave.speed=9"], "tileweave.speed; expected tileweave.reuse"),
        (
            ["{file}", "--ranks", "2", "--config", 'tileweave.granule={"S": [3, 3]}'],
            "tileweave.granule=(3, 3) of S cuts what it accesses on axis 0",
        ),
        (["{file}", "--ranks", "1"], "which has rank index 1; expected 0 to 0"),
    ],
)
def test_command_refuses_in_words_and_a_place(twice, capsys, arguments, message):
    assert main(["explain", *(a.replace("{file}", str(twice)) for a in arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") <= 2
    assert captured.err.startswith("tileweave: ") and message in captured.err


def test_explain_refuses_what_is_no_program():
    with pytest.raises(tw.TileWeaveError, match=r"explain: 3; expected a T\.prim_func or a tw\.pl"):
        tw.explain(3, world_size=2)
    with pytest.raises(tw.TileWeaveError, match="arch='hopper'"):
        explained_with("ring_shift", arch="hopper")


def test_no_html_of_two_programs(tmp_path, capsys):
    file = tmp_path / "two.py"
    file.write_text(MERGED + MERGED.split("import language as W")[1].replace("twice(", "again("))
    assert main(["explain", str(file), "--ranks", "2", "--html", "a.html"]) == 1
    assert "--html of twice, again; expected one program" in capsys.readouterr().err


def test_explaining_changes_nothing():
    """The program compiles afterwards as it does without an explanation."""
    program = PROGRAMS["ring_shift"].make(4)
    before = program.script()
    tw.explain(program, 4)
    assert program.script() == before
    assert not calls_in(program.body, lambda c: op_name(c) == "tileweave.signal")


MIXED = """
import tilelang.language as T
from tileweave import language as W


def mixed(synchronize):
    @T.prim_func
    def program(
        X: T.Tensor((64,), "float32"), S: W.Symmetric((64,), "float32"),
        F: W.Symmetric((1,), "uint32"), Y: T.Tensor((64,), "float32"),
    ):
        with T.Kernel(1, threads=32):
            T.copy(X, S[(W.rank() + 1) % 2, 0])
            synchronize(F)
            T.copy(S[W.rank(), 0], Y)
            synchronize(F)

    return program


@T.macro
def ranks(F):
    W.sync_ranks()


@T.macro
def grid(F):
    W.sync_grid()


explicit, inferred = mixed(ranks), mixed(grid)
"""


def test_names_the_operation_that_disables_the_inference(tmp_path, capsys):
    """A barrier of the grid does not synchronize ranks, so the inference stays on."""
    file = tmp_path / "mixed.py"
    file.write_text(MIXED)
    line = 1 + MIXED.splitlines().index("    W.sync_ranks()")
    why = "explicit synchronization; without explicit signals, waits and barriers the compiler"
    assert main(["explain", f"{file}:explicit", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert f"nothing is inferred:\n  mixed.py:{line}  W.sync_ranks: {why} inserts them\n" in out
    assert main(["explain", f"{file}:inferred", "--ranks", "2"]) == 0
    assert "nothing is inferred" not in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["explain", f"{file}:explicit", "--ranks", "2", "--html", str(page)]) == 0
    assert "nothing is inferred" in page.read_text() and why in page.read_text()


# paths and notes


def operation(file: str, **values) -> Operation:
    return Operation("wait", "S", file, 3, f"the wait at {file}:7 covers it, too", **values)


def explanation(*ops: Operation) -> tw.Explanation:
    return tw.Explanation("program", 2, ops=ops, merged=ops, assumed={"S": f"{ops[0].file}:7"})


def test_files_are_named_without_their_folder():
    for text in (str(explanation(operation("/a/x.py"))), explanation(operation("/a/x.py")).html()):
        assert "the wait at x.py:7 covers it" in text and "x.py:3" in text and "/a/" not in text
    assert json.loads(explanation(operation("/a/x.py")).as_json())["ops"][0]["file"] == "/a/x.py"


def test_files_of_one_name_are_named_from_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    files = [str(tmp_path / folder / "x.py") for folder in ("a", "b")]
    text = str(explanation(*map(operation, files)))
    assert "\n  a/x.py:3  wait" in text and "\n  b/x.py:3  wait" in text
    assert "the wait at b/x.py:7 covers" in text and str(tmp_path) not in text


def test_signs_of_the_table_are_explained_if_it_has_them():
    long = " + ".join(["rank * 2"] * 4)
    plain = str(explanation(operation("x.py", amount="1")))
    assert "?" not in plain and "varies" not in plain
    text = str(explanation(operation("x.py", amount=long, per_block=None)))
    row, *rest = text.splitlines()[2:]
    assert row.split()[4:6] == ["varies", "?"]
    assert rest[:2] == [
        "? per block: a loop around it whose iterations are counted at run time",
        "amount varies: it depends on rank, block or iteration; --json prints the formula",
    ]
    assert "? stands for a number" in explanation(operation("x.py", per_block=None)).html()
