"""What to drop and what to swap in a step whose graph is known.

At each op of the recorded step, `ordinary + watermark - budget` bytes have to be away. Stages:

1. `greedy_drops`: a lazy greedy choice, least seconds per byte and op covered;
2. `evaluate` and `repair`: the choice is played, what still does not fit is mended move by move, and what turned
   out not to be needed is taken back;
3. here: single values are ruled out, and stages 1 and 2 run again without them. The greedy choice
   likes to drop every value of a chain, because each looks cheap by itself; keeping one in the
   middle makes all that follow it cheaper to rebuild;
4. where there are lanes, `swap_search`: what costs the most to rebuild is swapped instead, as long as
   the lanes have time for it. Without drops, what was saved first is swapped first; where the lanes
   carry all that in time, that is the plan with drops too. Where no such plan fits, though swaps alone would for a
   step that waits for them, what could not be made again within the budget is swapped, whatever else leaves;
5. where nothing is swapped, `presence_search`: values leave late, come back early, or several times. Its plan is
   carried out as written; it is taken where it fits and the other does not, or takes noticeably less.

It is a heuristic; `step_program` is exact, on contracted steps.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import Mask, StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.bounds import is_met_by_swaps, not_made_again
from delta_runtime.planners.evaluate import WORK_PER_SECOND, Evaluator
from delta_runtime.planners.evictions_as_plan import plan_of
from delta_runtime.planners.greedy_drops import GreedyCover, choose
from delta_runtime.planners.presence_search import search
from delta_runtime.planners.repair import Evictions, repair
from delta_runtime.planners.swap_search import has_room, only_swaps, swap_instead, swap_more
from delta_runtime.planners.transfer_schedule import LaneTimes

_TO_MEND = 1_000_000  # units of work, for each attempt and direction; see WORK_PER_SECOND
_TO_EXCHANGE = 1_500_000
_TO_POLISH = 6_000_000
_PLAYS_TO_EXCHANGE = 0.6  # so many for each saved value, where that is more
_TO_FIT = 500_000  # at least, to look for a choice that fits where the first one does not
MOST_EFFORT = 24_000_000
"""Units of work for which a better choice is looked for, at the most."""
MOST_TO_SEARCH = 72_000_000
"""Units of work for which is then looked when values are there, at the most, unless told otherwise."""
_TO_SEARCH = 2_000_000  # at least, to look for when values are there, unless told otherwise
_USUAL_WORK_PER_SECOND = 45_000_000  # with the extension
_NOTICED = (
    0.99  # of the seconds of a plan that is carried out lazily: below that one as written is better
)
_MOST_IN_VAIN = 40  # attempts in a row that found nothing better
_SLACK = 1.1  # a choice that takes so much longer than the best before `repair` ends is given up


def search_seconds(effort: float, first_seconds: float, most_search: int = MOST_TO_SEARCH) -> float:
    """Return about how many seconds `plan` looks for a better choice than the first, on a core of a usual machine.

    Args:
        effort, most_search: see `plan`.
        first_seconds: that the first choice rebuilds in a step.
    """
    work = effort * first_seconds * WORK_PER_SECOND
    return (min(work, MOST_EFFORT) + min(work, most_search)) / _USUAL_WORK_PER_SECOND


def plan(
    graph: StepGraph,
    budget_bytes: int,
    *,
    effort: float = 0.0,
    drops: bool = True,
    links: Links | None = None,
    most_work: float = float("inf"),
    least_search: int = _TO_SEARCH,
    most_search: int = MOST_TO_SEARCH,
    one_gap: bool = False,
) -> Plan:
    """Choose what to drop and what to swap in the next step that is like `graph`.

    Args:
        graph: the recorded step; its seconds should come from more than one run of it.
        budget_bytes: what may be live at any moment.
        effort: how long to look for a better choice than the first, as a multiple of the seconds
            that the first one rebuilds in a step; then as long for when values are there. Counted in
            work, not by a clock: equal arguments give equal plans. Without the extension less far than with it.
        drops: whether anything may be dropped.
        links: speed of the lanes, where anything may be swapped. As long as it is not known,
            nothing is.
        most_work: of each attempt, and of looking further, in units of WORK_PER_SECOND.
        least_search: how long to look for when values are there, however little the first choice rebuilds; in the
            same units.
        most_search: how long at the most, in the same units.
        one_gap: whether each value leaves once at the most, as soon as it may.

    Returns:
        The plan; its peak is above the budget where none was found that fits.
    """
    recipes = recipes_of(graph)
    cover = GreedyCover(graph, budget_bytes, recipes)
    known = links is not None and links.out_bytes_per_s > 0 and links.in_bytes_per_s > 0
    lanes = LaneTimes(cover, links) if links is not None and known else None
    evaluator = Evaluator(cover, lanes)
    if not drops:
        return _plan_swaps(cover, evaluator)
    none = np.zeros(len(graph.saved), dtype=bool)

    def attempt(staying: Set[int], most_seconds: float = float("inf")) -> Evictions | None:
        cover = GreedyCover(graph, budget_bytes, recipes, staying)
        choose(cover)
        evaluator.work += cover.work
        most = int(min(_TO_MEND, most_work))
        return repair(evaluator, cover, none, most_work=most, most_seconds=most_seconds)

    first = attempt(frozenset())
    assert first is not None  # nothing was asked of its seconds
    choice = first
    work = int(effort * first.evaluation.seconds * WORK_PER_SECOND)
    if first.evaluation.area > 0:
        work = max(work, _TO_FIT)
    last = evaluator.work + int(min(work, MOST_EFFORT, most_work))
    staying: set[int] = set()
    tried: set[int] = set()
    in_vain = 0
    while evaluator.work < last and in_vain < _MOST_IN_VAIN:
        fits = choice.evaluation.area <= 0
        row = _to_keep(cover, choice.dropped, tried, only_parents=fits)
        if row is None:
            break
        tried.add(row)
        in_vain += 1
        most_seconds = choice.evaluation.seconds * _SLACK if fits else float("inf")
        other = attempt(staying | {row}, most_seconds)
        if other is not None and other.better_than(choice):
            choice = other
            staying.add(row)
            tried = set(staying)
            in_vain = 0
    swaps: Evictions | None = None
    if lanes is not None:
        choice = _exchange(evaluator, choice, thorough=effort > 0, most_work=most_work)
        # Move by move, from a choice that drops, is not the only way to one that swaps it all.
        swaps = only_swaps(evaluator, Evictions(none, none, none, evaluator.evaluate(none, none)))
        if swaps.better_than(choice):
            choice = swaps
    higher = choice.evaluation.excess.max(initial=0) > first.evaluation.excess.max(initial=0)
    if choice.evaluation.area > 0 and (higher or not choice.swapped.any()):
        # Nothing fits, by this account. It errs towards too much (watermarks are the highest seen),
        # and what drops the most is not what leaves the victim queue the most to choose from.
        choice = first
    by_next_use = choice is swaps
    if lanes is not None and choice.evaluation.area > 0 and is_met_by_swaps(cover):
        choice = _without_lost(evaluator, cover, choice)
    found = plan_of(cover, evaluator, choice, by_next_use=by_next_use)
    if effort > 0 and not one_gap and choice.dropped.any() and not choice.swapped.any():
        most = int(min(max(work, least_search), most_search, most_work))
        return _searched(cover, found, most_work=most)
    return found


def _searched(cover: GreedyCover, plan: Plan, *, most_work: int) -> Plan:
    """Return a plan as written that is better than this one, if one is found; else this one."""
    graph, budget_bytes = cover.graph, cover.budget_bytes
    found = search(graph, budget_bytes, plan, most_work=most_work, recipes=cover.recipes)
    if found is None or found.predicted_peak_bytes > budget_bytes:
        return plan
    fits = plan.predicted_peak_bytes <= budget_bytes
    less = found.predicted_seconds < _NOTICED * plan.predicted_seconds
    return found if less or not fits else plan


def _exchange(
    evaluator: Evaluator, choice: Evictions, *, thorough: bool, most_work: float
) -> Evictions:
    """Return a choice that is as good or better, with swaps; `most_work` is that of each pass."""
    plays = _PLAYS_TO_EXCHANGE * len(evaluator.bytes)
    most = max(_TO_EXCHANGE, int(plays * evaluator.work_of_a_play))
    passes = [(swap_instead, most), (swap_more, most), (swap_instead, most)]
    if thorough:
        passes += [(swap_more, max(_TO_POLISH, most)), (swap_instead, max(_TO_POLISH, most))]
    for improve, work in passes:
        allowed = min(work if thorough else work // 8, most_work)
        choice = improve(evaluator, choice, most_work=int(allowed))
    return choice


def _without_lost(evaluator: Evaluator, cover: GreedyCover, choice: Evictions) -> Evictions:
    """Return a choice that swaps what could not be made again within the budget, had it been dropped.

    For a plan that does not fit: the runtime evicts more than it says then, and may drop what a value is made from.
    """
    lost = not_made_again(cover) & ~choice.swapped
    if not lost.any() or not has_room(evaluator, choice.swapped | lost):
        return choice
    masks = choice.dropped & ~lost, choice.dropped_twice & ~lost, choice.swapped | lost
    return Evictions(*masks, evaluator.evaluate(*masks))


def _plan_swaps(cover: GreedyCover, evaluator: Evaluator) -> Plan:
    """Return the plan that only swaps; nothing is planned before the lanes are known."""
    none = np.zeros(len(cover.bytes), dtype=bool)
    choice = Evictions(none, none, none, evaluator.evaluate(none, none))
    if evaluator.lanes is not None:
        choice = only_swaps(evaluator, choice)
    return plan_of(cover, evaluator, choice, by_next_use=True)


def _to_keep(
    cover: GreedyCover, dropped: Mask, tried: Set[int], *, only_parents: bool
) -> int | None:
    """Return the largest dropped value that was not tried yet, those first that dropped ones are rebuilt from."""
    parents = cover.recipes.parent_lists
    of_dropped = np.repeat(dropped, parents.counts())
    is_parent = np.zeros(len(dropped), bool)
    is_parent[parents.items[of_dropped]] = True
    rows = np.flatnonzero(dropped & is_parent if only_parents else dropped)
    rows = rows[~np.isin(rows, np.fromiter(tried, np.int64, len(tried)))]
    if not len(rows):
        return None
    return int(rows[np.lexsort((rows, -cover.bytes[rows], ~is_parent[rows]))[0]])
