"""Kernels that programs for several sizes share, in the simulator at the device level."""

import pytest

import tileweave as tw
from tests.shared_kernels import SharedFunctions

from .size_mutants import mutants_of
from .sized_calls import OPERATORS_OF_SIZES as CALLS
from .sized_calls import gemms

LONG = pytest.mark.long
pytestmark = pytest.mark.filterwarnings("ignore:.*never waited for or read")


def check_sizes(name, count, arch="sm_90a"):
    """Compute calls of several sizes in random order, as a session does, by few kernels."""
    operator = CALLS[name]
    shared = SharedFunctions(operator.ranks, arch)
    for seed, size in enumerate(operator.sizes(count)):
        call = operator.at(size, seed)
        shared.prepare(call.steps, call.similar)
        outputs = tw.simulate(shared.executable(call.steps), operator.ranks, call.inputs, epochs=2)
        try:
            call.check(outputs)
        except AssertionError as error:
            raise AssertionError(f"{name} of size {size}: {error}") from None
    print(f"{name}: {len(shared.kernels)} kernels for {count} sizes")
    assert len(shared.kernels) <= operator.most


def check_kernels(name, count):
    """Count the kernels for sizes of all magnitudes, in random order."""
    operator = CALLS[name]
    shared = SharedFunctions(operator.ranks)
    for size in operator.sizes(count, largest=operator.largest):
        shared.prepare(*operator.programs(size))
    print(f"{name}: {len(shared.kernels)} kernels for {count} sizes")
    assert len(shared.kernels) <= operator.most


QUICK = (
    "reduce_scatter copy_engine", "all_to_all ldst", "ring_shift ll",
    "all_reduce_rms_norm one_shot", "dispatch 2", "matmul_reduce_scatter stores",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_few_kernels_compute_each_size(name):
    check_sizes(name, 3)


@pytest.mark.parametrize(
    "name", [*QUICK, "all_gather copy_engine", "combine 2", "decode_attention 1"]
)
def test_few_kernels_are_compiled(name):
    check_kernels(name, 16)


@LONG
@pytest.mark.parametrize("name", CALLS)
def test_few_kernels_are_compiled_for_all_sizes(name):
    check_kernels(name, 24 if name.startswith("sp_attention") else 200)  # its inference is slow


@LONG
@pytest.mark.parametrize("name", CALLS)
def test_random_sizes(name):
    check_sizes(name, 3)


@LONG
@pytest.mark.parametrize("name", [name for name, _ in gemms()])
def test_random_sizes_on_sm_80(name):
    check_sizes(name, 2, "sm_80")


def mutants(name, size, other):
    """Return the mutants of the kernels that fit two sizes of an operator."""
    operator = CALLS[name]
    shared = SharedFunctions(operator.ranks)
    calls = [operator.at(size, seed) for seed in range(INPUTS)]
    shared.add(calls[0].steps, operator.at(other).steps)
    return mutants_of(shared, calls, operator.at(other))


MUTATED = {
    "all_gather ldst": (50, 70), "reduce_scatter copy_engine": (100, 140),
    "all_to_all ll": (7, 9), "all_reduce_rms_norm one_shot": (4, 7),
    "all_reduce_rms_norm two_shot": (4, 7), "dispatch 2": (13, 17), "combine 2": (8, 11),
    "decode_attention 1": ((2, 5), (3, 9)), "decode_attention 2": ((1, 5), (1, 9)),
    "all_gather_matmul copy_engines": (40, 70), "all_gather_matmul stores": (40, 23),
    "all_gather_matmul communicating_blocks": (40, 23),
    "matmul_reduce_scatter copy_engines": (80, 140), "matmul_reduce_scatter stores": (46, 80),
    "matmul_reduce_scatter one_shot": (46, 80), "matmul_all_reduce copy_engines": (90, 41),
    "matmul_all_reduce two_shot": (41, 90), "matmul_all_reduce one_shot": (41, 90),
}  # fmt: skip
"""Operator -> a size, whose arguments are changed, and another."""
INPUTS = 2
_PADDING = "zeros replace copies of the last token in padding, which no rank reads"
_NO_ROWS = "the rows of an additional block lie outside of the tensors, so it copies nothing"
_DIVISOR = "a signal and the target of its wait are divided by it, and remain the same multiple"
_GRANULE = "no tile begins at the element that is then in another granule"
EQUIVALENT = {
    "all_gather ldst": {
        "all_gather size_2=8 -1": "with two ranks, each uses half of the counters of a buffer, so "
        "those of the two buffers do not overlap yet"
    },
    "all_to_all ll": dict.fromkeys(
        ("all_to_all_ll size_0=2 +1", "all_to_all_ll size_0=2 other"), _NO_ROWS
    ),
    "dispatch 2": dict.fromkeys(("dispatch size_2=12 +1", "dispatch size_2=12 other"), _PADDING),
    "combine 2": {
        **dict.fromkeys(("combine size_2=7 +1", "combine size_2=7 other"), _PADDING),
        "combine size_4=128 -1": _GRANULE,
        "combine size_5=512 -1": "it cuts the last token off, and the first one of a block counts",
    },
    "all_gather_matmul communicating_blocks": {"ag_gemm_comm_blocks size_0=13 +1": _NO_ROWS},
    "matmul_reduce_scatter copy_engines": {"gemm_rs_persistent size_4=64 other": _DIVISOR},
    "matmul_reduce_scatter stores": dict.fromkeys(
        ("gemm_rs_store size_4=16 -1", "gemm_rs_store size_4=16 +1"), _DIVISOR
    ),
    "matmul_reduce_scatter one_shot": {"gemm_rs_one_shot size_3=46 -1": _GRANULE},
    "matmul_all_reduce one_shot": dict.fromkeys(
        (f"gemm_ar_one_shot size_3=16 {change}" for change in ("-1", "+1", "other")), _DIVISOR
    ),
}
"""Mutants that make other accesses, with the same result."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "all_gather ldst" else LONG) for n in MUTATED]
)
def test_every_wrong_size_is_killed_or_equivalent(name):
    found = mutants(name, *MUTATED[name])
    for m in found:
        print(f"{name}: {m.name}: {m.verdict}: {m.why}")
    assert {m.name for m in found if not m.is_accounted_for} == set(EQUIVALENT.get(name, ()))
