"""``tileweave bench decode``: shapes, other implementations, and results."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from itertools import pairwise

import pytest
import torch
from tilelang import tvm

import tileweave as tw
from tests.ops.decode import bench_on_ranks
from tileweave import ops
from tileweave.bench import command as bench
from tileweave.bench import decode, results
from tileweave.bench.decode import Steps
from tileweave.bench.results import Cached, load
from tileweave.cli.main import main
from tileweave.ops.core.registry import operators_of

(OPERATOR,) = operators_of(decode.FAMILY.base).values()
NAME = OPERATOR.op
OPTIONS = "--keys 96,20 --batch 2 --heads 4 --kv-heads 2 --head-dim 32 --page-size 16".split()


def test_default_shapes():
    shapes = [str(case.shape) for case in bench.Wanted(["decode"], [], []).cases()]
    batches, keys = (1, 16, 64), (4096, 32768, 131072)
    assert shapes == [f"{batch} x {n}" for batch in batches for n in keys]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["decode"], Steps()),
        ([NAME, "--batch", "4,8"], Steps(batches=(4, 8))),
        (["--keys", "64"], Steps((64,))),
        (OPTIONS, Steps((96, 20), (2,), 4, 2, 32, 16)),
    ],
)
def test_options(arguments, steps, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "run", lambda wanted: seen.append(wanted) or True)
    assert main(["bench", *arguments]) == 0
    assert seen[0].decode == steps
    assert {case.op for case in seen[0].cases()} == {NAME}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_gather", "--keys", "64"], "bench: --keys 64; expected decode_attention by name, or"),
        (["--keys", "0"], "bench: --keys 0; expected a positive integer"),
        (["--keys", "64", "--heads", "6", "--kv-heads", "4"], "expected a number that divides"),
        (["--keys", "100"], "2 x 100: 100 tokens of a sequence; expected a multiple of 64 for 1"),
        (["decode", "--figure", "decode.png"], "bench: --figure decode.png of decode_attention;"),
        (["decode", "--batch", "64"], "takes 3.4e+10 operations, and torch sees no GPU; expected"),
    ],
)
def test_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "measured", lambda *_: pytest.fail("measured"))
    batch = [] if "--batch" in arguments else ["--batch", "2"]
    assert main(["bench", *arguments, *batch]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_and_programs(ranks):
    """Each rank has its part of the tokens, and the program of that part."""
    shape = Cached(3, 512, 8, 2, 64, 16, ranks)
    problem = decode.problem_of(NAME, shape, ranks, torch.bfloat16)
    (program,) = decode.programs(problem, None)
    cache = 3 * 512 // ranks * 2 * 64
    assert isinstance(program, tvm.tirx.PrimFunc)
    assert problem.pages * problem.page_size * 2 * 64 == cache
    assert shape.moved_bytes == 2 * 2 * cache
    assert decode.device_bytes(shape) == 2 * 2 * 2 * cache + 2 * 4 * cache // 3


def test_sizes_without_a_program():
    problem = decode.problem_of(NAME, Cached(1, 64, 4, 2, 32, 16, 1), 1, torch.bfloat16)
    assert decode.programs(problem, None) == []


def run(*arguments):
    return main(["bench", *arguments, *OPTIONS, "--warmups", "1", "--runs", "2"])


def test_one_process(tmp_path, capsys):
    file = str(tmp_path / "decode.json")
    assert run("decode", "--json", file) == 0
    out = capsys.readouterr().out
    assert "flashinfer: -: not installed" in out
    assert "-: 20 tokens of a sequence; expected a multiple of 16 for 1 ranks and pages of" in out
    _, (measured,) = load(file)
    assert set(measured.ms) == {"ours", "sdpa/flash"}
    assert all(0 < error < 1e-2 for error in measured.errors.values())
    assert main(["bench", "--from", file]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["operator", "batch", "x", "tokens"]
    assert row.split()[:4] == [NAME, "2", "x", "96"]


def test_one_wrong_head(monkeypatch, capsys):
    right = getattr(ops, NAME)

    def wrong(*args, **options):
        result = right(*args, **options)
        result[1, 3] *= 1.1
        return result

    monkeypatch.setattr(ops, NAME, wrong)
    with pytest.raises(SystemExit, match="1"):
        run("decode")
    assert "WRONG" in capsys.readouterr().out


class StandIn:
    """Stand-in for ``BatchDecodeWithPagedKVCacheWrapper``, as FlashInfer documents it."""

    def __init__(self, memory: torch.Tensor, layout: str) -> None:
        assert memory.dtype == torch.uint8 and layout == "NHD"

    def plan(self, ends, pages, last, heads, kv_heads, dim, size, q_data_type, kv_data_type):
        assert (heads, kv_heads, dim, size) == (4, 2, 32, 16)
        assert q_data_type == kv_data_type == torch.bfloat16
        self._pages = [pages[begin:end] for begin, end in pairwise(ends)]
        self._last = last

    def run(self, q, caches):
        outputs = []
        for row, pages, last in zip(q, self._pages, self._last, strict=True):
            count = (len(pages) - 1) * 16 + last
            k, v = (
                cache[pages].flatten(0, 1)[:count].repeat_interleave(2, 1).transpose(0, 1)
                for cache in caches
            )
            outputs.append(torch.nn.functional.scaled_dot_product_attention(row[:, None], k, v))
        return torch.stack(outputs)[:, :, 0]


def test_flashinfer_that_is_installed(monkeypatch, tmp_path):
    module = types.ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    file = str(tmp_path / "decode.json")
    assert run("decode", "--json", file) == 0
    _, (measured,) = load(file)
    assert set(measured.ms) == {"ours", "sdpa/flash", "flashinfer"}
    assert measured.is_right("flashinfer")


def test_rates():
    ms = {"ours": 0.5, "sdpa/flash": 2.0, "sdpa/cudnn": 1.0, "flashinfer": 4.0}
    shape = Cached(16, 4096, 32, 8, 128, 64, 2)
    r = results.Result(NAME, shape, "fused", "asked for", ms, dict.fromkeys(ms, 0.0), 1)
    nbytes = 16 * 2048 * 8 * 128 * 2 * 2
    assert r.gigabytes("ours") == pytest.approx(nbytes / 0.5e-3 / 1e9)
    _, row = results.table([r])
    assert row.split()[4:10] == ["0.5000", "1.0000", "4.0000", "268", "134", "2.000"]


def test_decode_is_not_tuned():
    with pytest.raises(tw.TileWeaveError, match="tune: decode; expected all_gather_matmul"):
        bench.Wanted(["decode"], [], [], command="tune").cases()


@pytest.mark.long
def test_three_ranks(three, tmp_path):
    file = tmp_path / "decode.json"
    (right, table), *others = three.run(bench_on_ranks.benchmark, str(file))
    assert (right, others) == (True, [(True, "")] * 2)
    _, measured = load(str(file))
    assert [str(r.shape) for r in measured] == ["1 x 384", "3 x 384"]
    for r in measured:
        assert set(r.ms) == {"ours", "sdpa/flash"}
        assert r.is_right("ours") and r.is_right("sdpa/flash")
    assert table.count("128 tokens of a sequence; expected a multiple of 48 for 3 ranks") == 2
    assert "flashinfer: -: not installed" in table
