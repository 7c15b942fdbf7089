"""Ranks prepare what all ranks of a group need, in an order in which none waits forever."""

from tests.ops import prepared_on_ranks


def test_ranks_that_need_different_products(three):
    """Rank 2 needs a product of all ranks in its first call that the others need later; in the
    last call no rank needs anything."""
    assert three.run(prepared_on_ranks.prepared) == [
        [(2, [8, 16]), (1, [32]), (0, [])],
        [(4, [8, 16, 24, 40]), (1, [32]), (0, [])],
        [(3, [8, 24, 40]), (1, [32]), (0, [])],
    ]


def test_a_failing_rank_lets_the_others_go_on(three):
    refused = (
        "prepare: its function fails on rank 1: ValueError: no such layer; "
        "expected a function that returns on all ranks"
    )
    raised = three.run(prepared_on_ranks.prepared_where_one_fails)
    assert raised == [[refused], ["no such layer"], [refused]]
