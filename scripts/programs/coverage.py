"""Which fault was tried with values in which place, and when.

A row is a fault; a column is a place (resident, dropped, host, disk, being copied) in a phase (forward, between,
backward, after: the optimizer's step and what lies between two steps). A cell counts programs in which a value that the
fault endangers was in that place at that moment.

Note: which values, and when
  1. Endangered is what is computed, in any number of steps, from what the attack names as its target; and of that,
     what autograd saved. `endangered` follows names through the program's instructions.
  2. While the program runs, each node of autograd's graph is marked with the instruction that made it. The runtime
     says of each node's saved tensors where they lie.
  3. Where a fault is in how a value is made, there is nothing yet to lie anywhere at that moment. Then its place is
     taken as backward begins (TERMS has which faults that is), and the column's phase is the one in which it was made.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scripts.programs.faults import TERMS, Fault, Moment
from scripts.programs.program import ATTACK_PHASES, Attack, Instruction, Kind, Phase, Program


class Place(enum.Enum):
    """Where a saved value lies."""

    RESIDENT = "resident"
    DROPPED = "dropped"
    HOST = "host"
    DISK = "disk"
    COPYING = "copying"


PLACE_OF = {
    "kept": Place.RESIDENT,
    "resident": Place.RESIDENT,
    "dropped": Place.DROPPED,
    "host": Place.HOST,
    "disk": Place.DISK,
    "copying": Place.COPYING,
}
"""By the word that the extension has for it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table."""

    fault: Fault
    place: Place
    phase: Phase


_NO_VALUE = "no saved value takes part"


def impossible_phase(fault: Fault, phase: Phase) -> str:
    """Why a fault cannot happen in a phase; "" if it can."""
    if fault is Fault.INTERRUPT and phase is not Phase.FORWARD:
        return "a signal comes when it comes; it is listed under forward"
    return ""


def impossible(cell: Cell) -> str:
    """Why there can be no such cell; "" if there can."""
    reason = impossible_phase(cell.fault, cell.phase)
    if reason:
        return reason
    if cell.fault in (Fault.PYTHON_RANDOM, Fault.INTERRUPT) and cell.place is not Place.RESIDENT:
        return _NO_VALUE
    return ""


def endangered(program: Program) -> dict[int, frozenset[int]]:
    """Number of each attack's instruction -> numbers of the instructions whose results it endangers."""
    instructions = list(program.instructions())
    found: dict[int, frozenset[int]] = {}
    for number, each in enumerate(instructions):
        if each.attack is not None:
            found[number] = frozenset(_closure(instructions, each.attack))
    return found


def _closure(instructions: list[Instruction], attack: Attack) -> set[int]:
    names = set(attack.targets)
    numbers: set[int] = set()
    while True:
        before = len(names), len(numbers)
        for number, each in enumerate(instructions):
            touched = names & set(each.args) or names & set(each.out)
            if each.kind is Kind.SEGMENT and each.reads() & names:
                touched = set(each.out)
            if touched:
                numbers.add(number)
                names |= set(each.out)
                if each.kind is Kind.WRITE and each.args:
                    names.add(each.args[0])
        if before == (len(names), len(numbers)):
            return numbers


class Table:
    """Counts cells over many programs."""

    def __init__(self) -> None:
        self.counts: Counter[Cell] = Counter()
        self.loud: Counter[Fault] = Counter()
        self.findings: Counter[Fault] = Counter()
        self.programs: Counter[Fault] = Counter()

    def add(self, cells: Iterable[Cell]) -> None:
        """Takes in what one program has tried."""
        self.counts.update(set(cells))

    def empty(self, faults: Iterable[Fault]) -> list[Cell]:
        """Cells of these faults that could be there and are not."""
        return [
            cell
            for fault in faults
            for phase in ATTACK_PHASES
            for place in Place
            if not impossible(cell := Cell(fault, place, phase)) and not self.counts[cell]
        ]

    def render(self, faults: Iterable[Fault]) -> str:
        """The table as text, with what is impossible and why below it."""
        faults = list(faults)
        width = max(len(fault.value) for fault in faults) + 2
        lines = [" " * width + "".join(f"{phase.value:^30}" for phase in ATTACK_PHASES)]
        places = "".join(f"{place.value[:5]:>6}" for place in Place)
        lines.append(" " * width + places * len(ATTACK_PHASES) + "  programs  found  legal")
        reasons: dict[str, list[str]] = {}
        for fault in faults:
            row = f"{fault.value:<{width}}"
            for phase in ATTACK_PHASES:
                for place in Place:
                    cell = Cell(fault, place, phase)
                    reason = impossible(cell)
                    if reason:
                        reasons.setdefault(f"{fault.value}: {reason}", []).append(
                            f"{phase.value} {place.value}"
                        )
                    row += f"{'-' if reason else self.counts[cell]:>6}"
            row += f"{self.programs[fault]:>10}{self.findings[fault]:>7}{self.loud[fault]:>7}"
            lines.append(row)
        if reasons:
            lines.append("")
            lines += [f"- impossible, {why} ({len(cells)} cells)" for why, cells in reasons.items()]
        legal = [fault for fault in faults if TERMS[fault].loud]
        if legal:
            lines.append("")
            lines += [f"may be loud, {fault.value}: {TERMS[fault].why_loud}" for fault in legal]
        return "\n".join(lines)


def moment_of(attack: Attack) -> Moment:
    """When the places of what an attack endangers are taken."""
    return TERMS[attack.fault].moment
