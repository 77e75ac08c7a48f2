"""Every schedule there is, tried: the optimum of tiny instances, for tests of planners that claim it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from delta_runtime.planners.rotor import Chain

State = TypeVar("State", bound=Hashable)


def cheapest(
    start: State,
    steps: Callable[[State], Iterable[tuple[float, State]]],
    done: Callable[[State], bool],
) -> float | None:
    """Return what it takes to get from a state to one that is done (Dijkstra); None if there is no way."""
    order = itertools.count()
    waiting = [(0.0, next(order), start)]
    known: dict[State, float] = {start: 0.0}
    while waiting:
        cost, _, state = heapq.heappop(waiting)
        if cost > known[state]:
            continue
        if done(state):
            return cost
        for extra, after in steps(state):
            if cost + extra < known.get(after, float("inf")):
                known[after] = cost + extra
                heapq.heappush(waiting, (cost + extra, next(order), after))
    return None


def fastest_persistent(chain: Chain, memory: float) -> float | None:
    """Return the least seconds of a chain where what was stored stays until its backward.

    A state: the inputs that are stored, the one that was computed and is not stored, what is saved of which stages,
    and the gradient that is there.
    """
    n = chain.length
    Chained = tuple[frozenset[int], int, frozenset[int], int]

    def held(state: Chained) -> float:
        stored, front, saved, gradient = state
        return (
            sum(chain.a[i] for i in stored)
            + (chain.a[front] if front >= 0 else 0)
            + sum(chain.abar[i + 1] for i in saved)
            + (chain.a[gradient] if gradient >= 0 else 0)
        )

    def steps(state: Chained) -> Iterable[tuple[float, Chained]]:
        stored, front, saved, gradient = state
        before = held(state)
        for i in range(n):
            if not (i in stored or i == front or i - 1 in saved) or (0 <= gradient <= i):
                continue
            kept = stored | {i} if i == front else stored
            rest = -1 if i == front else front
            if i not in saved and before + chain.abar[i + 1] + chain.f_tmp[i] <= memory:
                yield chain.f[i], (kept, rest, saved | {i}, gradient)
            if rest < 0 and before + chain.a[i + 1] + chain.f_tmp[i] <= memory:
                yield chain.f[i], (kept, i + 1, saved, gradient)  # x_i stays
                if i == front:
                    yield chain.f[i], (stored, i + 1, saved, gradient)  # x_i goes
        if gradient < 0 and (front == n or n - 1 in saved or n == 0):
            if before + chain.a[n] + chain.b_tmp[n] <= memory:
                yield (
                    chain.b[n],
                    (stored - {n} if n else stored, -1 if front == n else front, saved, n),
                )
        i = gradient - 1
        if i in saved and (i in stored or i == front or i - 1 in saved):
            if before + chain.a[i] + chain.b_tmp[i] <= memory:
                rest = -1 if i == front else front
                yield chain.b[i], (stored - ({i} if i else set()), rest, saved - {i}, i)

    if chain.a[0] > memory:
        return None
    return cheapest((frozenset({0}), -1, frozenset(), -1), steps, lambda state: state[3] == 0)


def cheapest_schedule(
    deps: Sequence[Sequence[int]],
    cpu: Sequence[float],
    ram: Sequence[float],
    budget: float,
    workspace: Sequence[float],
) -> float | None:
    """Return the least cost to run every node, for the first time in order, with anything freed at any time."""
    n = len(deps)
    Ran = tuple[frozenset[int], int]

    def steps(state: Ran) -> Iterable[tuple[float, Ran]]:
        there, ran = state
        held = sum(ram[i] for i in there)
        for i in there:
            yield 0.0, (there - {i}, ran)
        for i in range(min(ran + 1, n)):
            fits = held + ram[i] + workspace[i] <= budget
            if i not in there and there.issuperset(deps[i]) and fits:
                yield cpu[i], (there | {i}, max(ran, i + 1))

    return cheapest((frozenset(), 0), steps, lambda state: state[1] == n)


def least_of_all_subsets(n: int, peak: Callable[[Sequence[int]], float]) -> float:
    """Return the least peak over all subsets of 1 to n - 1."""
    inner = range(1, n)
    return min(peak(kept) for size in range(n) for kept in itertools.combinations(inner, size))
