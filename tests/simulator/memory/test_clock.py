"""Clocks against plain arrays, one time per agent."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tileweave.simulator.memory.clock import Clock, View

AGENTS = 1300
"""More than two pages."""

some_agent = st.integers(0, AGENTS - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(
            st.just("advance"),
            st.integers(0, 3),
            st.dictionaries(some_agent, st.integers(0, 9), max_size=3),
        ),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(steps, st.lists(st.tuples(some_agent, st.integers(0, 9)), min_size=1))
def test_a_clock_is_an_array_of_times(steps, asked):
    clocks = [Clock.start(AGENTS)] * 4
    plain = [np.zeros(AGENTS, np.int32) for _ in clocks]
    for what, i, other in steps:
        if what == "advance":
            clocks[i] = clocks[i].with_times(other)
            for agent, time in other.items():
                plain[i][agent] = max(time, plain[i][agent])
        else:
            two = clocks[i], clocks[other]
            clocks[i] = two[0].joined(two[1]) if what == "join" else Clock.end(two)
            plain[i] = np.maximum(plain[i], plain[other])
    agents, times = (np.array(v) for v in zip(*asked, strict=True))
    for clock, expected in zip(clocks, plain, strict=True):
        assert (clock.covers(agents, times) == (times <= expected[agents])).all()
        assert all(clock.covers(a, t) == (t <= expected[a]) for a, t in asked)
    mine = View([(clocks[0], 0), (clocks[1], 1)], (5,))
    first, second = plain[0].copy(), plain[1].copy()
    first[0] = second[1] = 99
    least = np.minimum(first, second)
    least[5] = 99
    assert (mine.covers(agents, times) == (times <= least[agents])).all()
