"""``T.rng_rand`` gives each thread the numbers of cuRAND's Philox generator."""

import numpy as np
import pytest
import tilelang.language as T

from tests.simulator.frontend.launch import fault, run
from tileweave.simulator.frontend.random_ops import philox

LEVELS = pytest.mark.parametrize("level", ["tile", "device"])


def filled(threads, numbers, seed=7, initialized=True, generator="curandStatePhilox4_32_10_t"):
    """Return a program whose threads store consecutive numbers of one sequence."""

    @T.prim_func
    def program(A: T.Tensor((2 * threads * numbers,), "uint32")):
        with T.Kernel(2, threads=threads) as b:
            t, begin = T.get_thread_binding(), b * threads * numbers
            if initialized:
                T.rng_init(seed, 0, begin + t * numbers, generator)
            for i, j in T.Parallel(threads, numbers):
                if begin + i * numbers + j < 2 * threads * numbers - 1:
                    A[begin + i * numbers + j] = T.rng_rand()

    return program


@LEVELS
@pytest.mark.parametrize(("threads", "numbers"), [(32, 1), (1, 96)])
def test_numbers_are_those_of_the_sequence(level, threads, numbers):
    A = run(filled(threads, numbers), level=level, A=np.zeros(2 * threads * numbers, np.uint32))[
        "A"
    ]
    count = np.arange(len(A) - 1, dtype=np.uint64)
    assert (A == [*philox(np.uint64(7), np.uint64(0), count), 0]).all()


def test_the_generator_gives_the_known_answer():
    numbers = philox(*np.zeros((2, 1), np.uint64), np.arange(4, dtype=np.uint64))
    assert numbers.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@T.prim_func
def vectors(A: T.Tensor((128,), "uint32")):
    with T.Kernel(1, threads=32):
        T.rng_init(7)
        for i in T.Parallel(128):
            A[i] = T.rng_rand()


def test_vectors_hold_the_numbers_of_one_thread():
    A = run(vectors, level="device")["A"].reshape(32, 4)
    thread, count = np.indices(A.shape, np.uint64)
    assert (A == philox(np.full_like(count, 7), thread, count)).all()
    assert "threads depend on its layout" in fault(vectors).report


def test_other_uses_are_refused():
    assert fault(filled(32, 1, initialized=False)).kind == "poison"
    other = fault(filled(32, 1, generator="curandStateXORWOW_t"))
    assert "T.rng_init of curandStateXORWOW_t is not simulated" in other.report
