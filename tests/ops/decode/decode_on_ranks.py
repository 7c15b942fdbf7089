"""Functions that test_operator.py runs on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.modules import load_module
from tests.ops.meshes import Nodes, in_order, mesh_of
from tests.ops.on_ranks import part_of_the_world
from tileweave import ops

FP8 = torch.float8_e4m3fn
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "decode_step.py"


class Call(NamedTuple):
    """Arguments of a call. All numbers of a sequence are equal on all ranks."""

    lengths: tuple[int, ...] = (37, 0, 5, 64)
    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    v_dim: int = 32
    page_size: int = 4
    table: int = 16
    dtype: torch.dtype = torch.bfloat16
    sharding: str = "interleaved"
    latent: bool = False
    quantized: bool = False
    returns_lse: bool = True
    where: str = "new"

    @property
    def cache_dtype(self) -> torch.dtype:
        return FP8 if self.quantized else self.dtype

    @property
    def scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the factors of the cache."""
        k_scale = torch.tensor(0.5) if self.quantized else None
        return k_scale, torch.tensor([3.0]) if self.quantized and not self.latent else None

    def sequences(self) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Return q, and the keys and values of all sequences."""
        torch.manual_seed(5)
        q = torch.randn(len(self.lengths), self.heads, self.dim).to(self.dtype)
        shapes = [(length, self.kv_heads, self.dim) for length in self.lengths]
        keys = [torch.randn(shape).to(self.cache_dtype) for shape in shapes]
        if self.latent:
            return q, keys, [k[..., : self.v_dim] for k in keys]
        return q, keys, [torch.randn(*k.shape[:2], self.v_dim).to(self.cache_dtype) for k in keys]

    def right(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result and the logarithms by definition, in float64."""
        q, keys, values = self.sequences()
        k_scale, v_scale = (1.0 if scale is None else scale.item() for scale in self.scales)
        v_scale = k_scale if self.latent else v_scale
        out = torch.zeros(len(keys), self.heads, self.v_dim, dtype=torch.float64)
        lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
        for b, (k, v) in enumerate(zip(keys, values, strict=True)):
            if len(k):
                k, v = (
                    (x.double() * s).repeat_interleave(self.heads // self.kv_heads, 1)
                    for x, s in ((k, k_scale), (v, v_scale))
                )
                products = torch.einsum("hd,thd->ht", q[b].double(), k) * self.dim**-0.5
                lse[b] = products.logsumexp(-1)
                out[b] = torch.einsum("ht,thd->hd", products.softmax(-1), v)
        return out, lse

    def owned(self, length: int, rank: int, ranks: int) -> torch.Tensor:
        """Return the numbers of the tokens of a sequence that a rank holds."""
        tokens = torch.arange(length)
        if self.sharding == "contiguous":
            return tokens[tokens // (self.table * self.page_size) == rank]
        if self.sharding == "interleaved":
            return tokens[tokens // self.page_size % ranks == rank]
        return tokens[tokens**2 % 7 % ranks == rank]

    def arguments(self, rank: int, ranks: int) -> dict[str, Any]:
        """Return the arguments of a rank. Entries after the last page of a sequence are no pages,
        and what follows the last token is NaN."""
        q, keys, values = self.sequences()
        count, size = len(keys) * self.table, self.page_size
        pages = torch.randperm(count).tolist()
        shape = count, size, self.kv_heads
        k_cache = torch.full((*shape, self.dim), torch.nan).to(self.cache_dtype)
        v_cache = torch.full((*shape, self.v_dim), torch.nan).to(self.cache_dtype)
        table = torch.full((len(keys), self.table), -1, dtype=torch.int32)
        lengths = []
        for b, (k, v) in enumerate(zip(keys, values, strict=True)):
            tokens = self.owned(len(k), rank, ranks)
            lengths.append(len(tokens) if self.sharding == "local" else len(k))
            for number, chosen in enumerate(tokens.split(size) if len(tokens) else ()):
                table[b, number] = page = pages.pop()
                k_cache[page, : len(chosen)], v_cache[page, : len(chosen)] = k[chosen], v[chosen]
        k_scale, v_scale = self.scales
        return {
            "q": q, "k_cache": k_cache, "v_cache": None if self.latent else v_cache,
            "block_table": table, "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "k_scale": k_scale, "v_scale": v_scale,
        }  # fmt: skip

    def __call__(self, arguments: dict[str, Any], group: Any = None) -> tuple[torch.Tensor, ...]:
        """Call the operator."""
        shape = len(self.lengths), self.heads, self.v_dim
        out = torch.empty(shape, dtype=self.dtype) if self.where == "out" else None
        results = ops.decode_attention(
            **arguments, sharding=self.sharding, group=group, out=out, return_lse=self.returns_lse
        )
        results = results if isinstance(results, tuple) else (results,)
        assert out is None or results[0] is out
        return results


def compare(call: Call, actual: tuple[torch.Tensor, ...]) -> dict[str, bool]:
    """Compare results with the definition."""
    verdicts = {"lse": len(actual) == 1 + call.returns_lse, "type": actual[0].dtype == call.dtype}
    step = 1e-5 if call.dtype == torch.float32 else 1e-2
    for name, one, other in zip(("out", "lse"), actual, call.right(), strict=False):
        verdicts[name] = torch.allclose(one.double(), other, rtol=step, atol=step)
    return verdicts


def values(call: Call, form: str | None = None, compiled: bool = False) -> dict[str, bool]:
    """Compare a call with the definition."""
    group = part_of_the_world(form) if form else None
    ranks = 2 if form else dist.get_world_size()
    arguments = call.arguments(dist.get_rank(), ranks)
    if not compiled:
        return compare(call, call(arguments, group))
    torch._dynamo.reset()  # calls differ in their options, too many for one cache
    return compare(call, torch.compile(call, backend="aot_eager", fullgraph=True)(arguments, group))


def one_rank(call: Call) -> dict[str, bool]:
    """Compare a call of a single process with the definition."""
    return compare(call, call(call.arguments(0, 1)))


def on_mesh(call: Call, nodes: Nodes) -> dict[str, bool]:
    """Compare a call of several nodes with the definition."""
    me, count = in_order(nodes)
    return compare(call, call(call.arguments(me, count), mesh_of(nodes)))


def differ(what: str) -> None:
    """Call with another argument on every rank, and one that no other test has: ranks remember what
    they agreed on."""
    me = dist.get_rank()
    changed = {"table": 32 + me, "sharding": "local" if me else "contiguous", "heads": 8 + 2 * me}
    call = Call(table=31)._replace(**{what: changed[what]})
    call(call.arguments(me, dist.get_world_size()))


def example() -> dict[str, bool]:
    """Run the example of a decode step."""
    module = load_module(EXAMPLE)
    error = module.largest_error(dist.get_rank(), dist.get_world_size(), "cpu")
    return {"error": error <= 1e-5}
