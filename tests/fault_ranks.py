"""Programs of the ranks of tests/gpu/faults.py. Rank 1 has the fault, unless it says otherwise."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GPU = torch.cuda.is_available()
FOLDER = Path(os.environ.get("FAULT_FOLDER", "."))
_MOUNT = "cache"


def run(program: str) -> None:
    """Run a program of this file in this rank."""
    if prepare := _BEFORE_IMPORT.get(program):
        prepare()
    if program not in _OWN_INIT:
        _join()
    PROGRAMS[program]()
    if GPU:
        import tileweave as tw

        tw.finalize()
    elif dist.is_initialized():
        dist.destroy_process_group()


def _join() -> None:
    import tileweave as tw

    if GPU:
        tw.init()
    else:
        dist.init_process_group("gloo")


def rank() -> int:
    return int(os.environ["RANK"])


def inject() -> None:
    """Print when the fault is injected."""
    print(f"inject {time.time():.3f}", flush=True)


def call(size: int = 8) -> torch.Tensor:
    """Make one collective call and wait for it."""
    from tileweave import ops

    result = ops.all_reduce(torch.ones(size, 16, device="cuda" if GPU else "cpu"))
    if GPU:
        torch.cuda.synchronize()
    return result


def kill() -> None:
    inject()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_before() -> None:
    call()
    if rank() == 1:
        kill()
    call()
    time.sleep(60)


def killed_in() -> None:
    """Rank 0 is late, so that rank 1 waits in its call."""
    call()
    if rank() == 0:
        time.sleep(2)
    else:
        threading.Timer(1, kill).start()
    call()
    time.sleep(60)


def killed_after() -> None:
    call()
    call()
    if rank() == 1:
        kill()
    time.sleep(60)


def never_calls() -> None:
    """The first call of a shape is collective on the host."""
    call()
    inject()
    if rank() == 1:
        time.sleep(400)
    call(9)


def never_launches() -> None:
    """A later call of a shape waits on the GPU only."""
    call()
    inject()
    if rank() == 1:
        time.sleep(60)
    call()


def never_signals() -> None:
    """An explicit wait of rank 0 names its flag and its peer."""
    import tilelang.language as T

    import tileweave as tw
    from tileweave import language as W

    @T.prim_func
    def wait_for_peer(flags: W.Symmetric((8,), "uint32")):
        with T.Kernel(4, threads=128) as _:
            W.wait_reached(flags[W.rank(), 5], 7, peer=1)

    kernel, flags = tw.compile(wait_for_peer), tw.symmetric((8,), torch.uint32)
    tw.barrier()
    torch.cuda.synchronize()
    inject()
    if rank() == 1:
        time.sleep(120)
    kernel(flags)
    torch.cuda.synchronize()


def never_launches_in_group() -> None:
    """A later call of one group of two waits on the GPU only; the report names the group."""
    from tileweave import ops

    pair, x = dist.new_group([0, 1], group_desc="pair"), torch.ones(8, 16, device="cuda")
    for group in (None, pair):
        ops.all_reduce(x, group)
    torch.cuda.synchronize()
    inject()
    if rank() == 1:
        time.sleep(60)
    ops.all_reduce(x, pair)
    torch.cuda.synchronize()


def _send_rows(count: int, *places: int) -> None:
    """Announce ``count`` of up to 3 rows for each rank, and write them; rank 0 is right."""
    import tilelang.language as T

    import tileweave as tw
    from tileweave import language as W

    ranks, rows, columns = tw.world_size(), 3, 64

    @T.prim_func
    def send(
        count: T.Tensor((1,), "int32"),
        places: T.Tensor((1 + rows,), "int32"),
        received: T.Tensor((ranks, rows, columns), "float32"),
    ):
        with T.Kernel(1, threads=64):
            inbox = W.alloc_ragged((), rows=rows, row=columns)
            row = T.alloc_fragment((columns,), "float32")
            me = W.rank()
            T.fill(row, 1.0)
            for peer in T.serial(ranks):
                W.announce(inbox[peer, me, 0, 0], count[0])
                for i in T.serial(places[rows]):
                    T.copy(row, inbox[peer, me, places[i], 0])
            for source in T.serial(ranks):
                for i in T.serial(W.announced(inbox[me, source, 0, 0])):
                    T.copy(inbox[me, source, i, 0], row)
                    T.copy(row, received[source, i, 0])

    kernel = tw.compile(send, pass_configs={"tileweave.check_rows": True})
    received = torch.zeros(ranks, rows, columns, device="cuda")

    def launch(count: int, *places: int) -> None:
        padded = [*places, *[0] * (rows - len(places)), len(places)]
        values = [torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([count], padded)]
        kernel(*values, received)
        torch.cuda.synchronize()

    launch(2, 1, 0)
    assert received[:, :2].eq(1).all() and received[:, 2:].eq(0).all()
    inject()
    launch(*((count, *places) if rank() == 1 else (2, 1, 0)))
    launch(2, 1, 0)
    time.sleep(60)


def overfull_segment() -> None:
    _send_rows(4, 0, 1)


def row_twice() -> None:
    _send_rows(2, 1, 1)


def row_too_many() -> None:
    _send_rows(1, 0, 1)


def other_shapes() -> None:
    inject()
    call()
    from tileweave import ops

    ops.all_gather(torch.ones(2, 8 + 8 * rank(), device="cuda" if GPU else "cpu"))


def other_version() -> None:
    from tileweave.builtins import versions

    if rank() == 1:
        versions.__version__ = "9.9"
    _init()


def other_heap() -> None:
    if rank() == 1:
        os.environ["TILEWEAVE_HEAP_BYTES"] = str(1 << 28)
    _init()


def other_environment() -> None:
    if rank() == 1:
        os.environ["TILEWEAVE_TIMEOUT_S"] = "7"
    _init()


def _init() -> None:
    """Call ``tw.init``; without a GPU the part of it that compares the ranks."""
    import tileweave as tw

    if GPU:
        inject()
        tw.init()
        return
    from tileweave.ops.core.groups import group_of
    from tileweave.runtime.host.settings import require_equal, settings

    dist.init_process_group("gloo")
    heap, timeout = "TILEWEAVE_HEAP_BYTES", "TILEWEAVE_TIMEOUT_S"
    inject()
    mine = settings(int(os.environ.get(heap, 1 << 30)), float(os.environ[timeout]))
    require_equal(group_of(""), mine)


def heap_exhausted() -> None:
    from tileweave.runtime.host.heap import FreeList, Heap
    from tileweave.runtime.host.session import current

    heap: Heap = current().heap if GPU else _heap_on_cpu()
    if rank() == 1:
        heap._free = FreeList(0, 0)
    inject()
    heap.allocate((1024,), torch.float32)


def _heap_on_cpu() -> Any:
    """Return a heap whose memory the peers do not map."""
    from tileweave.ops.core.groups import group_of
    from tileweave.runtime.host.heap import Heap
    from tileweave.runtime.host.memory import PAGE, Memory

    memory = torch.zeros(4 * PAGE, dtype=torch.uint8)
    return Heap(group_of(""), Memory(memory.data_ptr(), 2 * PAGE, PAGE, memory), 1 << 16)


def compile_add_one() -> Any:
    """Compile a kernel; the cache is that of ``TILELANG_CACHE_DIR``."""
    import tilelang
    import tilelang.language as T

    @T.prim_func
    def add_one(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                A[i] = A[i] + 1

    return tilelang.compile(add_one, target={"kind": "cuda", "arch": "sm_90a"})


def _compile() -> None:
    """Compile the kernel once a node."""
    from tileweave.ops.core.groups import group_of
    from tileweave.runtime.kernel.compile_once import compile_once

    compile_once(group_of(""), compile_add_one, "add_one")


def compile_failure() -> None:
    """Ranks have their own caches, and the nvcc of rank 1 is broken."""
    if rank() == 1:
        from tilelang.contrib import nvcc

        broken = FOLDER / "nvcc"
        broken.write_text("#!/bin/sh\necho nvcc is broken >&2\nexit 1\n")
        broken.chmod(0o755)
        nvcc.get_nvcc_compiler = lambda: str(broken)
    inject()
    _compile()


def _own_cache() -> None:
    os.environ["TILELANG_CACHE_DIR"] = str(FOLDER / f"cache of rank {rank()}")


def _small_disk() -> None:
    """Both ranks use a disk of 256 KB, of which TileLang's folders leave little."""
    folder = FOLDER / _MOUNT
    if rank() == 0:
        mount(folder, "size=256k")
        (folder / "full").touch()
    while not (folder / "full").exists():
        time.sleep(0.01)
    os.environ["TILELANG_CACHE_DIR"] = str(folder)


def disk_full() -> None:
    folder = Path(os.environ["TILELANG_CACHE_DIR"])
    if rank() == 0:
        try:
            (folder / "full").write_bytes(bytes(1 << 20))
        except OSError:
            pass  # it is full now
    _meet()
    inject()
    _compile()


def _empty_cache() -> None:
    folder = FOLDER / _MOUNT
    if rank() == 0:
        mount(folder, "size=16m")
        (folder / "mounted").touch()
    while not (folder / "mounted").exists():
        time.sleep(0.01)
    os.environ["TILELANG_CACHE_DIR"] = str(folder)


def read_only_cache() -> None:
    _meet()
    if rank() == 0:
        subprocess.run(["mount", "-o", "remount,ro", str(FOLDER / _MOUNT)], check=True)
    _meet()
    inject()
    _compile()


def _shared_cache() -> None:
    os.environ["TILELANG_CACHE_DIR"] = str(FOLDER / "cache")


def _libraries() -> set[Path]:
    """Return the compiled kernels in the cache; on GPUs that of the rank barrier is there first."""
    return set((FOLDER / "cache").rglob("executable.so"))


def truncated_kernel() -> None:
    """Another process has compiled the kernel: truncating what is mapped would be another fault."""
    logging.basicConfig(level=logging.WARNING)
    if rank() == 0:
        program = "from tests.fault_ranks import compile_add_one; compile_add_one()"
        checkout = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path}
        mapped = _libraries()
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        (library,) = _libraries() - mapped
        os.truncate(library, library.stat().st_size // 2)
    _meet()
    inject()
    _compile()


def _meet() -> None:
    from tileweave.ops.core.groups import group_of

    group_of("").meet("fault")


def interrupted() -> None:
    """Rank 0 waits for rank 1 on the host, and is interrupted."""
    if rank() == 0:

        def interrupt() -> None:
            inject()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(2, interrupt).start()
        call()
    time.sleep(60)


def exception_between() -> None:
    call()
    if rank() == 1:
        inject()
        raise ValueError("a bug of the user")
    call(9)


def graph_after_finalize() -> None:
    import tileweave as tw
    from tileweave import ops

    x = torch.ones(8, 16, device="cuda")
    out = ops.all_reduce(x, transport="ldst")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.all_reduce(x, out=out, transport="ldst")
    graph.replay()
    tw.finalize()
    inject()
    graph.replay()
    torch.cuda.synchronize()


class _Numbers(torch.utils.data.Dataset):
    def __init__(self, calls: bool = False) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self.calls:
            call()
        return index


def _load(calls: bool) -> list[int]:
    loader = torch.utils.data.DataLoader(
        _Numbers(calls), batch_size=1, num_workers=2, multiprocessing_context="fork"
    )
    return [int(batch) for batch in loader]


def forked_loader() -> None:
    call()
    inject()
    print(f"batches {_load(False)}", flush=True)
    call()


def forked_call() -> None:
    call()
    inject()
    _load(True)


def two_jobs() -> None:
    """Both jobs compile into one cache at the same time, and call."""
    inject()
    _compile()
    for size in (8, 9, 10):
        if not bool((call(size) == 2).all()):
            sys.exit("wrong")
    print("right", flush=True)


def mount(folder: Path, options: str) -> None:
    """Mount a file system in memory. Needs root."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", str(folder)], check=True
    )


def unmount(folder: Path) -> None:
    if os.path.ismount(folder / _MOUNT):
        subprocess.run(["umount", str(folder / _MOUNT)], check=True)


def obstacle(program: str) -> str:
    """Return why a fault cannot be injected here; empty if it can."""
    if program in ("disk_full", "read_only_cache") and not _can_mount():
        return "mounting a file system needs root"
    return ""


def _can_mount() -> bool:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        try:
            mount(Path(folder) / _MOUNT, "size=64k")
        except (OSError, subprocess.CalledProcessError):
            return False
        unmount(Path(folder))
    return True


_BEFORE_IMPORT = {
    "compile_failure": _own_cache,
    "disk_full": _small_disk,
    "read_only_cache": _empty_cache,
    "truncated_kernel": _shared_cache,
    "two_jobs": _shared_cache,
}
_OWN_INIT = ("other_version", "other_heap", "other_environment")
PROGRAMS = {
    f.__name__: f
    for f in (
        killed_before, killed_in, killed_after, never_calls, never_launches,
        never_launches_in_group, never_signals, overfull_segment, row_twice, row_too_many,
        other_shapes, other_version, other_heap, other_environment, heap_exhausted,
        compile_failure, disk_full, read_only_cache, truncated_kernel, interrupted,
        exception_between, graph_after_finalize, forked_loader, forked_call, two_jobs,
    )
}  # fmt: skip
