# RUN: %python %s | %filecheck %s
"""Multicast operations refuse operations, types and widths without an instruction."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def refuse(name, call, dtype):
    print("TEST:", name)
    try:

        @T.prim_func
        def program(M: T.Tensor((64,), dtype)):
            with T.Kernel(1, threads=32):
                x = T.alloc_local((16,), dtype)
                T.evaluate(call(M, x))

    except tw.LanguageError as error:
        print(error)


# CHECK-LABEL: TEST: load_min_float
# CHECK: multimem_ld_reduce: op='min': M has type float32, lanes=1; expected uint32, int32, uint64, int64, float16x2, float16x4, float16x8, bfloat16x2, bfloat16x4, bfloat16x8
# LINE: CHECK-NEXT: --> {{.*}}multimem-refused.py:18
refuse("load_min_float", lambda M, x: W.multimem_ld_reduce(M[0], op="min"), "float32")

# CHECK-LABEL: TEST: load_half
# CHECK: multimem_ld_reduce: op='add': M has type bfloat16, lanes=1; expected uint32, int32, uint64, int64, float32, float32x2, float32x4, float64, float16x2, float16x4, float16x8, bfloat16x2, bfloat16x4, bfloat16x8
refuse("load_half", lambda M, x: W.multimem_ld_reduce(M[0], op="add"), "bfloat16")

# CHECK-LABEL: TEST: load_wide
# CHECK: multimem_ld_reduce: op='add': M has type float64, lanes=2; expected uint32,
refuse("load_wide", lambda M, x: W.multimem_ld_reduce(M[0], 2, op="add"), "float64")

# CHECK-LABEL: TEST: load_xor
# CHECK: multimem_ld_reduce: op='xor': M has type float32, lanes=1; expected uint32, int32, uint64, int64{{$}}
refuse("load_xor", lambda M, x: W.multimem_ld_reduce(M[0], op="xor"), "float32")

# CHECK-LABEL: TEST: load_op
# CHECK: multimem_ld_reduce: op='mul'; expected 'add' or 'min' or 'max' or 'and' or 'or' or 'xor'
refuse("load_op", lambda M, x: W.multimem_ld_reduce(M[0], op="mul"), "float32")

# CHECK-LABEL: TEST: load_no_op
# CHECK: multimem_ld_reduce: missing a required {{.*}}'op'; expected multimem_ld_reduce(ref, lanes=1, *, op, scope='sys', sem='relaxed')
refuse("load_no_op", lambda M, x: W.multimem_ld_reduce(M[0]), "float32")

# CHECK-LABEL: TEST: red_max_half
# CHECK: multimem_red: op='max': M has type float16x2; expected uint32, int32, uint64, int64{{$}}
refuse("red_max_half", lambda M, x: W.multimem_red(M[0], x[0:2], op="max"), "float16")

# CHECK-LABEL: TEST: st_wide
# CHECK: multimem_st: M has type float32x8; expected uint32, int32, uint64, int64, float32, float32x2, float32x4,
refuse("st_wide", lambda M, x: W.multimem_st(M[0], x[0:8]), "float32")

# CHECK-LABEL: TEST: st_sem
# CHECK: multimem_st: sem='acquire'; expected 'relaxed' or 'release'
refuse("st_sem", lambda M, x: W.multimem_st(M[0], 1.0, sem="acquire"), "float32")


def refuse_vector(name, columns, first):
    print("TEST:", name)

    @T.prim_func
    def program(X: T.Tensor((4, columns), "float32"), Y: T.Tensor((4, columns), "float32")):
        with T.Kernel(4, threads=32) as row:
            S = W.alloc_symmetric((4, columns), "float32")
            T.copy(X[row, 0:columns], S[W.rank(), row, 0:columns])
            for i in T.Parallel(7):
                j = i * 4
                Y[row, j : j + 4] = W.multimem_ld_reduce(S[:, row, i * 4 + first], 4, op="add")

    try:
        tw.emit(program, world_size=2)
    except tw.LanguageError as error:
        print(error)


# Rows, and the second version of S, would begin between two vectors.
# CHECK-LABEL: TEST: rows
# CHECK: multimem_ld_reduce: S has rows of 34 elements; expected a multiple of 4 for vectors of 4 elements
refuse_vector("rows", 34, 0)

# CHECK-LABEL: TEST: first
# CHECK: multimem_ld_reduce: S has a vector from element {{.*}} of a row; expected a multiple of 4
refuse_vector("first", 32, 1)


def show_vector(name, shape, index):
    """Compile a program that loads vectors of 4 elements.

    Args:
        index: function of the block, the element of a loop and the rank; the place of a vector.
    """
    print("TEST:", name)

    @T.prim_func
    def program(S: W.Symmetric(shape, "float32"), Y: T.Tensor((4, 7, 4), "float32")):
        with T.Kernel(4, threads=32) as block:
            W.sync_ranks()
            for i in T.serial(7):
                first = i * 4
                place = index(block, first, W.rank())
                Y[block, i, 0:4] = W.multimem_ld_reduce(S[(slice(None), *place)], 4, op="add")

    try:
        tw.emit(program, world_size=2)
    except tw.LanguageError as error:
        print(error)
    else:
        print("accepted")


# CHECK-LABEL: TEST: one_row
# CHECK: accepted
show_vector("one_row", (34,), lambda block, first, rank: (first,))

# CHECK-LABEL: TEST: even_rows
# CHECK: accepted
show_vector("even_rows", (8, 34), lambda block, first, rank: (block * 2, first))

# CHECK-LABEL: TEST: compensated
# CHECK: accepted
show_vector("compensated", (2, 34), lambda block, first, rank: (1, first + 2))

# CHECK-LABEL: TEST: all_rows
# CHECK: multimem_ld_reduce: S has rows of 34 elements; expected a multiple of 4 for vectors of 4 elements
show_vector("all_rows", (4, 34), lambda block, first, rank: (block, first))

# CHECK-LABEL: TEST: bound_start
# CHECK: multimem_ld_reduce: S has a vector from element {{.*}} of a row; expected a multiple of 4
show_vector("bound_start", (36,), lambda block, first, rank: (first + 2,))

# CHECK-LABEL: TEST: rank_start
# CHECK: multimem_ld_reduce: S has a vector from element {{.*}} of a row; expected a multiple of 4
show_vector("rank_start", (36,), lambda block, first, rank: (first + rank,))
