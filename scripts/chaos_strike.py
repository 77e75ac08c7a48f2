"""What a fault of stress_chaos.py is, and one strike of it.

Covers: when, where and on which device a fault makes sense, and what may come of it. Does not cover the faults
themselves, nor who strikes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import delta_runtime as delta
from scripts.chaos_world import (
    BACKWARD,
    BLOCKS,
    CPU,
    DEVICES,
    DISK,
    PHASES,
    WAYS,
    Device,
    World,
)

LAST_BLOCKS = range(BLOCKS // 2, BLOCKS)


class Struck(Exception):
    """Raised by a fault, in code that is not the runtime's."""


@dataclass
class Strike:
    """One fault in one step.

    Attributes:
        world: that it strikes.
        way, phase: where tensors go, and when it comes.
        block: at which block of that phase.
        random: whatever else is by chance.
        runtime: that it strikes.
        files: descriptors of what the runtime has open: its spill file.
        armed: whether what was prepared may take effect.
        took: whether it was delivered: something was refused, failed, came late, was raised.
        seen: asked when the step is over; one that says yes shows that it was delivered.
        after: is done when the step is over, whatever came of it; the last one first.
        wrong: what else went wrong because of it.
    """

    world: World
    way: str
    phase: str
    block: int
    random: random.Random
    runtime: delta.Runtime = field(init=False)
    files: set[int] = field(default_factory=set)
    armed: bool = False
    took: bool = False
    seen: list[Callable[[], bool]] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def device(self) -> Device:
        """That it trains on."""
        return self.world.device

    def takes_if_more(self, count: Callable[[], float]) -> None:
        """Have a count that grows from now on show that it was delivered."""
        before = count()
        self.seen.append(lambda: count() > before)

    def end(self) -> None:
        """Look whether it was delivered, and put everything back."""
        self.took = self.took or any(seen() for seen in self.seen)
        for undo in reversed(self.after):
            undo()
        self.after.clear()
        self.seen.clear()


@dataclass(frozen=True)
class Never:
    """Where a fault cannot be delivered, and why."""

    why: str
    devices: tuple[str, ...] = DEVICES
    ways: tuple[str, ...] = WAYS
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        strike: does it, at the moment that was chosen.
        devices, ways, phases: where and when it makes sense.
        errors: that may come up in the program because of it.
        must_raise: whether one of them has to, once it was delivered.
        prepare: called before the runtime is made that is struck; returns settings of it, beside those of the way.
        arms: whether `strike` is called before the step begins, and takes effect at the moment by itself.
        never: in which of these cells it cannot be delivered.
        backward_blocks: at which it comes in backward. That begins with the last one; near its end little is asked for.
    """

    strike: Callable[[Strike], None]
    devices: tuple[str, ...] = DEVICES
    ways: tuple[str, ...] = WAYS
    phases: tuple[str, ...] = PHASES
    errors: tuple[type[BaseException], ...] = ()
    must_raise: bool = False
    prepare: Callable[[Strike], Mapping[str, Any]] | None = None
    arms: bool = False
    never: tuple[Never, ...] = ()
    backward_blocks: range = range(BLOCKS)

    def blocks(self, device: str, way: str, phase: str) -> range:
        """At which blocks it may come there."""
        if phase != BACKWARD:
            return range(BLOCKS)
        if way == DISK and device != CPU:
            return self.backward_blocks[-1:]  # a block or two later all is back from the disk
        return self.backward_blocks

    def makes_sense(self, device: str, way: str, phase: str) -> bool:
        """Whether it is struck there."""
        return (
            device in self.devices
            and way in self.ways
            and phase in self.phases
            and not any(
                device in no.devices and way in no.ways and phase in no.phases for no in self.never
            )
        )
