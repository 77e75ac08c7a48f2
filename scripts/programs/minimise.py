"""The smallest program that still goes wrong.

Everything that can be taken away is taken away while a judge still finds what it found: steps, instructions (first in
large pieces, then one by one, with what needs what they made), terms of sums, blocks around their bodies, conditions on
steps; a result is replaced by what it was made from; the settings become plainer. The judge runs programs in another
process, so that what crashes or hangs can be made small too. What luck is needed for is tried several times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from scripts.programs.program import Attack, Instruction, Kind, Phase, Program
from scripts.programs.runner import Result, Verdict
from scripts.programs.settings import Settings

Judge = Callable[[Program, Settings], Result]


@dataclass(frozen=True, slots=True)
class Smallest:
    """What the minimiser found.

    Args:
        program: no part of it can go.
        settings: as plain as they can be.
        result: what comes of it.
        judged: programs that were run on the way.
    """

    program: Program
    settings: Settings
    result: Result
    judged: int


# ------------------------------------------------------------------------------------ taking away


def remove(program: Program, numbers: set[int]) -> Program:
    """The program without these instructions, and without what needs what they made."""
    order = {id(each): number for number, each in enumerate(program.instructions())}
    made_elsewhere: dict[str, int] = {}
    for each in program.instructions():
        for name in each.out:
            made_elsewhere[name] = made_elsewhere.get(name, 0) + 1
    gone: set[str] = set()

    def lose(each: Instruction) -> None:
        for inner in each.walk():
            for name in inner.out:
                made_elsewhere[name] -= 1
                if not made_elsewhere[name]:
                    gone.add(name)

    def keep(each: Instruction) -> Instruction | None:
        if order[id(each)] in numbers or set(each.args) & gone:
            lose(each)
            return None
        body = tuple(kept for inner in each.body if (kept := keep(inner)) is not None)
        if each.kind is Kind.SEGMENT and len(body) < len(each.body):
            lose(replace(each, body=()))
            return None  # a part of a function makes no function
        if each.body and not body and each.kind in (Kind.HOOK, Kind.BLOCK) and not each.out:
            return None
        return replace(each, body=body)

    phases = program.phases
    while True:  # what was made late may be needed early, in the next step
        before = len(gone)
        phases = {
            phase: tuple(
                kept for top in program.phases.get(phase, ()) if (kept := keep(top)) is not None
            )
            for phase in Phase
        }
        if len(gone) == before:
            break
        for name in made_elsewhere:
            made_elsewhere[name] = sum(
                name in each.out
                for tops in program.phases.values()
                for top in tops
                for each in top.walk()
            )
    return replace(program, phases=phases)


def rewritten(
    program: Program, change: Callable[[Instruction], tuple[Instruction, ...]]
) -> Program:
    """The program with each instruction replaced by what `change` makes of it, bodies first."""

    def one(each: Instruction) -> tuple[Instruction, ...]:
        body = tuple(new for inner in each.body for new in one(inner))
        return change(each if body == each.body else replace(each, body=body))

    return replace(
        program,
        phases={
            phase: tuple(new for top in tops for new in one(top))
            for phase, tops in program.phases.items()
        },
    )


def renamed(program: Program, old: str, new: str) -> Program:
    """The program with another name read wherever this one was."""

    def change(each: Instruction) -> tuple[Instruction, ...]:
        attack = each.attack
        if attack is not None and old in attack.targets:
            targets = tuple(new if name == old else name for name in attack.targets)
            attack = Attack(attack.fault, attack.phase, targets)
        args = tuple(new if name == old else name for name in each.args)
        return (replace(each, args=args, attack=attack),)

    return rewritten(program, change)


def _without_term(each: Instruction, position: int) -> Instruction | None:
    """A sum without one of its terms; None if the argument is no term of a sum."""
    code = each.code
    place = re.escape(f"{{{position}}}")
    if code.count(f"{{{position}}}") != 1:
        return None
    shorter = re.sub(rf" \+ {place}(?=[ )])|(?<=\(){place} \+ ", "", code)
    if shorter == code:
        return None

    def lower(match: re.Match[str]) -> str:
        number = int(match.group(1))
        return f"{{{number - 1 if number > position else number}}}"

    shorter = re.sub(r"\{(\d+)\}", lower, shorter)
    return replace(each, code=shorter, args=each.args[:position] + each.args[position + 1 :])


def _replaced(program: Program, target: int, news: tuple[Instruction, ...]) -> Program:
    order = {id(each): number for number, each in enumerate(program.instructions())}

    def one(each: Instruction) -> tuple[Instruction, ...]:
        if order[id(each)] == target:
            return news
        body = tuple(new for inner in each.body for new in one(inner))
        return (each if body == each.body else replace(each, body=body),)

    return replace(
        program,
        phases={
            phase: tuple(new for top in tops for new in one(top))
            for phase, tops in program.phases.items()
        },
    )


# ------------------------------------------------------------------------------------ candidates


def _fewer_steps(program: Program) -> Iterator[Program]:
    for steps in range(1, program.steps):
        yield with_steps(program, steps)
    if program.micro > 1:
        yield replace(program, micro=1)
    for step in program.interrupts:
        rest = {each: delay for each, delay in program.interrupts.items() if each != step}
        yield replace(program, interrupts=rest)
    if program.held:
        yield replace(program, held=frozenset())


def with_steps(program: Program, steps: int) -> Program:
    """The program with another number of steps."""

    def change(each: Instruction) -> tuple[Instruction, ...]:
        if each.when is None:
            return (each,)
        when = tuple(step for step in each.when if step < steps)
        return (replace(each, when=when),) if when else ()

    interrupts = {step: delay for step, delay in program.interrupts.items() if step < steps}
    return replace(rewritten(program, change), steps=steps, interrupts=interrupts)


def _without_pieces(program: Program) -> Iterator[Program]:
    count = program.size()
    size = count // 2
    while size >= 1:
        for first in range(count - size, -1, -size):
            yield remove(program, set(range(first, first + size)))
        size //= 2


def _simpler(program: Program) -> Iterator[Program]:
    for number, each in enumerate(program.instructions()):
        if each.kind in (Kind.MAKE, Kind.VIEW) and len(each.out) == 1:
            for name in dict.fromkeys(each.args):
                without = _replaced(program, number, ())
                yield renamed(without, each.out[0], name)
        for position in range(len(each.args)):
            shorter = _without_term(each, position)
            if shorter is not None:
                yield _replaced(program, number, (shorter,))
        if each.kind is Kind.BLOCK and each.body:
            yield _replaced(program, number, each.body)
        if each.when is not None and len(each.when) > 1:
            yield _replaced(program, number, (replace(each, when=each.when[:1]),))


def _plainer(settings: Settings) -> Iterator[Settings]:
    plain = Settings(seed=settings.seed)
    yield plain
    yield replace(plain, verify=settings.verify)
    yield replace(plain, policy="stress_swap_all", host_budget="16MiB")
    yield replace(plain, policy="stress_swap_all", host_budget="16MiB", verify=settings.verify)
    for name in ("check", "style", "verify", "link_bytes_per_s", "disk_budget", "host_budget"):
        if getattr(settings, name) != getattr(plain, name):
            yield replace(settings, **{name: getattr(plain, name)})


# ------------------------------------------------------------------------------------ the search


class Minimiser:
    """Looks for the smallest program with the same finding.

    Args:
        judge: runs a program.
        seconds: when to be content with what there is.
        tries: how often a program is run before it counts as well-behaved.
    """

    def __init__(self, judge: Judge, seconds: float = 120.0, tries: int = 1) -> None:
        self.judge = judge
        self.deadline_s = time.monotonic() + seconds
        self.tries = tries
        self.judged = 0

    def run(self, program: Program, settings: Settings, result: Result) -> Smallest:
        """Makes a program small that was judged so."""
        self.best = Smallest(program, settings, result, 0)
        self.wanted = _signature(result)
        for plainer in _plainer(settings):
            if plainer != self.best.settings and self._still(program, plainer):
                break
        changed = True
        while changed and not self._late():
            changed = False
            for candidates in (_fewer_steps, _without_pieces, _simpler):
                while self._improve(candidates):
                    changed = True
        return replace(self.best, judged=self.judged)

    def _late(self) -> bool:
        return time.monotonic() > self.deadline_s

    def _improve(self, candidates: Callable[[Program], Iterator[Program]]) -> bool:
        """Takes the first candidate that still goes wrong."""
        for candidate in candidates(self.best.program):
            if self._late():
                return False
            if candidate != self.best.program and self._still(candidate, self.best.settings):
                return True
        return False

    def _still(self, program: Program, settings: Settings) -> bool:
        for _ in range(self.tries):
            self.judged += 1
            result = self.judge(program, settings)
            if _signature(result) == self.wanted:
                self.best = Smallest(program, settings, result, 0)
                return True
            if self._late():
                break
        return False


def _signature(result: Result) -> tuple[Verdict, str]:
    """What has to stay the same: the verdict, and of an error its class."""
    if result.verdict in (Verdict.LOUD, Verdict.LEGALLY_LOUD):
        found = re.search(
            r"(\w+(?:Error|Mismatch|Modification|Failed|Infeasible))\b", result.detail
        )
        return result.verdict, found.group(1) if found else ""
    return result.verdict, ""
