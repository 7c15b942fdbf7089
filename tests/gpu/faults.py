"""Inject faults into two ranks: each job must end in time and name the cause.

    python tests/gpu/faults.py [FAULT ...]

Starts each fault under torchrun, and prints the seconds from the injection until all ranks have
ended, and who named the cause. Without a GPU the ranks use gloo, and faults that need one do not
run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import fault_ranks

HERE = Path(__file__).resolve()
_FAULT = "FAULT_PROGRAM"
TIMEOUT_S = 3
"""Time limit of waits on the GPU."""
MAX_S = 100
"""Faults with a larger limit run only if they are named."""
START_S = 150
"""Seconds for imports and for compiling, before the injection."""


@dataclass(frozen=True)
class Fault:
    """Injected fault, and what must follow.

    Attributes:
        program: name of the function in tests/fault_ranks.py that each rank runs.
        says: pattern of the message that names the cause.
        limit_s: most seconds from the injection to the end of all ranks.
        needs_gpu: whether the fault exists on GPUs only.
        goes_on: whether the job must end without an error, despite the fault.
        jobs: number of jobs that run at the same time.
    """

    program: str
    says: str
    limit_s: float = 15.0
    needs_gpu: bool = False
    goes_on: bool = False
    jobs: int = 1


KILLED = r"exitcode\s*: -9|Signal 9 \(SIGKILL\)"
_CACHE = "; expected a cache that can be written and has room"
FAULTS = {
    "killed before a launch": Fault("killed_before", KILLED),
    "killed in a launch": Fault("killed_in", KILLED),
    "killed after a launch": Fault("killed_after", KILLED),
    "never calls": Fault(
        "never_calls",
        r"waited \d+ s for rank 1; expected every rank|waited 3 s for a signal from rank 1",
        330,
    ),
    "never launches": Fault(
        "never_launches", r"waited 3 s for a signal( from rank 1)? and gave up", needs_gpu=True
    ),
    "never launches in a group": Fault(
        "never_launches_in_group",
        r"rank 0 of group 'pair' \(global rank 0\) waited 3 s for a signal( from rank 1)? and gave",
        needs_gpu=True,
    ),
    "never signals": Fault(
        "never_signals",
        r"DeadlockError: tileweave: rank 0 waited 3 s for a signal from rank 1 and gave up: "
        r"wait_reached\(.*\) at .*; flag \[0, 5\] of SymmetricTensor.*seen 0, expected 7",
        TIMEOUT_S + 5,
        needs_gpu=True,
    ),
    "count above the capacity": Fault(
        "overfull_segment",
        r"rank 1 announced 4 rows of a segment; expected 0 to 3: announce\(.*fault_ranks.py:\d+",
        needs_gpu=True,
    ),
    "row written twice": Fault(
        "row_twice", r"rank 1 wrote row 1 of a segment twice in a launch: check_row", needs_gpu=True
    ),
    "more rows than announced": Fault(
        "row_too_many",
        r"rank 1 wrote \d+ units to a segment, in all launches, and announced \d+",
        needs_gpu=True,
    ),
    "other shapes": Fault("other_shapes", r"all_gather: the ranks disagree \(rank 0.*rank 1"),
    "other version": Fault(
        "other_version", r"the ranks differ \(.*tileweave=9\.9\); expected the same tileweave"
    ),
    "other heap size": Fault(
        "other_heap", r"the ranks differ \(.*heap_bytes=\d+; .*expected the same heap_bytes"
    ),
    "other environment": Fault(
        "other_environment",
        r"the ranks differ \(.*TILEWEAVE_TIMEOUT_S=7.*expected the same TILEWEAVE_TIMEOUT_S",
    ),
    "heap exhausted on one rank": Fault(
        "heap_exhausted", r"symmetric heap: rank \d does `.*without room for it`"
    ),
    "compile failure on one rank": Fault("compile_failure", "nvcc is broken", 60),
    "disk full": Fault("disk_full", rf"No space left on device{_CACHE}", 60),
    "read-only cache": Fault("read_only_cache", rf"Read-only file system.*{_CACHE}", 60),
    "truncated cached kernel": Fault(
        "truncated_kernel", r"failed integrity verification .* recompiling", 60, goes_on=True
    ),
    "SIGINT during a wait": Fault("interrupted", r"KeyboardInterrupt"),
    "exception between calls": Fault("exception_between", r"ValueError: a bug of the user"),
    "graph replayed after finalize": Fault(
        "graph_after_finalize", r"illegal memory access|unmapped|finalize", needs_gpu=True
    ),
    "fork in a data loader": Fault("forked_loader", r"batches \[0, 1, 2, 3\]", 60, goes_on=True),
    "call in a forked worker": Fault(
        "forked_call",
        r"was forked from process \d+, and is no rank|Cannot re-initialize CUDA in forked",
        60,
    ),
    "two jobs on one node": Fault("two_jobs", r"right", 60, goes_on=True, jobs=2),
}


@dataclass
class Outcome:
    """Effects of a fault.

    Attributes:
        seconds: from the injection to the end of all ranks; None if they did not end in time.
        by: who named the cause.
        failure: why the outcome is not the expected one; empty if it is.
    """

    seconds: float | None
    by: str
    failure: str
    output: str


def inject(fault: Fault) -> Outcome:
    """Run the jobs of a fault and judge them."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_start(fault, Path(folder), number) for number in range(fault.jobs)]
        try:
            outputs = [_output(job, fault) for job in jobs]
        finally:
            for job in jobs:
                _stop(job)
        fault_ranks.unmount(Path(folder))
    output, ended = "\n".join(text for text, _ in outputs), max(end for _, end in outputs)
    starts = [float(t) for t in re.findall(r"inject (\d+\.\d+)", output)]
    if not starts:
        return Outcome(None, "", "the fault was not injected", output)
    if any(job.returncode is None or job.returncode == -signal.SIGKILL for job in jobs):
        return Outcome(None, "", f"hangs longer than {fault.limit_s:g} s", output)
    took = ended - max(starts)
    lines = [line for line in output.splitlines() if re.search(fault.says, line)]
    by = sorted({_source(line) for line in lines})
    failed = any(job.returncode != 0 for job in jobs)
    failure = ""
    if took > fault.limit_s:
        failure = f"ended later than {fault.limit_s:g} s"
    elif not lines:
        failure = f"no message has {fault.says!r}"
    elif failed == fault.goes_on:
        failure = f"exit status {[job.returncode for job in jobs]}"
    return Outcome(took, ", ".join(by), failure, output)


def _start(fault: Fault, folder: Path, number: int) -> subprocess.Popen:
    environment = {
        **os.environ,
        _FAULT: fault.program,
        "FAULT_FOLDER": str(folder),
        "TILEWEAVE_TIMEOUT_S": str(TIMEOUT_S),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
        "--tee=3", f"--log-dir={folder}/log{number}", str(HERE),
    ]  # fmt: skip
    return subprocess.Popen(
        command, env=environment, stdout=(folder / f"output{number}").open("w"),
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def _output(job: subprocess.Popen, fault: Fault) -> tuple[str, float]:
    """Wait for a job; return its output and when it ended."""
    try:
        job.wait(timeout=fault.limit_s + START_S)
    except subprocess.TimeoutExpired:
        _stop(job)
    ended = time.time()
    (folder,) = [a.split("=", 1)[1] for a in job.args if a.startswith("--log-dir=")]  # type: ignore
    return Path(folder.replace("/log", "/output")).read_text(errors="replace"), ended


def _stop(job: subprocess.Popen) -> None:
    """End a job with its ranks, which are in its session or in their own."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        job.returncode = -signal.SIGKILL


def _source(line: str) -> str:
    """Return who printed a line."""
    rank = re.match(r"\[default(\d+)\]:", line)
    return f"rank {rank[1]}" if rank else "torchrun"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="; ".join(FAULTS))
    requested = parser.parse_args().faults
    names = requested or list(FAULTS)
    if unknown := set(names) - FAULTS.keys():
        parser.error(f"{', '.join(unknown)}; expected {', '.join(FAULTS)}")
    failed = 0
    print("| fault | ended after | said by |\n|---|---|---|", flush=True)
    for name in names:
        fault = FAULTS[name]
        if fault.needs_gpu and not fault_ranks.GPU:
            print(f"| {name} | not run | no GPU |", flush=True)
            continue
        if not requested and fault.limit_s > MAX_S:
            print(f"| {name} | not run | takes up to {fault.limit_s:g} s: name it |", flush=True)
            continue
        if why := fault_ranks.obstacle(fault.program):
            print(f"| {name} | not run | {why} |", flush=True)
            continue
        outcome = inject(fault)
        ended = "never" if outcome.seconds is None else f"{outcome.seconds:.0f} s"
        shown = f"{outcome.by}, which goes on" if fault.goes_on else outcome.by
        print(f"| {name} | {ended} | {outcome.failure or shown} |", flush=True)
        if outcome.failure:
            failed += 1
            print(f"FAILED: {name}: {outcome.failure}\n{outcome.output[-6000:]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if program := os.environ.get(_FAULT):
        fault_ranks.run(program)
    else:
        sys.exit(main())
