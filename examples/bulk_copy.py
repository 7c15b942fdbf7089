"""Copy any number of bytes by TMA bulk copies of few blocks, to own memory or to a peer's.

    torchrun --nproc-per-node=2 examples/bulk_copy.py [--megabytes 256]

The host calls ``bulk_copy(dst, src, blocks)``, which runs on torch's current stream. One thread of
each block keeps a ring of chunks in shared memory in flight. Ordinary loads and stores copy the
bytes after the last complete chunk, and tensors that are not aligned to 16 bytes. The program
checks odd sizes and alignments. Then it prints GB/s for several numbers of blocks, compared with
the copy engine and with loads and stores.
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
"""Number of chunks of the ring that are being loaded, while the others are being stored."""

n = T.dynamic("n", "int64")


def bulk_copy_with(stages: int, chunk: int, ahead: int):
    """Return the program with a ring of ``stages`` chunks of ``chunk`` bytes. It loads ``ahead``
    chunks while it stores the others."""

    @T.prim_func
    def bulk_copy(src: T.Tensor((n,), "uint8"), dst: T.Tensor((n,), "uint8"), blocks: T.int32):
        with T.Kernel(blocks, threads=32) as block:
            ring = T.alloc_shared((stages, chunk), "uint8")
            full = T.alloc_barrier([1] * stages)
            chunks = T.alloc_var("int32")
            chunks = T.Cast("int32", n // chunk)
            own_chunks = T.alloc_var("int32")
            own_chunks = T.max((chunks - block + blocks - 1) // blocks, 0)
            if T.get_thread_binding() == 0:
                for k in T.serial(own_chunks + ahead):
                    if k >= ahead:
                        loaded = k - ahead
                        T.mbarrier_wait_parity(full[loaded % stages], loaded // stages % 2)
                        offset = T.Cast("int64", block + loaded * blocks) * chunk
                        W.bulk_store(dst[offset], ring[loaded % stages, 0], chunk)
                        W.bulk_commit()
                    if k < own_chunks:
                        # Store k - stages read the previous chunk of this stage. Later stores may
                        # continue.
                        if k >= stages:
                            W.bulk_wait(stages - ahead, read=True)
                        offset = T.Cast("int64", block + k * blocks) * chunk
                        W.bulk_load(ring[k % stages, 0], src[offset], chunk, full[k % stages])
                        T.mbarrier_arrive(full[k % stages])
                W.bulk_wait(0)
            if block == 0:
                copied = T.Cast("int64", chunks) * chunk
                W.put_block(src[copied], dst[copied], n - copied)

    return bulk_copy


bulk_copy_program = bulk_copy_with(STAGES, CHUNK, AHEAD)


@T.prim_func
def load_store_program(src: T.Tensor((n,), "uint8"), dst: T.Tensor((n,), "uint8"), blocks: T.int32):
    with T.Kernel(blocks, threads=1024) as block:
        bytes_per_block = (n + blocks * 16 - 1) // (blocks * 16) * 16
        first = T.min(block * bytes_per_block, n)
        W.put_block(src[first], dst[first], T.min(bytes_per_block, n - first))


m = T.dynamic("m", "int64")


@T.prim_func
def multicast_program(
    src: T.Tensor((m,), "float32"), dst: T.Tensor((m,), "float32"), blocks: T.int32
):
    """Store to a multicast address, so that each store arrives at every rank."""
    with T.Kernel(blocks, threads=512) as block:
        stride = T.Cast("int64", blocks) * 2048
        for step in T.serial((m + stride - 1) // stride):
            first = step * stride + block * 2048 + T.get_thread_binding() * 4
            if first + 4 <= m:
                W.multimem_st(dst[first], src[first : first + 4])
            else:
                for i in T.serial(m - first):
                    W.multimem_st(dst[first + i], src[first + i])


@cache
def compiled(program):
    return tw.compile(program)


def bulk_copy(dst: torch.Tensor, src: torch.Tensor, blocks: int = 8) -> None:
    """Copy ``src`` to ``dst``, a tensor of this rank or of a peer.

    Both are contiguous and have the same number of bytes.
    """
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
    """Copy odd sizes at odd offsets to a peer. Return whether they arrived, and nothing else
    changed."""
    passed = True
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
                # The reader compares with the data that the writer sends through NCCL.
                sent = [torch.empty_like(source) for _ in range(tw.world_size())]
                if tw.world_size() > 1:
                    torch.distributed.all_gather(sent, source.contiguous())
                else:
                    sent = [source]
                writer = (tw.rank() - 1) % tw.world_size()
                received = buffer.local[: size + 64]
                before, after = received[:offset], received[offset + size :]
                equal = bool((received[offset : offset + size] == sent[writer]).all())
                equal &= bool((before == 77).all()) and bool((after == 77).all())
                if not equal:
                    print(
                        f"failed: rank {tw.rank()}, {size} bytes from offset {source_offset} to "
                        f"{offset}"
                    )
                passed &= equal
    return passed


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
    parser.add_argument("--runs", type=int, default=20, help="number of checks, each with new data")
    options = parser.parse_args()
    nbytes = options.megabytes << 20
    tw.init(heap_bytes=nbytes + (64 << 20))
    rank, ranks = tw.rank(), tw.world_size()
    buffer = tw.symmetric((nbytes,), torch.uint8)
    passed = all([check(buffer, (rank + 1) % ranks) for _ in range(options.runs)])
    if rank == 0:
        result = "passed" if passed else "failed"
        print(f"{result}: {options.runs} checks of odd sizes and alignments")

    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    for program in (bulk_copy_program, load_store_program):
        compiled(program)
    if rank == 0:
        targets = {"own memory": torch.empty_like(source)}
        if ranks > 1:
            targets["a peer's memory"] = buffer.peer(1)
        for where, target in targets.items():
            engine = gigabytes_per_second(lambda t=target: t.copy_(source), nbytes)
            print(f"{options.megabytes} MiB to {where}, GB/s written; copy engine {engine:.0f}")
            for blocks in (1, 2, 4, 8, 16, 32, 64, 132):
                tma, ldst = (
                    gigabytes_per_second(
                        lambda t=target, p=p, b=blocks: copy(p, t, source, b), nbytes
                    )
                    for p in (bulk_copy_program, load_store_program)
                )
                print(f"  {blocks:4d} blocks: TMA {tma:5.0f}, load/store {ldst:5.0f}")
    passed &= check_multicast(buffer, source)
    tw.barrier()
    torch.cuda.synchronize()
    tw.finalize()
    return 0 if passed else 1


def check_multicast(buffer: tw.SymmetricTensor, source: torch.Tensor) -> bool:
    """Write the data of rank 0 to every rank by multicast stores, if the machine has them. Return
    whether they arrived."""
    if buffer.multicast is None:
        if tw.rank() == 0:
            print(f"multicast memory not tested: {topology().multicast_refusal}")
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
