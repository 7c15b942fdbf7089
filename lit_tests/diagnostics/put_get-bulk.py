# RUN: %python %s | %filecheck %s
"""Put, get and bulk copies refuse illegal operands when they are traced, and name the line."""

import tilelang.language as T

from tests.verdicts import print_verdict
from tileweave import language as W


def refused(name, statement, dtype="float32"):
    with print_verdict(name):

        @T.prim_func
        def program(
            A: T.Tensor((64, 64), "float32"),
            S: W.Symmetric((64, 64), dtype),
            P: T.Tensor((64,), "float4_e2m1fn"),
        ):
            with T.Kernel(1, threads=128):
                tile = T.alloc_shared((64, 64), dtype)
                full = T.alloc_barrier(1)
                statement(A, S, P, tile, full)


# CHECK: put type: put_block: src=A has type float32; expected type float16, as dst=S
# LINE: CHECK-NEXT: --> {{.*}}put_get-bulk.py:
refused("put type", lambda A, S, P, t, f: W.put_block(A, S, 3, peer=1), "float16")

# CHECK: put small: put_warp: src=P has type float4_e2m1fn; expected elements of 1, 2, 4, 8 or 16 bytes
refused("put small", lambda A, S, P, t, f: W.put_warp(P, P, 3))

# CHECK: put shared: put_block: src=tile is in shared.dyn memory; expected a global-memory tensor
refused("put shared", lambda A, S, P, t, f: W.put_block(t, S, 3))

# CHECK: put value: put_block: src=3; expected an element of a global-memory tensor, such as S[i]
refused("put value", lambda A, S, P, t, f: W.put_block(3, S, 3))

# CHECK: put size: put_block: size=-1; expected a number of elements, 0 or more
refused("put size", lambda A, S, P, t, f: W.put_block(A, S, -1))

# CHECK: put float: get_warp: peer=1.5; expected a rank as an integer
refused("put float", lambda A, S, P, t, f: W.get_warp(S, A, 3, peer=1.5))

# CHECK: get own: get_block: peer=1, and src=A is not symmetric; expected a W.Symmetric tensor
refused("get own", lambda A, S, P, t, f: W.get_block(A, S, 3, peer=1))

# CHECK: arguments: put_block: {{.*}}missing a required argument: 'size'; expected put_block(
refused("arguments", lambda A, S, P, t, f: W.put_block(A, S))

# CHECK: load space: bulk_load: dst=A is in global memory; expected a shared-memory tensor
refused("load space", lambda A, S, P, t, f: W.bulk_load(A, S, 4, f[0]))

# CHECK: load end: bulk_load: size=4096 from dst=tile[1, 0] exceeds the tensor; expected at most the 4032 elements up to its end
refused("load end", lambda A, S, P, t, f: W.bulk_load(t[1, 0], S, 4096, f[0]))

# CHECK: load start: bulk_load: dst=tile[0, 1] starts at byte 4; expected a multiple of 16 bytes
refused("load start", lambda A, S, P, t, f: W.bulk_load(t[0, 1], S, 4, f[0]))

# CHECK: load barrier: bulk_load: barrier=A is in global memory; expected a barrier-memory tensor
refused("load barrier", lambda A, S, P, t, f: W.bulk_load(t, S, 4, A))

# CHECK: store size: bulk_store: size=3 of type float32 is 12 bytes; expected a positive multiple of 16 bytes, at most 1048575
refused("store size", lambda A, S, P, t, f: W.bulk_store(S, t, 3))

# CHECK: load size: bulk_load: size=262144 of type float32 is 1048576 bytes; expected a positive
refused("load size", lambda A, S, P, t, f: W.bulk_load(t, S, 1 << 18, f[0]))

# CHECK: store tile: bulk_store: size=65536 exceeds src={{.*}}; expected at most its
refused("store tile", lambda A, S, P, t, f: W.bulk_store(S, t, 1 << 16))

# CHECK: reduce type: bulk_reduce: op='min': S has type float32; expected uint32, int32, uint64, int64, float16, bfloat16
refused("reduce type", lambda A, S, P, t, f: W.bulk_reduce(S, t, 4, op="min"))

# CHECK: reduce op: bulk_reduce: op='inc'; expected 'add' or 'min' or 'max' or 'and' or 'or' or 'xor'
refused("reduce op", lambda A, S, P, t, f: W.bulk_reduce(S, t, 4, op="inc"))

# CHECK: reduce bytes: bulk_reduce: op='add': S has type uint8; expected uint32, int32, uint64, int64, float16,
refused("reduce bytes", lambda A, S, P, t, f: W.bulk_reduce(S, t, 16), "uint8")

# CHECK: wait groups: bulk_wait: n=-1; expected 0 or more
refused("wait groups", lambda A, S, P, t, f: W.bulk_wait(-1))

# CHECK: wait constant: bulk_wait: n=1.5; expected a Python integer
refused("wait constant", lambda A, S, P, t, f: W.bulk_wait(1.5))

# CHECK: wait read: bulk_wait: read=1; expected True or False
refused("wait read", lambda A, S, P, t, f: W.bulk_wait(0, read=1))

# CHECK: right: accepted
refused("right", lambda A, S, P, t, f: W.bulk_reduce(S, t, 4))
