"""A transport of few blocks: the TMA copies any number of bytes to own memory or to a peer's.

    torchrun --nproc-per-node=2 examples/bulk_copy.py [--megabytes 256]

``bulk_copy(dst, src, blocks)`` is callable from the host, on torch's current stream. One thread of
each block keeps a ring of chunks in shared memory in flight; bytes beyond the last whole chunk, and
tensors that are not 16-byte aligned, go by ordinary loads and stores. The program checks odd sizes
and alignments, then prints GB/s by number of blocks, beside the copy engine and beside loads and
stores.
"""

import argparse
import sys
from functools import cache

import tilelang.language as T
import torch

import tileweave as tw
from tileweave import language as W
from tileweave.runtime.host.topology import topology

CHUNK = 16384
STAGES = 14
AHEAD = 8
"""Chunks being loaded; the others of the ring are being stored."""

n = T.dynamic("n", "int64")


def bulk_copy_with(stages: int, chunk: int, ahead: int):
    """The program with a ring of ``stages`` chunks of ``chunk`` bytes, ``ahead`` of them being
    loaded."""

    @T.prim_func
    def bulk_copy(src: T.Tensor((n,), "uint8"), dst: T.Tensor((n,), "uint8"), blocks: T.int32):
        with T.Kernel(blocks, threads=32) as block:
            ring = T.alloc_shared((stages, chunk), "uint8")
            full = T.alloc_barrier([1] * stages)
            whole = T.alloc_var("int32")
            whole = T.Cast("int32", n // chunk)
            mine = T.alloc_var("int32")
            mine = T.max((whole - block + blocks - 1) // blocks, 0)
            if T.get_thread_binding() == 0:
                for k in T.serial(mine + ahead):
                    if k >= ahead:
                        done = k - ahead
                        T.mbarrier_wait_parity(full[done % stages], done // stages % 2)
                        at = T.Cast("int64", block + done * blocks) * chunk
                        W.bulk_store(dst[at], ring[done % stages, 0], chunk)
                        W.bulk_commit()
                    if k < mine:
                        # The chunk before in this place left with store k - stages: later ones may
                        # go on.
                        if k >= stages:
                            W.bulk_wait(stages - ahead, read=True)
                        at = T.Cast("int64", block + k * blocks) * chunk
                        W.bulk_load(ring[k % stages, 0], src[at], chunk, full[k % stages])
                        T.mbarrier_arrive(full[k % stages])
                W.bulk_wait(0)
            if block == 0:
                rest = T.Cast("int64", whole) * chunk
                W.put_block(src[rest], dst[rest], n - rest)

    return bulk_copy


bulk_copy_program = bulk_copy_with(STAGES, CHUNK, AHEAD)


@T.prim_func
def load_store_program(src: T.Tensor((n,), "uint8"), dst: T.Tensor((n,), "uint8"), blocks: T.int32):
    with T.Kernel(blocks, threads=1024) as block:
        share = (n + blocks * 16 - 1) // (blocks * 16) * 16
        first = T.min(block * share, n)
        W.put_block(src[first], dst[first], T.min(share, n - first))


m = T.dynamic("m", "int64")


@T.prim_func
def multicast_program(
    src: T.Tensor((m,), "float32"), dst: T.Tensor((m,), "float32"), blocks: T.int32
):
    """One store to a multicast address arrives at every rank."""
    with T.Kernel(blocks, threads=512) as block:
        stride = T.Cast("int64", blocks) * 2048
        for turn in T.serial((m + stride - 1) // stride):
            at = turn * stride + block * 2048 + T.get_thread_binding() * 4
            if at + 4 <= m:
                W.multimem_st(dst[at], src[at : at + 4])
            else:
                for rest in T.serial(m - at):
                    W.multimem_st(dst[at + rest], src[at + rest])


@cache
def compiled(program):
    return tw.compile(program)


def bulk_copy(dst: torch.Tensor, src: torch.Tensor, blocks: int = 8) -> None:
    """Copy ``src`` to ``dst``, contiguous tensors of the same number of bytes; ``dst`` may be a
    peer's."""
    aligned = (dst.data_ptr() | src.data_ptr()) % 16 == 0
    copy(bulk_copy_program if aligned else load_store_program, dst, src, blocks)


def copy(program, dst: torch.Tensor, src: torch.Tensor, blocks: int) -> None:
    if dst.nbytes != src.nbytes or not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError(
            f"copy: {dst.nbytes} bytes from {src.nbytes}; expected contiguous tensors of the "
            "same size"
        )
    if src.nbytes:
        compiled(program)(src.view(-1).view(torch.uint8), dst.view(-1).view(torch.uint8), blocks)


def check(buffer: tw.SymmetricTensor, peer: int) -> bool:
    """Copy odd sizes at odd offsets to a peer and read there what arrived, and that nothing else
    changed."""
    right = True
    sizes = [
        1,
        15,
        16,
        17,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        8 * CHUNK,
        50 * CHUNK + 12345,
        3 * CHUNK * STAGES + 16,
    ]
    for size in sizes:
        for source_offset, offset in ((0, 0), (0, 16), (3, 5), (16, 1)):
            for program in (bulk_copy, lambda d, s, b: copy(load_store_program, d, s, b)):
                source = torch.randint(0, 256, (size + 32,), dtype=torch.uint8, device="cuda")[
                    source_offset:
                ][:size]
                buffer.local[: size + 64].fill_(77)
                tw.barrier()
                program(buffer.peer(peer)[offset : offset + size], source, 3)
                tw.barrier()
                # The writer's data, as seen by the reader: ask for it through the group.
                sent = [torch.empty_like(source) for _ in range(tw.world_size())]
                if tw.world_size() > 1:
                    torch.distributed.all_gather(sent, source.contiguous())
                else:
                    sent = [source]
                writer = (tw.rank() - 1) % tw.world_size()
                got = buffer.local[: size + 64]
                ok = bool((got[offset : offset + size] == sent[writer]).all())
                ok &= bool((got[:offset] == 77).all()) and bool((got[offset + size :] == 77).all())
                if not ok:
                    print(
                        f"wrong: rank {tw.rank()}, {size} bytes from offset {source_offset} to "
                        f"{offset}"
                    )
                right &= ok
    return right


def gigabytes_per_second(run, nbytes: int, repeats: int = 10) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return nbytes / sorted(times)[repeats // 2] / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--runs", type=int, default=20, help="rounds of checks, with fresh data")
    options = parser.parse_args()
    nbytes = options.megabytes << 20
    tw.init(heap_bytes=nbytes + (64 << 20))
    rank, ranks = tw.rank(), tw.world_size()
    buffer = tw.symmetric((nbytes,), torch.uint8)
    right = all([check(buffer, (rank + 1) % ranks) for _ in range(options.runs)])
    if rank == 0:
        print(f"{'right' if right else 'wrong'}: {options.runs} rounds of odd sizes and alignments")

    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    for program in (bulk_copy_program, load_store_program):
        compiled(program)
    if rank == 0:
        targets = {"own memory": torch.empty_like(source)}
        if ranks > 1:
            targets["a peer's memory"] = buffer.peer(1)
        for where, target in targets.items():
            engine = gigabytes_per_second(lambda t=target: t.copy_(source), nbytes)
            print(f"{options.megabytes} MiB to {where}, GB/s written; torch copy {engine:.0f}")
            for blocks in (1, 2, 4, 8, 16, 32, 64, 132):
                tma, ldst = (
                    gigabytes_per_second(
                        lambda t=target, p=p, b=blocks: copy(p, t, source, b), nbytes
                    )
                    for p in (bulk_copy_program, load_store_program)
                )
                print(f"  {blocks:4d} blocks: TMA {tma:5.0f}, load/store {ldst:5.0f}")
    right &= check_multicast(buffer, source)
    tw.barrier()
    torch.cuda.synchronize()
    tw.finalize()
    return 0 if right else 1


def check_multicast(buffer: tw.SymmetricTensor, source: torch.Tensor) -> bool:
    """Write rank 0's data to every rank by one store each, where the machine can."""
    if buffer.multicast is None:
        if tw.rank() == 0:
            print(f"multicast memory: not run, {topology().multicast_refusal}")
        return True
    kernel = tw.compile(multicast_program)
    buffer.local.zero_()
    tw.barrier()
    if tw.rank() == 0:

        def run():
            kernel(source.view(torch.float32), buffer.multicast.view(torch.float32), 64)

        print(
            f"multicast memory: {gigabytes_per_second(run, source.nbytes):.0f} GB/s to every rank"
        )
    tw.barrier()
    torch.cuda.synchronize()
    sent = [source]
    if tw.world_size() > 1:
        torch.distributed.broadcast_object_list(sent := [source.cpu()], src=0)
    return bool((buffer.local == sent[0].to(buffer.local.device)).all())


if __name__ == "__main__":
    sys.exit(main())
