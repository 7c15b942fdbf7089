"""A rank whose peer never signals ends within the time-out plus 5 s.

Its error names the waiting rank, the peer and the flag.

    python tests/gpu/dead_peer.py

Starts itself under torchrun on two GPUs and reads what the ranks print.
"""

import os
import re
import subprocess
import sys
import time

TIMEOUT_S = 3


def program() -> None:
    """Run the ranks: rank 0 waits for rank 1, which sleeps."""
    import tilelang.language as T
    import torch

    import tileweave as tw
    from tileweave import language as W

    @T.prim_func
    def wait_for_peer(flags: W.Symmetric((8,), "uint32")):
        with T.Kernel(4, threads=128) as _:
            W.wait_reached(flags[W.rank(), 5], 7, peer=1)

    tw.init()
    flags = tw.symmetric((8,), torch.uint32)
    kernel = tw.compile(wait_for_peer)
    tw.barrier()
    torch.cuda.synchronize()
    sys.stdout.write(f"start {time.time():.3f}\n")
    sys.stdout.flush()
    if tw.rank() == 0:
        kernel(flags)
        torch.cuda.synchronize()
    else:
        time.sleep(120)


def main() -> int:
    environment = {**os.environ, "TILEWEAVE_TIMEOUT_S": str(TIMEOUT_S), "DEAD_PEER_PROGRAM": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        __file__,
    ]
    run = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    ended = time.time()
    starts = [float(t) for t in re.findall(r"start (\d+\.\d+)", run.stdout)]
    report = re.search(
        rf"tileweave: rank 0 waited {TIMEOUT_S} s for a signal from rank 1 and gave up: "
        rf"wait_reached\(.*\) at .*; flag \[0, 5\] of SymmetricTensor.*seen 0, expected 7",
        run.stdout,
    )
    took = ended - max(starts, default=0.0)
    checks = {
        "non-zero exit": run.returncode != 0,
        "report names rank, peer, flag, seen, expected": report is not None,
        "DeadlockError raised": "DeadlockError" in run.stdout,
        f"ended {took:.1f} s after the start, within the time-out plus 5 s": took <= TIMEOUT_S + 5,
    }
    for what, ok in checks.items():
        print(f"{'ok' if ok else 'FAILED'}: {what}")
    if report is not None:
        print(report.group(0))
    if not all(checks.values()):
        print(run.stdout)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    if os.environ.get("DEAD_PEER_PROGRAM"):
        program()
    else:
        sys.exit(main())
