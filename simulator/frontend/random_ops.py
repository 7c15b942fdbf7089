"""Random numbers of each thread: T.rng_init and T.rng_rand, as cuRAND's Philox 4x32-10."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ..machine.block import Frame
from ..machine.steps import Step
from ..report.errors import uninitialized, unsupported
from .expressions import Expr
from .statements import Statements

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def philox(seed: np.ndarray, sequence: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return the 32-bit numbers with these numbers in these sequences; all are uint64."""
    counter = [number >> np.uint64(2), sequence]
    a, b, c, d = (half for x in counter for half in (x & _LOW, x >> _HALF))
    keys = [seed & _LOW, seed >> _HALF]
    for _ in range(10):
        first, second = a * _FACTORS[0], c * _FACTORS[1]
        a, c = (second >> _HALF) ^ b ^ keys[0], (first >> _HALF) ^ d ^ keys[1]
        b, d = second & _LOW, first & _LOW
        keys = [(k + step) & _LOW for k, step in zip(keys, _KEY_STEPS, strict=True)]
    return np.choose((number & np.uint64(3)).astype(np.intp), [a, b, c, d]).astype(np.uint32)


def initialize(c: Statements, call: tirx.Call, loc: str) -> Step:
    generator = call.args[3].value
    if "Philox" not in generator:
        raise unsupported(f"T.rng_init of {generator}", loc)
    arguments = c.indices(call.args[:3], "T.rng_init", loc)

    def run(frame: Frame):
        block, threads = frame.block, frame.mask.threads
        if block.generators is None:
            block.generators = np.ma.masked_all((3, len(frame.mask.on)), np.uint64)
        for row, value in zip(block.generators, arguments(frame), strict=True):
            of_threads = np.broadcast_to(np.asarray(value, np.int64), frame.mask.on.shape)
            row[threads] = of_threads[threads].view(np.uint64)

    return c.preempted(run, call)


def random_numbers(c: Statements, expr: tirx.Call | tirx.Broadcast, loc: str) -> Expr:
    lanes = np.arange(expr.dtype.lanes)

    def value(frame: Frame):
        threads, ordinals = _draws(frame, loc)
        generators = frame.block.generators
        if generators is None or np.ma.getmaskarray(generators)[:, threads].any():
            raise uninitialized("T.rng_rand reads", frame.block, loc)
        seed, sequence, number = generators.data[:, threads, None]
        numbers = number + (ordinals[:, None] * len(lanes) + lanes).astype(np.uint64)
        np.maximum.at(generators.data[2], threads, numbers[:, -1] + np.uint64(1))
        drawn = philox(seed, sequence, numbers)
        drawn = drawn if len(lanes) > 1 else drawn[:, 0]
        if frame.space is None and frame.mask.single is not None:
            return drawn[0]
        values = np.zeros(frame.shape + drawn.shape[1:], drawn.dtype)
        values[frame.on] = drawn
        return values

    return Expr(value)


def _draws(frame: Frame, loc: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the thread of each active lane of the frame, and the number of draws of that thread
    by earlier lanes."""
    if frame.space is None:
        return frame.mask.threads, np.zeros(frame.mask.count, np.int64)
    points = np.arange(frame.on.size) if frame.loop_points is None else frame.loop_points.ravel()
    points = points[frame.on.ravel()]
    draws = set()
    for threads_of in frame.loop.assignments(4) if frame.loop is not None else []:
        threads = threads_of(points)
        order = np.lexsort((points, threads))
        begins = np.searchsorted(threads[order], threads[order])
        ordinals = np.empty_like(order)
        ordinals[order] = np.arange(len(order)) - begins
        draws.add((threads.tobytes(), ordinals.tobytes()))
    if len(draws) != 1:
        raise unsupported("T.rng_rand in a T.Parallel whose threads depend on its layout", loc)
    return threads, ordinals


def register(c: Statements) -> None:
    """Register the random numbers."""
    c.steps["tl.rng_init"] = initialize
    c.calls["tl.rng_rand"] = c.broadcasts["tl.rng_rand"] = random_numbers
