"""Random exchanges: correct ones are clean and right, and a changed operation is reported exactly
if the memory model calls it a fault.

The exchanges are always the same, unless ``TILEWEAVE_EXAMPLES`` is a number of new ones.
"""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import tileweave as tw
from tests.corpus.exchange import (
    Exchange,
    Message,
    changes,
    exchange_program,
    expected_out,
    inputs,
    operations,
)
from tests.releases import needs_python_loops

pytestmark = [pytest.mark.long, needs_python_loops]

SCHEDULES = int(os.environ.get("TILEWEAVE_SCHEDULES", "20"))
EPOCHS = 3
fuzz = settings(
    max_examples=int(os.environ.get("TILEWEAVE_EXAMPLES", "40")),
    derandomize="TILEWEAVE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def exchanges(draw) -> Exchange:
    ranks, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    places = st.tuples(st.integers(0, ranks - 1), st.integers(0, blocks - 1))
    deliveries = draw(st.lists(places, min_size=1, max_size=4))
    messages = []
    for delivery in range(len(deliveries)):
        for _ in range(draw(st.integers(1, 3))):
            via = draw(st.none() | places)
            transport = draw(st.sampled_from(["store", "put", "tile"]))
            messages.append(Message(draw(places), via, transport, delivery))
    steps = [("send", m) for m in range(len(messages))]
    steps += [("relay", m) for m, message in enumerate(messages) if message.via]
    steps += [("receive", d) for d in range(len(deliveries))]
    order: list[tuple[str, int]] = []
    waiting = draw(st.permutations(steps))
    while waiting:
        ready = [s for s in waiting if not any(_before(messages, other, s) for other in waiting)]
        order.append(ready[0])
        waiting.remove(ready[0])
    return Exchange(ranks, blocks, tuple(messages), tuple(deliveries), tuple(order))


def _before(messages: list[Message], one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Return whether step ``one`` must come before ``other``."""
    if one[0] == "receive" or other[0] == "send":
        return False
    if other[0] == "relay":
        return one == ("send", other[1])
    return messages[one[1]].delivery == other[1]


def simulate(x: Exchange, ops, barrier=True, schedules=SCHEDULES) -> list[dict[str, np.ndarray]]:
    return tw.simulate(
        exchange_program(x, ops, barrier),
        world_size=x.ranks,
        inputs=inputs(x),
        schedules=schedules,
        seed=0,
        epochs=EPOCHS,
    )


def check(x: Exchange, outputs: list[dict[str, np.ndarray]]) -> None:
    for rank in range(x.ranks):
        np.testing.assert_array_equal(
            outputs[rank]["out"], expected_out(x, EPOCHS - 1, rank), f"out of rank {rank}"
        )


@fuzz
@given(exchanges())
def test_correct_exchange_is_clean(x):
    check(x, simulate(x, operations(x)))


@fuzz
@given(exchanges(), st.data())
def test_one_change_is_reported_if_it_is_a_fault(x, data):
    change = data.draw(st.sampled_from(list(changes(x))))
    note(f"{change.what}; expected {change.kinds or 'no fault'}")
    if not change.kinds:
        check(x, simulate(x, change.ops, change.barrier))
        return
    with pytest.raises(tw.SimulationError) as error:
        simulate(x, change.ops, change.barrier, schedules=10 * SCHEDULES)
    assert error.value.kind in change.kinds, error.value.report
