"""What programs of tests/gpu share. Without a GPU the ranks meet by gloo."""

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
"""Of each check when it has run: what it is, "" or what is wrong, and remarks."""


def parser_of(doc: str, checks: Iterable[str] = ()) -> argparse.ArgumentParser:
    """What a program takes: the names of checks to run, if it has such; more can be added."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    if checks:
        parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(checks))
    return parser


def say(text: str) -> None:
    # In one piece: ranks that have met write at the same time.
    print(f"rank {group_of('').rank}: {text}\n", end="", flush=True)


def runs_here(name: str, need_gpu: Collection[str]) -> bool:
    """Whether there is a GPU or the check needs none; else that is said."""
    if GPU or name not in need_gpu:
        return True
    say(f"{name}: not run: no GPU")
    return False


def transports_here(asked: list[str]) -> list[str]:
    """Those that ranks can take which share a GPU, if they do; the others are said."""
    joined = session.joined()
    if joined is None or not joined.group.shares_gpus or "copy_engine" not in asked:
        return asked
    say("copy_engine: not run: ranks share a GPU")
    return [transport for transport in asked if transport != "copy_engine"]


def main(
    verdicts: Callable[[argparse.Namespace], Verdicts], parser: argparse.ArgumentParser, **init
) -> int:
    """Join the ranks, say what the checks find, and leave; the exit status.

    Args:
        verdicts: given the parsed options, runs the checks.
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
        group.synchronize()
        group.meet("check")
        say(f"{what}: {', '.join([fault or 'right', *remarks])}")
    if GPU:
        tw.finalize()
    elif dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0
