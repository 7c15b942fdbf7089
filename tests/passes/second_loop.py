"""Program with two pipelined loops, of which the second one loads from a peer."""

import tilelang.language as T

from tileweave import language as W

N, STEPS = 32, 4


def second_loop(num_stages: int):
    """Build a program with two pipelined loops. TileLang specializes the warps of the first one."""

    @T.prim_func
    def program(A: T.Tensor((STEPS, N, N), "float16"), out: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((STEPS, N, N), "float16")
            loaded = T.alloc_shared((N, N), "float16")
            received = T.alloc_shared((N, N), "float16")
            total = T.alloc_fragment((N, N), "float32")
            T.clear(total)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(A[k, 0, 0], loaded)
                for i, j in T.Parallel(N, N):
                    total[i, j] += loaded[i, j]
            for k in T.serial(STEPS):
                for i, j in T.Parallel(N, N):
                    S[1 - W.rank(), k, i, j] = total[i, j] + k
            for k in T.Pipelined(STEPS, num_stages=num_stages):
                T.copy(S[W.rank(), k, 0, 0], received)
                for i, j in T.Parallel(N, N):
                    total[i, j] += (k + 1) * received[i, j]
            T.copy(total, out)

    return program
