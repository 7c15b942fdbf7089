"""Measure the one-way latency of a signal: two ranks signal each other in turn.

torchrun --nproc-per-node=2 examples/signal_ping_pong.py
"""

import sys

import tilelang.language as T
import torch

import tileweave as tw
from tileweave import language as W


@T.prim_func
def ping_pong(flags: W.Symmetric((1,), "uint32"), start: T.uint32, iterations: T.int32):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            me = W.rank()
            for i in T.serial(iterations):
                value = start + T.Cast("uint32", i) + T.uint32(1)
                if me == 0:
                    W.signal(flags[1, 0], value, op="set")
                    W.wait_reached(flags[0, 0], value, peer=1)
                else:
                    W.wait_reached(flags[1, 0], value, peer=0)
                    W.signal(flags[0, 0], value, op="set")


def inputs(ranks, rng, iterations=10):
    """Return what `tileweave simulate` cannot invent; the program is for two ranks."""
    return [{"start": lambda epoch: epoch * iterations, "iterations": iterations}] * ranks


def main(iterations: int = 2000, repeats: int = 20) -> int:
    tw.init()
    if tw.world_size() < 2:
        print("signal_ping_pong: 1 rank; expected at least 2 (torchrun --nproc-per-node=2)")
        return 2
    flags = tw.symmetric((1,), torch.uint32)
    kernel = tw.compile(ping_pong)
    times = []
    for repeat in range(repeats if tw.rank() < 2 else 0):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel(flags, repeat * iterations, iterations)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / iterations / 2)
    tw.barrier()
    torch.cuda.synchronize()
    expected = repeats * iterations
    values = [int(flags.all.view(torch.int32)[r, 0]) for r in range(2)]
    passed = values == [expected, expected]
    if tw.rank() == 0:
        times.sort()
        print(
            f"one-way signal: {times[len(times) // 2]:.3f} us (median of {repeats} x {iterations} "
            "iterations)"
        )
        print("passed" if passed else f"failed: the flags are {values}; expected {expected}")
    tw.finalize()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
