"""Product of tiles that ranks exchange by words with flags."""

import tilelang.language as T

from tileweave import language as W

N = 64
WORDS = {"tileweave.protocol": {"S": "ll"}}
"""Options of the program."""


def product_of_words(squares: bool):
    """Build a program that multiplies the received tile by itself, or the sent one by it."""

    @T.prim_func
    def program(X: T.Tensor((N, N), "float16"), Y: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((N, N), "float16")
            sent = T.alloc_shared((N, N), "float16")
            received = T.alloc_shared((N, N), "float16")
            total = T.alloc_fragment((N, N), "float32")
            T.copy(X, sent)
            T.copy(sent, S[1 - W.rank(), 0, 0])
            T.copy(S[W.rank(), 0, 0], received)
            T.clear(total)
            T.gemm(received if squares else sent, received, total, transpose_B=True)
            T.copy(total, Y)

    return program
