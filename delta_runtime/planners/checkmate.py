"""Checkmate: which ops of any graph to run again, and when, so that least is run again within a budget.

From Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (MLSys 2020, arXiv
1910.02653): a mixed-integer program, and the rounding of its linear relaxation. HiGHS solves both; see
`linear_program`.

Nodes are forward ops, the loss and backward ops, in the order in which they run for the first time; stage t is the time
until node t has. Covers nodes with one output each and, beyond the paper, bytes that an op needs while it runs. Does
not cover copies to other memory, nor another order.

Note: the program
  R[t, i]: node i runs in stage t. S[t, i]: its output is there when stage t begins. F[t, i, k]: the output of i is
  freed right after node k, its user or itself, ran in stage t. U[t, k]: what is held just after node k ran in stage t.
  1. R[t, t] = 1, and nothing of a later node runs or is there.
  2. What is read is there: R[t, v] <= R[t, u] + S[t, u] for each u that v reads.
  3. What is there is kept for the next stage or freed once:
     S[t+1, i] + sum over k of F[t, i, k] <= S[t, i] + R[t, i].
  4. Only after k ran: F[t, i, k] <= R[t, k]. Not before a user j of i that runs: sum over k < j of F[t, i, k]
     <= 1 - R[t, j].
  5. U[t, 0] = m_0 R[t, 0] + sum of m_i S[t, i];  U[t, k+1] = U[t, k] + m_(k+1) R[t, k+1] - sum of m_i F[t, i, k].
  6. U[t, k] + w_k R[t, k] <= budget.
  Rules 3 and 4 add up rows of the paper's, which makes the relaxation tighter and the integer solutions no fewer: that
  a value that may go does go is left to rule 6.
  Sizes are in units of the budget. The solver may pass it by its tolerance: whether a schedule fits is what its replay
  says, and where it does not the program is solved once more with as much less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from delta_runtime.core.errors import DeltaError
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import Floats, Mask, StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.contraction import MOST_OPS, by_size
from delta_runtime.planners.linear_program import TOLERANCE, LinearProgram, SolverFailed
from delta_runtime.planners.plan_result import PlanResult, fit, judged, result_of
from delta_runtime.planners.solution import Solution
from delta_runtime.planners.step_program import StepProgram

THRESHOLDS = tuple(round(0.1 * each, 1) for each in range(1, 10))
LP_SHARES = (0.9, 1.0, 0.8, 0.7)
"""Of the budget that the relaxation is given, in order; the paper's is the first."""


class PlannerTimeout(DeltaError):
    """The time limit came before a schedule or a proof that there is none. Nothing was changed."""


class Kind(IntEnum):
    """What a schedule does with a node."""

    RUN = 0
    FREE = 1


class Action(NamedTuple):
    """One line of a schedule."""

    kind: Kind
    node: int


@dataclass(frozen=True, slots=True)
class Dag:
    """Nodes in an order in which they can run.

    Args:
        deps: for each node the nodes whose output it reads, all before it.
        cpu: cost of each node.
        ram: size of each node's output.
        workspace: what each node needs beside that while it runs.
    """

    deps: Sequence[Sequence[int]]
    cpu: Sequence[float]
    ram: Sequence[float]
    workspace: Sequence[float]

    def __post_init__(self) -> None:
        n = len(self.deps)
        for name in ("cpu", "ram", "workspace"):
            column = getattr(self, name)
            if len(column) != n:
                raise ValueError(f"{name} has {len(column)} entries for {n} nodes")
            if not all(0 <= each < float("inf") for each in column):
                raise ValueError(f"{name} holds something that is negative or no finite number")
        for node, inputs in enumerate(self.deps):
            if not all(0 <= each < node for each in inputs):
                raise ValueError(f"node {node} reads {list(inputs)}: a node reads nodes before it")

    @classmethod
    def of(
        cls,
        deps: Sequence[Iterable[int]],
        cpu: Sequence[float],
        ram: Sequence[float],
        workspace: Sequence[float] | None = None,
    ) -> Dag:
        """Return the graph with each input named once, and no workspace where none is given."""
        return cls(
            [sorted(set(each)) for each in deps],
            cpu,
            ram,
            [0.0] * len(deps) if workspace is None else workspace,
        )

    @property
    def n(self) -> int:
        """Number of nodes."""
        return len(self.deps)

    def users(self) -> list[list[int]]:
        """Return for each node the nodes that read it, in order."""
        readers: list[list[int]] = [[] for _ in range(self.n)]
        for node, inputs in enumerate(self.deps):
            for each in inputs:
                readers[each].append(node)
        return readers


def solve(
    deps: Sequence[Iterable[int]],
    cpu: Sequence[float],
    ram: Sequence[float],
    budget: float,
    workspace: Sequence[float] | None = None,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
) -> Solution[list[Action]] | None:
    """Return the schedule of least cost that holds no more than `budget`; None if there is none.

    A schedule whose peak is within the share `linear_program.TOLERANCE` of the budget may be missed, where a cheaper
    one passes the budget by less than that.

    Args:
        deps, cpu, ram, workspace: see `Dag`.
        budget: in the unit of `ram`. What lives all the time, such as parameters, is to be taken off before.
        time_limit_s: after so long the best schedule so far is returned, with the bound that was reached.
        gap: stop where the cost is within this share of the bound.

    Raises:
        PlannerTimeout: the limit came before any schedule.
        SolverFailed: the solver found neither a schedule that fits nor a proof that there is none, though it had time.
        ImportError: scipy is not installed.
    """
    dag = Dag.of(deps, cpu, ram, workspace)
    if budget < least_memory(dag):
        return None
    end_s = time.monotonic() + time_limit_s
    found = _Program(dag, budget).optimum(time_limit_s, gap)
    bound, schedules = found.bound, greedy_schedules(dag, budget)
    passed = found.schedule is not None and replay(dag, found.schedule)[1] > budget
    if passed:  # by the solver's tolerance
        left_s = max(end_s - time.monotonic(), 0.0)
        found = _Program(dag, budget * (1 - TOLERANCE)).optimum(left_s, gap)
    if found.schedule is not None:
        schedules.append(found.schedule)
    best = cheapest(dag, budget, schedules)
    if best is not None:
        return Solution(best.objective, best.peak, best.schedule, bound=bound)
    if found.impossible:
        return None
    if found.schedule is not None:
        raise SolverFailed(
            "checkmate: the solver's schedules pass the budget by more than its tolerance.",
            asked=f"{dag.n} nodes within {budget:g}",
            tried=f"a budget smaller by the share {TOLERANCE:g}",
        )
    raise PlannerTimeout(
        f"checkmate: no schedule of {dag.n} nodes within {budget:g} was found in {time_limit_s:g} s, "
        "nor a proof that there is none. Give it more time, or a graph with fewer nodes."
    )


def plan(
    graph: StepGraph,
    budget_bytes: int,
    tiers: Links | None = None,
    *,
    most_ops: int = MOST_OPS,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    fallback: bool = True,
) -> PlanResult:
    """Return the fastest plan for a recorded step, contracted to few ops; see `contraction` and `step_program`.

    The bound holds for the contracted step. Where it has no plan that fits, or none but the one that holds the least,
    the plan of `joint_heuristic` for the whole step is the result, if that fits and is faster, and
    `PlanResult.fallback` says so.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        tiers: not used; this planner copies nothing.
        most_ops: that the step is contracted to.
        time_limit_s: for the exact programs, in all turns; after so long the best plan so far is taken, and where there
            is none, relaxations alone are rounded. Building programs, relaxations and the judge come on top: seconds,
            for 45 ops.
        gap: stop where the seconds are within this share of the bound.
        fallback: whether the plan of `joint_heuristic` may be the result.

    Raises:
        SolverFailed: the solver found neither a plan nor a proof that there is none.
        ImportError: scipy is not installed.
    """
    begin = time.perf_counter()
    contraction = by_size(graph, most_ops)
    exact = StepProgram(contraction.graph, budget_bytes)
    bounds: list[float] = []
    smallest_asked = False

    def at(memory: float) -> Plan | None:
        program = exact if memory == budget_bytes else StepProgram(contraction.graph, memory)
        left_s = max(begin + time_limit_s - time.perf_counter(), 0.0)
        found = program.fastest(left_s, gap)
        if memory == budget_bytes and found.bound_s is not None:
            bounds.append(found.bound_s)
        return None if found.plan is None else contraction.expand(found.plan)

    def smallest() -> Plan:
        nonlocal smallest_asked
        smallest_asked = True
        # By bytes alone, and without a solver that the clock stops: each record has the same least budget.
        untimed = by_size(graph, most_ops, timed=False)
        plans = StepProgram(untimed.graph, None).small_plans()
        told = (judged(untimed.expand(each), graph).plan for each in plans)
        return min(told, key=lambda plan: plan.predicted_peak_bytes)

    result = fit(
        graph,
        budget_bytes,
        at,
        smallest,
        until_s=begin + time_limit_s,
        bound_s=lambda: max(bounds, default=None),
    )
    if not fallback or (result.feasible and not smallest_asked):
        return result
    other = judged(joint_heuristic.plan(graph, budget_bytes), graph)
    if other.verdict.peak_bytes <= budget_bytes and other.seconds < result.seconds:
        return result_of(other, budget_bytes, begin, bound_s=result.bound_s, fallback="joint")
    return result


def round_lp(
    deps: Sequence[Iterable[int]],
    cpu: Sequence[float],
    ram: Sequence[float],
    budget: float,
    workspace: Sequence[float] | None = None,
    *,
    fallback: bool = True,
) -> Solution[list[Action]] | None:
    """Return a schedule from rounding the linear relaxation; None if none was found.

    What is there at the start of each stage is rounded at nine thresholds; what has to run for that follows. The
    cheapest that fits is taken. Its bound is that of the relaxation under the whole budget.

    Args:
        deps, cpu, ram, budget, workspace: see `solve`.
        fallback: where no threshold gives a schedule that fits, take one that evicts greedily. With False the result
            says whether rounding alone sufficed.

    Raises:
        SolverFailed: the solver found neither a solution of a relaxation nor a proof that there is none.
        ImportError: scipy is not installed.
    """
    dag = Dag.of(deps, cpu, ram, workspace)
    if budget < least_memory(dag):
        return None
    rounded: list[list[Action]] = []
    bound = None
    for share in LP_SHARES:
        relaxed = _Program(dag, budget * share).relaxation()
        if relaxed is None:
            continue
        if share == 1.0:
            bound = relaxed.cost
        for threshold in THRESHOLDS:
            kept = relaxed.kept >= threshold
            rounded.append(_as_schedule(dag, _closure(dag, kept), kept))
    best = cheapest(dag, budget, rounded)
    if best is None and fallback:
        best = cheapest(dag, budget, greedy_schedules(dag, budget))
    return best and Solution(best.objective, best.peak, best.schedule, bound=bound)


def lower_bound(
    deps: Sequence[Iterable[int]],
    cpu: Sequence[float],
    ram: Sequence[float],
    budget: float,
    workspace: Sequence[float] | None = None,
) -> float | None:
    """Return the cost of the linear relaxation: no schedule costs less. None if not even that is possible.

    Raises:
        SolverFailed: the solver found neither a solution nor a proof that there is none.
        ImportError: scipy is not installed.
    """
    dag = Dag.of(deps, cpu, ram, workspace)
    if budget < least_memory(dag):
        return None
    relaxed = _Program(dag, budget).relaxation()
    return None if relaxed is None else relaxed.cost


def replay(dag: Dag, schedule: Iterable[Action]) -> tuple[float, float]:
    """Carry out a schedule; return its cost and its peak.

    Raises:
        ValueError: something is read or freed that is not there, runs though it is there, or never runs.
    """
    there: set[int] = set()
    ran: set[int] = set()
    cost, held, peak = 0.0, 0.0, 0.0
    for kind, node in schedule:
        if kind is Kind.FREE:
            if node not in there:
                raise ValueError(f"node {node} is freed and is not there")
            there.remove(node)
            held -= dag.ram[node]
            continue
        missing = [each for each in dag.deps[node] if each not in there]
        if missing or node in there:
            raise ValueError(f"node {node} runs without {missing}, or though its output is there")
        there.add(node)
        ran.add(node)
        held += dag.ram[node]
        cost += dag.cpu[node]
        peak = max(peak, held + dag.workspace[node])
    if len(ran) < dag.n:
        raise ValueError(f"{dag.n - len(ran)} nodes never run")
    return cost, peak


def least_memory(dag: Dag) -> float:
    """Return what the largest node takes with what it reads: no schedule holds less."""
    return max(
        (
            dag.ram[node] + dag.workspace[node] + sum(dag.ram[each] for each in dag.deps[node])
            for node in range(dag.n)
        ),
        default=0.0,
    )


def cheapest(
    dag: Dag, budget: float, schedules: Iterable[list[Action]]
) -> Solution[list[Action]] | None:
    """Return the schedule of least cost among those that hold no more than a budget; None if none does."""
    best: Solution[list[Action]] | None = None
    for schedule in schedules:
        cost, peak = replay(dag, schedule)
        if peak <= budget and (best is None or cost < best.objective):
            best = Solution(cost, peak, schedule)
    return best


@dataclass(frozen=True, slots=True)
class _Found:
    """What the program with whole numbers came to; without a schedule and not `impossible`, time ran out."""

    schedule: list[Action] | None
    bound: float | None
    impossible: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxed:
    """What the program with fractions came to: its cost, and S."""

    cost: float
    kept: Floats


class _Program:
    """The program of the Note; sizes are in units of the budget."""

    def __init__(self, dag: Dag, budget: float) -> None:
        self.dag = dag
        self.unit = budget if 0 < budget < np.inf else 1.0
        self.limit = budget / self.unit
        self.ram = [float(each) / self.unit for each in dag.ram]
        self.workspace = [float(each) / self.unit for each in dag.workspace]
        self.users = dag.users()
        self.program = LinearProgram()
        column, n = self.program.column, dag.n
        self.runs = {
            (t, i): column(dag.cpu[i], float(i == t), 1.0, whole=True)  # rule 1
            for t in range(n)
            for i in range(t + 1)
        }
        self.kept = {(t, i): column(0.0, 0.0, 1.0, whole=True) for t in range(n) for i in range(t)}
        for t in range(n):
            self._stage(t)

    def _stage(self, t: int) -> None:
        users = [[user for user in self.users[i] if user <= t] for i in range(t + 1)]
        freed = {
            (i, k): self.program.column(0.0, 0.0, 1.0) for i in range(t + 1) for k in (i, *users[i])
        }
        for i in range(t + 1):
            self._output(t, i, users[i], freed)
        self._memory(t, freed)

    def _at_most(self, terms: Iterable[tuple[int, float]], limit: float) -> None:
        self.program.row(terms, -np.inf, limit)

    def _output(self, t: int, i: int, users: list[int], freed: dict[tuple[int, int], int]) -> None:
        """Rules 2 to 4 for one node's output in a stage; `freed` is F[t], by (i, k)."""
        there = [(self.runs[t, i], -1.0)]
        if i < t:
            there.append((self.kept[t, i], -1.0))
        for v in users:  # rule 2
            self._at_most([(self.runs[t, v], 1.0), *there], 0.0)
        gone = [(freed[i, k], 1.0) for k in (i, *users)]
        then = [(self.kept[t + 1, i], 1.0)] if t + 1 < self.dag.n else []
        self._at_most([*then, *gone, *there], 0.0)  # rule 3
        for k in (i, *users):  # rule 4
            self._at_most([(freed[i, k], 1.0), (self.runs[t, k], -1.0)], 0.0)
        for at, j in enumerate(users, 1):  # rule 4
            self._at_most([*gone[:at], (self.runs[t, j], 1.0)], 1.0)

    def _memory(self, t: int, freed: dict[tuple[int, int], int]) -> None:
        """Rules 5 and 6; `freed` is F[t], by (i, k)."""
        after: list[list[tuple[int, float]]] = [[] for _ in range(t + 1)]  # what goes after k
        for (i, k), column in freed.items():
            after[k].append((column, self.ram[i]))
        before = [(self.kept[t, i], -self.ram[i]) for i in range(t)]
        for k in range(t + 1):
            held = self.program.column(0.0, 0.0, self.limit)
            made = (self.runs[t, k], -self.ram[k])
            self.program.row([(held, 1.0), made, *before], 0.0, 0.0)
            if self.workspace[k] > 0:
                self._at_most([(held, 1.0), (self.runs[t, k], self.workspace[k])], self.limit)
            before = [(held, -1.0), *after[k]]

    def optimum(self, time_limit_s: float, gap: float) -> _Found:
        """Solve with whole numbers."""
        answer = self.program.solve(time_limit_s, gap)
        if answer.x is None:
            return _Found(None, answer.bound, answer.impossible)
        runs, kept = (self._matrix(each, answer.x) > 0.5 for each in (self.runs, self.kept))
        return _Found(_as_schedule(self.dag, runs, kept), answer.bound, impossible=False)

    def relaxation(self) -> _Relaxed | None:
        """Solve with fractions; None where there is no solution."""
        answer = self.program.solve(relaxed=True)
        if answer.x is None:
            return None
        return _Relaxed(answer.cost, self._matrix(self.kept, answer.x))

    def _matrix(self, columns: dict[tuple[int, int], int], x: Floats) -> Floats:
        matrix = np.zeros((self.dag.n, self.dag.n))
        for at, column in columns.items():
            matrix[at] = x[column]
        return matrix


def _closure(dag: Dag, kept: Mask) -> Mask:
    """Return the least R for which what S keeps is there, and what runs finds what it reads."""
    n = dag.n
    runs = np.eye(n, dtype=bool)
    for t in range(n):
        if t + 1 < n:
            runs[t] |= kept[t + 1] & ~kept[t]
        for v in range(t, -1, -1):
            if runs[t, v]:
                for u in dag.deps[v]:
                    runs[t, u] |= not kept[t, u]
    return runs


def _as_schedule(dag: Dag, runs: Mask, kept: Mask) -> list[Action]:
    """Return what R and S say, with each value freed as soon as nobody in its stage or the next asks for it."""
    n = dag.n
    actions: list[Action] = []
    there: set[int] = set()
    none = np.zeros(n, bool)
    for t in range(n):
        later = kept[t + 1] if t + 1 < n else none
        order = [i for i in np.flatnonzero(runs[t]).tolist() if i not in there]
        reads: dict[int, int] = {}  # the last in this stage that reads each
        for i in order:
            for u in dag.deps[i]:
                reads[u] = i
        for u in sorted(there):
            if u not in reads and not later[u]:
                actions.append(Action(Kind.FREE, u))
                there.remove(u)
        for i in order:
            actions.append(Action(Kind.RUN, i))
            there.add(i)
            for u in (*dag.deps[i], i):
                if not later[u] and reads.get(u, i) == i:
                    actions.append(Action(Kind.FREE, u))
                    there.remove(u)
    return actions


def greedy_schedules(dag: Dag, budget: float) -> list[list[Action]]:
    """Return schedules that evict when there is no room, each by another order; those that get through."""
    orders: list[Callable[[float, float, float], float]] = [
        lambda distance, size, cost: -distance,
        lambda distance, size, cost: cost / (size * distance),
        lambda distance, size, cost: cost / size,
        lambda distance, size, cost: -size,
    ]
    found = (_Greedy(dag, budget, order).schedule() for order in orders)
    return [each for each in found if each is not None]


class _Greedy:
    """Runs node after node, makes again what is missing, and evicts what comes first in an order."""

    def __init__(
        self, dag: Dag, budget: float, order: Callable[[float, float, float], float]
    ) -> None:
        self.dag, self.budget, self.order = dag, budget, order
        self.users = dag.users()
        self.there: set[int] = set()
        self.pinned: dict[int, int] = {}
        self.held = 0.0
        self.actions: list[Action] = []
        self.most_actions = 50 * dag.n + 1000

    def schedule(self) -> list[Action] | None:
        for node in range(self.dag.n):
            if not self._run(node, node):
                return None
            for each in sorted(self.there):
                if not any(user > node for user in self.users[each]):
                    self._free(each)
        return self.actions

    def _free(self, node: int) -> None:
        self.actions.append(Action(Kind.FREE, node))
        self.there.remove(node)
        self.held -= self.dag.ram[node]

    def _pin(self, node: int, by: int) -> None:
        self.pinned[node] = self.pinned.get(node, 0) + by

    def _run(self, goal: int, now: int) -> bool:
        """Make `goal`'s output there; what it reads first, in the order of the nodes."""
        stack = [(goal, False)]
        while stack:
            node, ready = stack.pop()
            if node in self.there:
                self._pin(node, 1)  # for whoever asked for it
                continue
            if not ready:
                stack.append((node, True))
                stack += [(each, False) for each in reversed(self.dag.deps[node])]
                continue
            wanted = self.held + self.dag.ram[node] + self.dag.workspace[node]
            while wanted > self.budget:
                victim = self._victim(now)
                if victim is None:
                    return False
                self._free(victim)
                wanted -= self.dag.ram[victim]
            self.actions.append(Action(Kind.RUN, node))
            if len(self.actions) > self.most_actions:
                return False
            self.there.add(node)
            self.held += self.dag.ram[node]
            for each in self.dag.deps[node]:
                self._pin(each, -1)
            self._pin(node, 1)
        self._pin(goal, -1)
        return True

    def _victim(self, now: int) -> int | None:
        best, least = None, np.inf
        for node in self.there:
            if self.pinned.get(node, 0) > 0 or self.dag.ram[node] == 0:
                continue
            distance = min(
                (user - now for user in self.users[node] if user > now), default=self.dag.n
            )
            cost = self.dag.cpu[node] + sum(
                self.dag.cpu[each] for each in self.dag.deps[node] if each not in self.there
            )
            score = self.order(float(distance), self.dag.ram[node], cost)
            if score < least:
                best, least = node, score
        return best
