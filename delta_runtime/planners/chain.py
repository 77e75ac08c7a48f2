"""A chain of stages, and what a schedule does with it: the words that planners of chains share.

Covers the chain in the notation of Rotor, its schedules, and their replay. Does not cover how a schedule is found
(`rotor`), nor how a recorded step becomes a chain (`step_chain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a schedule does with a stage."""

    SAVE = 0
    """Run forward, keep all that backward needs."""
    CHECKPOINT = 1
    """Run forward, keep the input alone."""
    SKIP = 2
    """Run forward, keep nothing; the input goes."""
    LOSS = 3
    BACKWARD = 4


class Action(NamedTuple):
    """One line of a schedule."""

    kind: Kind
    stage: int


@dataclass(frozen=True, slots=True)
class Chain:
    """L stages and a loss; sizes in any one unit.

    Args:
        f: seconds of each stage's forward, (L,).
        b: seconds of each stage's backward, and last of the loss, (L + 1,).
        a: size of each stage's input, and last of the loss's, (L + 1,).
        abar: `abar[i + 1]` is what the forward of stage i keeps with its output and without its input, (L + 1,); the
            first is not read.
        f_tmp: what the forward of each stage needs for itself, (L,).
        b_tmp: what the backward of each stage needs, and last the loss, (L + 1,).
        g: size of the gradient of each stage's input, and last of the loss's, (L + 1,); as large as `a` where None is
            given.
    """

    f: Sequence[float]
    b: Sequence[float]
    a: Sequence[float]
    abar: Sequence[float]
    f_tmp: Sequence[float]
    b_tmp: Sequence[float]
    g: Sequence[float] | None = None

    def __post_init__(self) -> None:
        n = len(self.f)
        wanted = {"b": n + 1, "a": n + 1, "abar": n + 1, "f_tmp": n, "b_tmp": n + 1}
        wanted |= {"g": n + 1} if self.g is not None else {}
        for name, length in wanted.items():
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries; a chain of {n} stages takes {length}"
                )
        for name in ("f", *wanted):
            if not all(0 <= each < float("inf") for each in getattr(self, name)):
                raise ValueError(f"{name} holds something that is negative or no finite number")

    @property
    def gradients(self) -> Sequence[float]:
        """Size of the gradient of each stage's input, and last of the loss's."""
        return self.a if self.g is None else self.g

    @property
    def length(self) -> int:
        """Number of stages without the loss."""
        return len(self.f)


def replay(chain: Chain, schedule: Sequence[Action]) -> tuple[float, float]:
    """Carry out a schedule, and return its seconds and its peak.

    Raises:
        ValueError: the schedule reads what is not there, or leaves a backward out.
    """
    n = chain.length
    plain = {0}  # stages whose input is there by itself
    saved: set[int] = set()  # stages whose output and saved values are there
    gradients: set[int] = set()
    seconds, peak = 0.0, float(chain.a[0])

    def held() -> float:
        return (
            sum(chain.a[i] for i in plain)
            + sum(chain.abar[i + 1] for i in saved)
            + sum(chain.gradients[i] for i in gradients)
        )

    for kind, i in schedule:
        before = held()
        if i not in plain and i - 1 not in saved:
            raise ValueError(f"{kind.name}({i}) reads the input of stage {i}, which is not there")
        if kind is Kind.LOSS:
            peak = max(peak, before + chain.gradients[n] + chain.b_tmp[n])
            plain.discard(n)
            gradients.add(n)
            seconds += chain.b[n]
        elif kind is Kind.BACKWARD:
            if i not in saved or i + 1 not in gradients:
                raise ValueError(f"BACKWARD({i}) lacks what it reads")
            peak = max(peak, before + chain.gradients[i] + chain.b_tmp[i])
            gradients = (gradients - {i + 1}) | {i}
            saved.remove(i)
            plain.discard(i)
            seconds += chain.b[i]
        else:
            added = chain.abar[i + 1] if kind is Kind.SAVE else chain.a[i + 1]
            peak = max(peak, before + added + chain.f_tmp[i])
            if kind is Kind.SAVE:
                saved.add(i)
            else:
                plain.add(i + 1)
                if kind is Kind.SKIP:
                    plain.discard(i)
            seconds += chain.f[i]
    if gradients != {0} or saved or plain - {0}:
        raise ValueError("the schedule does not reach the gradient of the first stage's input")
    return seconds, peak
