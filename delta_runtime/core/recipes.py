"""What each saved value of a step graph is rebuilt from: the ops of its recipe and its saved ancestors.

Covers recipes by the record of one step. Does not cover which of them are used (planners), nor how
the runtime runs one (csrc/rebuild).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from delta_runtime.core.interrupts import give_way, unhurried
from delta_runtime.core.step_graph import Ints, Mask, StepGraph


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of numbers, one behind the other.

    Args:
        offsets: where each of them begins in `items`, and where the last one ends.
        items: of all of them.
    """

    offsets: Ints
    items: Ints

    @classmethod
    def of(cls, lists: Sequence[Sequence[int] | Ints]) -> Lists:
        """Put lists one behind the other."""
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        items = (item for each in unhurried(lists) for item in each)
        return cls(offsets, np.fromiter(items, np.int64, int(offsets[-1])))

    def counts(self) -> Ints:
        """Return how many numbers each of them has."""
        return np.diff(self.offsets)

    def as_lists(self) -> list[list[int]]:
        """Return each of them."""
        items = self.items.tolist()
        bounds = itertools.pairwise(self.offsets.tolist())
        return [items[low:high] for low, high in unhurried(bounds)]


@dataclass(frozen=True, eq=False)
class Recipes:
    """For each saved value: the unsaved ops of its recipe, and the saved values that it starts from.

    Possible is what is made again bit for bit: each value on the way repeats, they are not too many, and a
    saved value that does not repeat is there for as long as the recipe may be asked for. (The runtime would
    keep its memory until then, which no plan counts.)
    """

    ops: list[Ints]
    parents: list[Ints]
    children: list[list[int]]
    possible: Mask

    @cached_property
    def op_lists(self) -> Lists:
        """Return `ops`, one behind the other."""
        return Lists.of(self.ops)

    @cached_property
    def parent_lists(self) -> Lists:
        """Return `parents`, one behind the other."""
        return Lists.of(self.parents)

    @cached_property
    def child_lists(self) -> Lists:
        """Return `children`, one behind the other."""
        return Lists.of(self.children)


def recipes_of(graph: StepGraph) -> Recipes:
    row_of = np.full(graph.n_values, -1, dtype=np.int64)
    row_of[graph.saved] = np.arange(len(graph.saved))
    ops: list[Ints] = []
    parents: list[Ints] = []
    children: list[list[int]] = [[] for _ in graph.saved]
    repeats: list[bool] = graph.value_repeats.tolist()
    possible = graph.value_repeats[graph.saved]
    for row, value in enumerate(graph.saved):
        give_way()
        chain: set[int] = set()
        roots: set[int] = set()
        stack = [int(graph.value_op[value])]
        while stack:
            op = stack.pop()
            if op in chain:
                continue
            chain.add(op)
            for source in graph.inputs_of(op):
                parent = int(row_of[source])
                if parent >= 0:
                    roots.add(parent)
                else:
                    stack.append(int(graph.value_op[source]))
                    possible[row] &= repeats[source]
            if len(chain) > 4096:
                possible[row] = False
                break
        roots.discard(row)
        ops.append(np.array(sorted(chain), dtype=np.int64))
        parents.append(np.array(sorted(roots), dtype=np.int64))
        for parent in roots:
            children[parent].append(row)
    possible &= _lasts(graph, parents, possible) >= graph.released_at
    return Recipes(ops, parents, children, possible)


def _lasts(graph: StepGraph, parents: list[Ints], repeats: Mask) -> Ints:
    """For each saved value the first tick at which one of its ancestors goes that cannot be made again."""
    lasts = np.full(len(graph.saved), np.iinfo(np.int64).max)
    for row in np.argsort(graph.value_op[graph.saved], kind="stable").tolist():
        for parent in parents[row].tolist():
            until = lasts[parent] if repeats[parent] else graph.released_at[parent]
            lasts[row] = min(lasts[row], until)
    return lasts


def rebuild_seconds(graph: StepGraph, recipes: Recipes) -> list[float]:
    """Return the seconds that making each saved value again takes, from what it is rebuilt from."""
    seconds = graph.rerun_seconds
    return [float(seconds[ops].sum()) for ops in unhurried(recipes.ops)]
