"""Time ops.decode_attention on one rank beside torch's attention and FlashInfer.

    python benchmarks/decode_attention.py [--batch 1 8 ...] [--keys 4096 ...] [--heads 64]
        [--kv-heads 8] [--page-size 64] [--cache bf16 fp8] [--latent] [--calls 20]
        [--replays 10]

A time is that of one of ``--calls`` calls in a CUDA graph, in us: the median of ``--replays``
replays. All sequences have the same number of keys, of 128 elements of bf16 or float8_e4m3fn. With
``--latent`` keys have 576 elements, the first 512 are the values, and all heads share them.

- ``sdpa``: ``scaled_dot_product_attention`` with ``enable_gqa``, on a contiguous cache
- ``flashinfer``: ``BatchDecodeWithPagedKVCacheWrapper``, if installed, on the pages
- ``fused``: the kernel of the operator, on the pages; on CPUs its torch implementation
- ``bound``: the bytes of the cache at 4.2 TB/s, which the memory of an H200 reaches

fp8 and latent caches have only the last two.

Every result is compared with that of plain torch. Without a GPU, one small size runs once, which
only tests this file.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch
from graph_times import graph_us

from tileweave import ops
from tileweave.ops.decode.problem import LATENT

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BATCHES = (1, 4, 16, 64, 128) if GPU else (2,)
KEYS = (4096, 16384, 32768, 131072) if GPU else (128,)
DIM = 128
STRATEGY = "fused" if GPU else "auto"
ERROR = 1e-2
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
SCALE = 0.5
"""Factor of fp8 caches."""
BYTES_PER_US = 4.2e6
MOST_BYTES = 60 << 30
"""Largest caches that are measured."""
Step = Callable[[], torch.Tensor]


class Sequences:
    """Queries, and caches of sequences of equal lengths, in pages and not."""

    def __init__(
        self, batch: int, keys: int, dtype: torch.dtype, options: argparse.Namespace
    ) -> None:
        size, self.group = options.page_size, options.heads // options.kv_heads
        pages = keys // size
        memory = {"device": DEVICE, "dtype": torch.bfloat16}
        dim = LATENT[0] if options.latent else DIM
        shape = batch * pages, size, options.kv_heads, dim
        self.q = torch.randn(batch, options.heads, dim, **memory)
        self.k_cache = torch.randn(shape, **memory).to(dtype)
        self.v_cache = None if options.latent else torch.randn(shape, **memory).to(dtype)
        is_fp8 = dtype == CACHES["fp8"]
        self.scale = torch.full((1,), SCALE, device=DEVICE) if is_fp8 else None
        table = torch.arange(batch * pages, dtype=torch.int32, device=DEVICE)
        self.table = table.view(batch, pages)
        self.lengths = torch.full((batch,), keys, dtype=torch.int32, device=DEVICE)

    def heads(self, cache: torch.Tensor) -> torch.Tensor:
        """Return a cache as (batch, kv_heads, keys, dim), without a copy."""
        return cache.view(len(self.table), -1, *cache.shape[2:]).transpose(1, 2)

    def fused(self) -> torch.Tensor:
        return ops.decode_attention(
            self.q, self.k_cache, self.v_cache, block_table=self.table, seq_lens=self.lengths,
            k_scale=self.scale, v_scale=self.scale, strategy=STRATEGY,
        )  # fmt: skip

    def sdpa(self) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            self.q[:, :, None], self.heads(self.k_cache), self.heads(self.v_cache), enable_gqa=True
        )
        return out[:, :, 0]

    def flashinfer(self) -> Step | None:
        """Return a call of FlashInfer, or None."""
        try:
            import flashinfer
        except ImportError:
            return None
        batch, pages = self.table.shape
        memory = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, "NHD")
        ends = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * pages
        size, kv_heads = self.k_cache.shape[1:3]
        last = torch.full((batch,), size, dtype=torch.int32, device=DEVICE)
        wrapper.plan(
            ends, self.table.flatten(), last, self.q.shape[1], kv_heads, DIM, size,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda: wrapper.run(self.q, (self.k_cache, self.v_cache))

    def implementations(self) -> dict[str, Step]:
        if self.scale is not None or self.v_cache is None:
            return {"fused": self.fused}
        steps: dict[str, Step] = {"sdpa": self.sdpa}
        if GPU and (step := self.flashinfer()) is not None:
            steps["flashinfer"] = step
        return steps | {"fused": self.fused}


def reference(sequences: Sequences) -> torch.Tensor:
    """Return the result in fp32, sequence by sequence."""
    results, scale = [], 1.0 if sequences.scale is None else SCALE
    keys = sequences.heads(sequences.k_cache)
    is_latent = sequences.v_cache is None
    values = keys[..., : LATENT[1]] if is_latent else sequences.heads(sequences.v_cache)
    for q, k, v in zip(sequences.q, keys, values, strict=True):
        rows = q.view(k.shape[0], -1, q.shape[-1]).float()
        products = rows @ k.float().transpose(1, 2) * (scale * q.shape[-1] ** -0.5)
        results.append((products.softmax(-1) @ v.float() * scale).view(-1, v.shape[-1]))
    return torch.stack(results)


def microseconds(step: Step, calls: int, replays: int) -> float:
    """Return the time of a call in us."""
    if not GPU:
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) * 1e6
    step()
    return graph_us(step, calls, replays)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--keys", type=int, nargs="+", default=KEYS)
    parser.add_argument("--heads", type=int, default=64 if GPU else 4)
    parser.add_argument("--kv-heads", type=int, default=8 if GPU else 2)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--cache", nargs="+", default=["bf16"], choices=CACHES)
    parser.add_argument("--latent", action="store_true")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--replays", type=int, default=10)
    options = parser.parse_args()
    if options.latent:
        options.kv_heads = 1
        if options.cache != ["bf16"]:
            parser.error(f"--cache {' '.join(options.cache)} with --latent; expected bf16")
    return options


@torch.no_grad()
def main() -> None:
    options = parsed()
    for cache, batch, keys in product(options.cache, options.batch, options.keys):
        dtype = CACHES[cache]
        columns = LATENT[0] if options.latent else 2 * options.kv_heads * DIM
        nbytes = dtype.itemsize * batch * keys * columns
        if nbytes > MOST_BYTES:
            print(f"{cache}, batch {batch}, keys {keys}: not run: the cache has {nbytes >> 30} GiB")
            continue
        sequences = Sequences(batch, keys, dtype, options)
        expected, times = reference(sequences), []
        for name, step in sequences.implementations().items():
            error = (step().float() - expected).norm() / expected.norm()
            if not error <= ERROR:
                raise SystemExit(f"{name}: relative error {error.item():.1e}")
            times.append(f"{name} {microseconds(step, options.calls, options.replays):.1f}")
        times.append(f"bound {nbytes / BYTES_PER_US:.1f}")
        print(f"{cache}, batch {batch}, keys {keys}: {', '.join(times)} us")


if __name__ == "__main__":
    main()
