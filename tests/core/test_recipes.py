"""What a saved value can be rebuilt from, and what it cannot."""

from __future__ import annotations

import pytest

from delta_runtime.core.recipes import recipes_of
from tests.support.step_graphs import Op, step_graph


@pytest.mark.parametrize(("repeats", "asked"), [(True, True), (True, False), (False, True)])
def test_a_recipe_may_start_from_what_is_held_or_can_be_made_again(repeats, asked):
    assert _last_is_possible(repeats, asked)


def test_no_recipe_starts_from_what_goes_before_and_cannot_be_made_again():
    """The op that made it repeats, but what that op has read does not."""
    assert not _last_is_possible(repeats=False, asked=False)


def _last_is_possible(repeats: bool, asked: bool) -> bool:
    """Of value 2, made from value 1, which is saved and made from value 0, which is not.

    Args:
        repeats: whether value 0 comes out the same again.
        asked: whether backward asks for value 1; else it goes when forward ends.
    """
    graph = step_graph(
        [
            Op((), (8,), (), repeats=repeats),
            Op((0,), (8,), (1,), asked=asked),
            Op((1,), (8,), ()),
            Op((2,), (8,), (2,)),
            Op((1,), (8,), (1,), asked=asked),
        ]
    )
    return bool(recipes_of(graph).possible[graph.saved.tolist().index(2)])
