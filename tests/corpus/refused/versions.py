"""Loops that write again what may still be read, or versions that no loop counts."""

import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import F32, N, Row, Shared, refused


@refused(
    "T.copy writes S[1 - W.rank(), 0]: S[0, 0:8] is written 4 times in one launch, by rank 1; "
    "expected once, or a read of each before the next"
)
def written_again_unread(X: T.Tensor((4, N), F32), S: Shared, Y: T.Tensor((4, N), F32)):
    with T.Kernel(2, threads=32) as block:
        for r in T.serial(4):
            if block == 0:
                T.copy(X[r, 0:N], S[1 - W.rank(), 0])  # HERE
        for r in T.serial(4):
            if block == 1:
                T.copy(S[W.rank(), 0], Y[r, 0:N])


@refused(
    "T.copy reads S[W.rank(), 0], which is in some iterations what T.copy writes S[1 - W.rank(), "
    "0], in others what T.copy writes S[1 - W.rank(), 0], in versions that no loop counts; "
    "expected another tensor for it, or explicit signals and waits"
)
def reads_of_either_version(X: Row, S: Shared, Y: T.Tensor((4, N), F32)):
    with T.Kernel(1, threads=32):
        T.copy(X, S[1 - W.rank(), 0])  # HERE
        for r in T.serial(4):
            T.copy(S[W.rank(), 0], Y[r, 0:N])  # HERE
            if r == 1:
                T.copy(X, S[1 - W.rank(), 0])  # HERE


@refused(
    "T.copy reads S[W.rank(), 0]: S[0, 0:8] is written 4 times in one launch, all of them after "
    "this access; expected a write before it"
)
def reads_before_all_versions(S: Shared):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((N,), F32)
        for _ in T.serial(4):
            T.copy(S[W.rank(), 0], tile)  # HERE
            T.copy(tile, S[1 - W.rank(), 0])  # HERE


@refused(
    "a load reads S[W.rank(), i], and a store writes S[1 - W.rank(), i] in one statement of all "
    "threads, and S[0, 0:8] is written 4 times in one launch: the read may see either version"
)
def two_versions_in_one_statement(X: Row, S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        T.copy(X, S[1 - W.rank(), 0])
        for _ in T.serial(3):
            for i in T.Parallel(N):  # HERE
                S[1 - W.rank(), i] = S[W.rank(), i] + 1.0
        T.copy(S[W.rank(), 0], Y)


@refused(
    "T.copy reads S[W.rank(), 0], and T.atomic_add adds to S[1 - W.rank(), 0] after that, and "
    "S[0, 0:8] is written 4 times in one launch: the read may see either version"
)
def adds_to_what_is_read(S: Shared, Y: T.Tensor((4, N), F32)):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((N,), F32)
        for r in T.serial(4):
            T.clear(tile)
            T.copy(tile, S[W.rank(), 0])
            T.copy(S[W.rank(), 0], Y[r, 0:N])  # HERE
            T.atomic_add(S[1 - W.rank(), 0], tile)  # HERE


@factory
def hundred_versions(X: Row, Y: Row):
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((N,), F32)
        tile = T.alloc_shared((N,), F32)
        T.copy(X, tile)
        for _ in T.serial(100):
            T.copy(tile, S[1 - W.rank(), 0])  # HERE
            T.copy(S[W.rank(), 0], tile)
        T.copy(tile, Y)


refused(
    "T.copy writes S[1 - W.rank(), 0] in 100 versions in one launch, whose copies need 3200 bytes; "
    "expected at most 3199 (tileweave.version_bytes), fewer versions, or a smaller tensor",
    version_bytes=3199,
)(hundred_versions)


@refused(
    "T.copy writes S[1 - W.rank(), 0] again in the same launch, and the version of S[W.rank(), "
    "0], which is not synchronized, is unknown; expected W.alloc_symmetric, another tensor"
)
def versions_and_unordered(X: Row, S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        for _ in T.serial(2):
            T.copy(X, S[1 - W.rank(), 0])  # HERE
            T.copy(S[W.rank(), 0:N], Y)
        W.unordered(S[W.rank(), 0], reason="the last iteration will do")
        T.copy(S[W.rank(), 0], Y)


@refused(
    "T.copy writes S[1 - W.rank(), r % 3, 0], and one part of it is the last version, for the "
    "caller, and another part is written again; expected W.alloc_symmetric, another tensor for it"
)
def last_in_no_order(X: Row, S: W.Symmetric((3, N), F32), Y: Row):
    with T.Kernel(1, threads=32):
        for r in T.serial(6):
            if r != 4:
                T.copy(X, S[1 - W.rank(), r % 3, 0])  # HERE
                T.copy(S[W.rank(), r % 3, 0], Y)


@refused("T.call_extern writes S[1 - W.rank(), 0], and reads the previous version there")
def two_versions_of_one_region(X: Row, S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        T.copy(X, S[1 - W.rank(), 0])
        for _ in T.serial(2):
            T.call_extern("handle", "f", T.access_ptr(S[1 - W.rank(), 0], "rw", N))  # HERE
        T.copy(S[W.rank(), 0], Y)


@refused(
    "T.copy writes S[1 - W.rank(), 0], which repeats while the condition i < n[0] of its "
    "loop holds; expected a loop over a range"
)
def while_loop(n: T.Tensor((1,), "int32"), S: Shared, Y: Row):
    with T.Kernel(1, threads=32):
        i = T.alloc_var("int32")
        i = 0
        while i < n[0]:
            T.copy(Y, S[1 - W.rank(), 0])  # HERE
            i = i + 1
        T.copy(S[W.rank(), 0], Y)
