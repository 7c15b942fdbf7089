"""A script of stock TileLang for one GPU: softmax of rows.

On a GPU: ``python examples/tilelang_softmax.py``. Without one: ``tileweave run`` and its name.
"""

import tilelang
import tilelang.language as T
import torch


@tilelang.jit(out_idx=[-1])
def softmax(m, n):
    @T.prim_func
    def kernel(X: T.Tensor((m, n), "float16"), Y: T.Tensor((m, n), "float16")):
        with T.Kernel(m, threads=64) as row:
            x = T.alloc_fragment((1, n), "float32")
            largest = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(X[row, 0], x)
            T.reduce_max(x, largest, dim=1)
            for _, i in T.Parallel(1, n):
                x[0, i] = T.exp(x[0, i] - largest[0])
            T.reduce_sum(x, total, dim=1)
            for _, i in T.Parallel(1, n):
                Y[row, i] = x[0, i] / total[0]

    return kernel


if __name__ == "__main__":
    X = torch.randn(8, 256, dtype=torch.float16, device="cuda")
    Y = softmax(*X.shape)(X)
    torch.testing.assert_close(Y, X.softmax(dim=1), rtol=1e-2, atol=1e-3)
    print("softmax: right")
