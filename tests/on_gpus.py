"""Common parts of the programs in tests/gpu. Without a GPU the ranks use gloo."""

import argparse
import os
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.ops.core.groups import group_of
from tileweave.runtime.host import session

GPU = torch.cuda.is_available()
Verdicts = Iterator[tuple[str, ...]]
"""Result of each check: its description, the fault or "", and remarks."""


def parser_of(doc: str, checks: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser whose arguments are the names of the checks to run, if there are any."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    if checks:
        parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(checks))
    return parser


def say(text: str) -> None:
    # One write per line: all ranks print at the same time.
    print(f"rank {group_of('').rank}: {text}\n", end="", flush=True)


def runs_here(name: str, need_gpu: Collection[str]) -> bool:
    """Return whether a check can run here; print a line if it needs a GPU that is missing."""
    if GPU or name not in need_gpu:
        return True
    say(f"{name}: not run: no GPU")
    return False


def transports_here(requested: list[str]) -> list[str]:
    """Return the transports that work if ranks share a GPU; print a line for the others."""
    shared = any(opened.group.shares_gpus for opened in session.opened())
    if not shared or "copy_engine" not in requested:
        return requested
    say("copy_engine: not run: ranks share a GPU")
    return [transport for transport in requested if transport != "copy_engine"]


def main(
    verdicts: Callable[[argparse.Namespace], Verdicts], parser: argparse.ArgumentParser, **init
) -> int:
    """Join the ranks, print the verdict of each check and finalize. Return the exit status.

    Args:
        verdicts: parsed options -> runs the checks.
        init: options of ``tw.init``.
    """
    options = parser.parse_args()
    if GPU:
        tw.init(**init)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    group, failed = group_of(""), 0
    for what, fault, *remarks in verdicts(options):
        failed += bool(fault)
        verdict = f"{what}: {', '.join([fault or 'right', *remarks])}"
        if fault:
            say(verdict)  # now: other ranks may wait for this one until they time out
        group.synchronize()
        group.meet("check")
        if not fault:
            say(verdict)
    if GPU:
        tw.finalize()
    elif dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0
