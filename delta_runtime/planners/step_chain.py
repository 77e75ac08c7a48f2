"""Linearisation: a recorded step as a chain of stages, for the planners that know nothing else.

A stage ends where all that follows is rebuilt from a single saved value: at an articulation point of the graph of
recipes. That value is the stage's output; the other saved values of the stage are put together. What comes behind the
last such point belongs to the loss, and stays.

Covers the chain's columns in the notation of `rotor`, and the way back from a schedule of the chain to what is there at
each op. Does not cover how a schedule is found.

Note: what the columns mean
  1. `a[i]` is the input of stage i: the saved value before it; the first is the batch, which the step holds anyway.
     `abar[i + 1]` is all that stage i saves, its output included.
  2. Memory is that of the device. What a step holds beside saved values (weights, gradients, workspaces) goes into
     `f_tmp` and `b_tmp`, at its worst while the stage runs. The gradients of outputs are part of that: `g` is 0.
  3. A forward that runs again does so in backward, beside the most that backward holds up to the stage's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.reruns import Reruns
from delta_runtime.core.step_graph import Floats, Ints, Mask, StepGraph
from delta_runtime.planners.chain import Action, Chain, Kind
from delta_runtime.planners.contraction import (
    Contraction,
    contract,
    cuts_of,
    movable_rows,
)
from delta_runtime.planners.presence import Presence

_INPUT = -1  # the batch: no group


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the chain.

    Args:
        output: group of the contracted graph that is its output.
        rest: group of all else that it saves; -1 where there is nothing.
        backward: first op of the contracted graph in which its backward asks for something.
    """

    output: int
    rest: int
    backward: int


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumns:
    """Bytes of a chain's layers, for checkpoints that are kept; layer 0 is the batch.

    Args:
        kept: of each layer's output.
        saved: of all that each layer saves, its output included.
        beside: what the step holds beside saved values in the backward of each layer, at its worst.
    """

    kept: Floats
    saved: Floats
    beside: Floats


class StepChain:
    """A step as a chain.

    Args:
        graph: the recorded step.
    """

    def __init__(self, graph: StepGraph) -> None:
        recipes = recipes_of(graph)
        rows = movable_rows(graph, recipes)
        cuts = cuts_of(rows, recipes)
        groups: list[Ints] = []
        begin = 0
        for cut in cuts:
            groups += [each for each in (rows[begin:cut], rows[cut : cut + 1]) if len(each)]
            begin = cut + 1
        self.contraction: Contraction = contract(graph, groups, recipes)
        self.graph: StepGraph = self.contraction.graph
        self.presence = Presence(self.graph)
        self.stages: list[Stage] = self._stages({int(rows[cut]) for cut in cuts})

    def _stages(self, outputs: set[int]) -> list[Stage]:
        found: list[Stage] = []
        rest = _INPUT
        for group, rows in enumerate(self.contraction.groups):
            if int(rows[0]) not in outputs:
                rest = group
                continue
            read = found[-1].output if found else _INPUT
            asked = [
                op for each in (rest, read) if each != _INPUT for op in self.presence.asked[each]
            ]
            found.append(Stage(group, rest, min(asked, default=0)))
            rest = _INPUT
        # Backward goes from the last stage to the first, whatever is asked for early.
        latest = int(self.presence.made[found[-1].output]) + 1 if found else 0
        for number in range(len(found) - 1, -1, -1):
            latest = max(latest, found[number].backward)
            found[number] = Stage(found[number].output, found[number].rest, latest)
        return found

    @property
    def length(self) -> int:
        """Number of stages without the loss."""
        return len(self.stages)

    def backward_ops(self, stage: int) -> range:
        """Return the ops of the contracted graph that are the backward of a stage; for `length`, those of the loss."""
        ends = self.stages[stage - 1].backward if stage > 0 else self.graph.n_ops
        begin = self.stages[stage].backward if stage < self.length else self._forward_end(stage)
        return range(begin, max(ends, begin))

    def _forward_end(self, stage: int) -> int:
        """Return the op of the contracted graph behind the forward of so many stages."""
        return int(self.presence.made[self.stages[stage - 1].output]) + 1 if stage > 0 else 0

    def _forward_ops(self, stage: int) -> range:
        return range(self._forward_end(stage), self._forward_end(stage + 1))

    def columns(self) -> Chain:
        """Return the chain in the notation of `rotor`: seconds, and bytes of the device."""
        graph, n = self.graph, self.length
        bytes_ = graph.saved_bytes
        workspace = Reruns(graph, self.presence.recipes).held_alone()
        seconds = np.nan_to_num(graph.rerun_seconds)
        beside = self.presence.beside(range(len(self.graph.saved)))
        out = [int(bytes_[each.output]) for each in self.stages]
        rest = [int(bytes_[each.rest]) if each.rest != _INPUT else 0 for each in self.stages]
        a = [0, *out]

        def worst(ops: range) -> float:
            return float(beside[ops.start : ops.stop].max(initial=0.0))

        def again(stage: Stage) -> list[int]:
            return [each for each in (stage.rest, stage.output) if each != _INPUT]

        f_tmp: list[float] = [0.0] * n
        b_tmp: list[float] = [0.0] * (n + 1)
        so_far = worst(self.backward_ops(n))
        b_tmp[n] = max(so_far, 0.0)
        for number in range(n - 1, -1, -1):
            backward = worst(self.backward_ops(number))
            so_far = max(so_far, backward)
            most = max(workspace[group] for group in again(self.stages[number]))
            f_tmp[number] = max(worst(self._forward_ops(number)), so_far + most)
            b_tmp[number] = max(backward, 0.0)
        return Chain(
            f=[
                float(sum(seconds[self.presence.made[group]] for group in again(each)))
                for each in self.stages
            ],
            b=[
                float(graph.op_seconds[list(self.backward_ops(number))].sum())
                for number in range(n + 1)
            ],
            a=a,
            abar=[0, *(x + y for x, y in zip(out, rest, strict=True))],
            f_tmp=f_tmp,
            b_tmp=b_tmp,
            g=[0] * (n + 1),
        )

    def segment_peaks(self) -> SegmentColumns:
        """Return what least-peak checkpoints need to know of the device's memory."""
        beside = self.presence.beside(range(len(self.graph.saved)))
        columns = self.columns()
        worst = [
            float(beside[ops.start : ops.stop].max(initial=0.0))
            for ops in (self.backward_ops(number) for number in range(self.length))
        ]
        return SegmentColumns(
            kept=np.array(columns.a, np.float64),
            saved=np.array(columns.abar, np.float64),
            beside=np.array([0.0, *worst]),
        )

    def plan_of_schedule(self, schedule: Sequence[Action]) -> Plan:
        """Return the plan of the whole step under which its stages run as a schedule of `rotor` says."""
        return self.contraction.expand(self.presence.plan(_Walk(self).there(schedule)))

    def plan_of_kept(self, kept: Sequence[int]) -> Plan:
        """Return the plan of the whole step under which some outputs are kept, and the segments between rebuilt once.

        Args:
            kept: numbers of stages, counted from 1, whose output stays. What is behind the last of them stays as
                forward leaves it: backward begins there.
        """
        there = np.zeros((self.graph.n_ops, len(self.graph.saved)), bool)
        breaks = [0, *kept, self.length]
        for begin, end in zip(breaks, breaks[1:], strict=False):
            if begin > 0:
                there[:, self.stages[begin - 1].output] = True
            since = 0 if end == self.length else self.stages[end - 1].backward
            for stage in self.stages[begin:end]:
                for group in (stage.rest, stage.output):
                    if group != _INPUT:
                        there[since:, group] = True
        return self.contraction.expand(self.presence.plan(there))


class _Walk:
    """Follows a schedule of a chain, and notes what is there at each op."""

    def __init__(self, chain: StepChain) -> None:
        self.chain = chain
        self.mask: Mask = np.zeros((chain.graph.n_ops, len(chain.graph.saved)), bool)
        self.plain: dict[
            int, int
        ] = {}  # stages whose input is there by itself, and the op since when
        self.saved: dict[int, int] = {}

    def there(self, schedule: Sequence[Action]) -> Mask:
        """Return for each op and each group whether it is there."""
        now = 0
        ahead = [stage for kind, stage in schedule if kind is Kind.BACKWARD]
        behind_loss = False
        for kind, stage in schedule:
            if behind_loss and ahead:
                now = self.chain.backward_ops(ahead[0]).start
            if kind is Kind.LOSS:
                behind_loss = True
                self._leaves(stage, self.chain.backward_ops(stage).start)
            elif kind is Kind.BACKWARD:
                ahead.pop(0)
                end = self.chain.backward_ops(stage).stop - 1
                self._note(self.chain.stages[stage].rest, self.saved[stage], end)
                self._note(self.chain.stages[stage].output, self.saved.pop(stage), end)
                self._leaves(stage, end)
            elif kind is Kind.SAVE:
                self.saved[stage] = now
            else:
                self.plain[stage + 1] = now
                if kind is Kind.SKIP:
                    self._leaves(stage, now)
        return self.mask

    def _leaves(self, stage: int, last: int) -> None:
        """Note that the plain input of a stage goes behind an op; it was but passing if it came at the same one."""
        since = self.plain.pop(stage, None)
        if since is not None and stage > 0 and (since < last or since == 0):
            self._note(
                self.chain.stages[stage - 1].output, since, last if since < last else last - 1
            )

    def _note(self, group: int, since: int, last: int) -> None:
        if group != _INPUT:
            self.mask[since : last + 1, group] = True
