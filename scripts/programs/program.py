"""A training program as data: typed instructions over named tensors, in phases, with a seed.

Covers: instructions, programs, who reads and writes which name, JSON in and out. Making one is the generator's
(generator.py), turning one into Python source is render.py's; two equal programs always run the same.

Note: what an instruction means
  1. Its code is Python with places: `{o}`, `{p}` are the names that it assigns, `{0}`, `{1}` ... those that it
     reads. Nothing else that is the program's own may be named in it, so that reads and writes are known.
  2. A block has a body, at the place `{body}` of its code. A body that runs later (a hook, a thread, a function) is
     *deferred*: what it reads stays until the step is over.
  3. `when` are the steps in which it runs; None: all.
  4. Names that `prepare` assigns, and `lasting` ones, live as long as the program; the others as long as the step, and
     unless they are `held`, no longer than to their last use.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scripts.programs.faults import Family, Fault


class Phase(enum.Enum):
    """Where in a step something happens."""

    PREPARE = "prepare"
    FORWARD = "forward"
    BETWEEN = "between"
    BACKWARD = "backward"
    AFTER = "after"


ATTACK_PHASES = (Phase.FORWARD, Phase.BETWEEN, Phase.BACKWARD, Phase.AFTER)
"""The phases of the coverage table. AFTER is the optimizer's step and what lies between two steps."""


class Kind(enum.Enum):
    """What an instruction does with its first argument and with its body."""

    MAKE = "make"  # assigns names
    VIEW = "view"  # assigns an alias of its first argument
    WRITE = "write"  # writes to its first argument
    CALL = "call"  # anything else
    BLOCK = "block"  # its body runs here
    HOOK = "hook"  # its body runs when backward comes by its first argument
    THREAD = "thread"  # its body runs on another thread
    SEGMENT = "segment"  # its body is a function of its own names

    @property
    def deferred(self) -> bool:
        """Whether the body may run when the code after it has begun."""
        return self in (Kind.HOOK, Kind.THREAD, Kind.SEGMENT)


@dataclass(frozen=True, slots=True)
class Attack:
    """That an instruction is the moment of a fault.

    Args:
        fault: which.
        phase: when; of an instruction in a hook's body BACKWARD, wherever the hook is registered.
        targets: names whose memory or whose making is tampered with.
    """

    fault: Fault
    phase: Phase
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing that a program does.

    Args:
        kind: what it does with its arguments.
        code: Python source with places for names, see the Note.
        out: names that it assigns.
        args: names that it reads.
        body: what runs inside of it.
        when: steps in which it runs; None: all.
        group: number of the attack that it belongs to; -1: filler.
        attack: the fault that happens here, if one does.
    """

    kind: Kind
    code: str
    out: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    body: tuple[Instruction, ...] = ()
    when: tuple[int, ...] | None = None
    group: int = -1
    attack: Attack | None = None

    def walk(self) -> Iterator[Instruction]:
        """This instruction and all in its body."""
        yield self
        for inner in self.body:
            yield from inner.walk()

    def reads(self) -> set[str]:
        """Names that it or its body reads and that it does not assign itself."""
        made = {name for each in self.walk() for name in each.out}
        return {name for each in self.walk() for name in each.args} - (made - set(self.args))

    def assigns(self) -> set[str]:
        """Names that it or its body assigns for others to see."""
        if self.kind is Kind.SEGMENT:
            return set(self.out)
        return {name for each in self.walk() for name in each.out}


@dataclass(frozen=True, slots=True)
class Program:
    """A training program.

    Args:
        seed: of all generators, when it begins.
        steps: how often forward, between, backward and after are run.
        micro: how often forward, between and backward are run in each of them.
        phases: the instructions of each phase.
        lasting: names made in a step that live on.
        held: names that are not let go of before the step ends.
        interrupts: step -> seconds after which a signal arrives, in a first attempt that is undone.
        family: what it needs around it.
    """

    seed: int
    steps: int
    phases: dict[Phase, tuple[Instruction, ...]]
    micro: int = 1
    lasting: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    interrupts: dict[int, float] = field(default_factory=dict)
    family: Family = Family.EAGER

    def instructions(self) -> Iterator[Instruction]:
        """All instructions, bodies included, in the order of the source."""
        for phase in Phase:
            for top in self.phases.get(phase, ()):
                yield from top.walk()

    def faults(self) -> set[Fault]:
        """The faults that it tries."""
        found = {each.attack.fault for each in self.instructions() if each.attack is not None}
        return found | ({Fault.INTERRUPT} if self.interrupts else set())

    def groups(self) -> dict[int, set[Fault]]:
        """Number of each attack -> its faults."""
        groups: dict[int, set[Fault]] = {}
        for each in self.instructions():
            if each.group >= 0:
                groups.setdefault(each.group, set())
                if each.attack is not None:
                    groups[each.group].add(each.attack.fault)
        return groups

    def persistent(self) -> list[str]:
        """Names that `prepare` assigns, in order."""
        return [
            name for top in self.phases.get(Phase.PREPARE, ()) for name in sorted(top.assigns())
        ]

    def with_phase(self, phase: Phase, instructions: Sequence[Instruction]) -> Program:
        """The same program with another phase."""
        return replace(self, phases={**self.phases, phase: tuple(instructions)})

    def size(self) -> int:
        """Number of instructions."""
        return sum(1 for _ in self.instructions())


# ------------------------------------------------------------------------------------------ JSON


def to_json(program: Program) -> str:
    """The program as one line of JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, dict):
            return {str(plain(key)): plain(each) for key, each in value.items()}
        if isinstance(value, (frozenset, set)):
            return sorted(value)
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        return value

    return json.dumps(plain(asdict(program)))


def from_json(text: str) -> Program:
    """The program that `to_json` wrote."""

    def attack(raw: dict[str, Any] | None) -> Attack | None:
        if raw is None:
            return None
        return Attack(Fault(raw["fault"]), Phase(raw["phase"]), tuple(raw["targets"]))

    def instruction(raw: dict[str, Any]) -> Instruction:
        return Instruction(
            kind=Kind(raw["kind"]),
            code=raw["code"],
            out=tuple(raw["out"]),
            args=tuple(raw["args"]),
            body=tuple(instruction(each) for each in raw["body"]),
            when=None if raw["when"] is None else tuple(raw["when"]),
            group=raw["group"],
            attack=attack(raw["attack"]),
        )

    raw = json.loads(text)
    return Program(
        seed=raw["seed"],
        steps=raw["steps"],
        phases={
            Phase(phase): tuple(instruction(each) for each in tops)
            for phase, tops in raw["phases"].items()
        },
        micro=raw["micro"],
        lasting=frozenset(raw["lasting"]),
        held=frozenset(raw["held"]),
        interrupts={int(step): delay for step, delay in raw["interrupts"].items()},
        family=Family(raw["family"]),
    )
