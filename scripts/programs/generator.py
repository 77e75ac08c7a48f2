"""Seed and number -> a program and how it is managed.

Each program has one or two attacks, each with a fault and a phase to aim at, and fillers around them. The aims go round
by number, so that every pair of fault and phase is tried equally often; all else is chance, from a generator of the
seed and the number alone: program n is the same whichever programs were made before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scripts.programs.attacks import ATTACKS, Aim
from scripts.programs.builder import Builder
from scripts.programs.coverage import impossible_phase
from scripts.programs.faults import TERMS, Family, Fault
from scripts.programs.fillers import FILLERS, evaluate_between_steps, fill
from scripts.programs.program import ATTACK_PHASES, Kind, Phase, Program
from scripts.programs.settings import Settings, random_settings

ONLY_IN = {
    Fault.COLLECTIVE: Family.TWO_PROCESS,
    Fault.COMPILED: Family.COMPILED,
    Fault.NATIVE_CODE: Family.COMPILED,
}
"""Faults that only one family has."""

NOT_WITH_INTERRUPTS = frozenset(Fault) - {
    Fault.INTERRUPT,
    Fault.SUBCLASS_OPERAND,
    Fault.PARTIAL_OVERWRITE,
    Fault.AUDIT_DRAWS,
    Fault.LIST_OP,
}
"""Faults of programs whose steps cannot be undone and run again."""


@dataclass(frozen=True, slots=True)
class Case:
    """One program of a run.

    Args:
        number: which.
        program: the program.
        settings: how it is managed.
    """

    number: int
    program: Program
    settings: Settings


def aims(family: Family) -> list[Aim]:
    """All pairs of fault and phase that a family can try."""
    return [
        Aim(fault, phase)
        for fault in Fault
        if fault in ATTACKS and ONLY_IN.get(fault, family) is family
        for phase in ATTACK_PHASES
        if not impossible_phase(fault, phase)
    ]


def make_case(seed: int, number: int, family: Family = Family.EAGER) -> Case:
    """Program `number` of the run with this seed."""
    rng = random.Random(f"{seed} {number} {family.value}")
    program = _make_program(rng, number, family)
    settings = random_settings(rng, program.faults())
    if any(fault in program.faults() for fault in (Fault.INTERRUPT,)):
        settings = replace(settings, style=rng.choice(("step", "both", "entered")))
    return Case(number, program, settings)


def _chosen_aims(rng: random.Random, number: int, family: Family) -> list[Aim]:
    every = aims(family)
    if family is not Family.EAGER:
        own = [aim for aim in every if aim.fault in ONLY_IN]
        chosen = [own[number % len(own)]]
        if rng.random() < 0.3:
            chosen.append(rng.choice(every))
    else:
        every += [aim for aim in every if aim.fault is Fault.INTERRUPT] * 3  # it has one phase only
        # A stride that has no common divisor with the number of aims spreads neighbours apart.
        chosen = [every[number * 29 % len(every)]]
        if rng.random() < 0.5:
            chosen.append(rng.choice(every))
    if len(chosen) == 2:
        interrupts = any(aim.fault is Fault.INTERRUPT for aim in chosen)
        if chosen[0].fault is chosen[1].fault or (
            interrupts
            and any(
                aim.fault in NOT_WITH_INTERRUPTS or aim.phase is Phase.AFTER
                for aim in chosen
                if aim.fault is not Fault.INTERRUPT
            )
        ):
            chosen.pop()
    return chosen


@dataclass(slots=True)
class _Running:
    """An attack that is being emitted."""

    coroutine: Iterator[None]
    group: int
    when: tuple[int, ...] | None = None
    done: bool = False

    def resume(self, b: Builder) -> None:
        """Lets it emit up to where others may come in."""
        b.group, b.when = self.group, self.when
        try:
            next(self.coroutine)
        except StopIteration:
            self.done = True
        self.when = b.when
        b.group, b.when = -1, None


def _make_program(rng: random.Random, number: int, family: Family) -> Program:
    chosen = _chosen_aims(rng, number, family)
    changes_late = Fault.OP_CHANGES in {aim.fault for aim in chosen}
    steps = rng.choice((5, 6, 8) if changes_late else (3, 3, 3, 4, 4, 5, 6))
    b = Builder(rng, steps)
    b.leaf(), b.leaf()
    micro = 1
    b.calm = Fault.INTERRUPT in {aim.fault for aim in chosen}
    running = [_Running(ATTACKS[aim.fault](b, aim), group) for group, aim in enumerate(chosen)]
    if rng.random() < 0.12 and Fault.INTERRUPT not in {aim.fault for aim in chosen}:
        micro = 2
    b.square("{0} * 0.5 + {1}", b.batch(), b.leaf())
    fillers = rng.choice((1, 2, 3, 5, 8, 14))
    while fillers > 0 or not all(each.done for each in running):
        waiting = [each for each in running if not each.done]
        if fillers > 0 and (not waiting or rng.random() < fillers / (fillers + 2 * len(waiting))):
            fill(b)
            fillers -= 1
        else:
            rng.choice(waiting).resume(b)
    _close(b)
    if rng.random() < 0.25:
        evaluate_between_steps(b)
    seed = rng.randrange(1 << 31)
    return replace(b.finish(seed, micro), family=family)


def _used(b: Builder) -> set[str]:
    return {
        name
        for phase in Phase
        for top in b.phases[phase]
        for each in top.walk()
        for name in each.args
    }


BACKWARDS = (
    (10, "{0}.backward()"),
    (1.2, "{0}.backward(retain_graph=True)\n{0}.backward()"),
    (0.8, "torch.autograd.backward([{0} * 0.5, {0} * 0.5])"),
    (0.5, "Job({0}.backward).wait()"),
    (0.4, "with delta.disable():\n    {0}.backward()"),
    (0.08, "with torch.autograd.set_detect_anomaly(True, check_nan=False):\n    {0}.backward()"),
    (0.4, "with torch.autograd.set_multithreading_enabled(False):\n    {0}.backward()"),
    (0.3, "with torch.no_grad():\n    {0}.backward()"),
)
"""(weight, source): the backward of a step's loss."""


def _close(b: Builder) -> None:
    """The loss of all that was made, its backward, and what comes after."""
    rng = b.rng
    used = _used(b)
    ends = [name for name in b.pool if name not in used]
    some = rng.sample(b.pool, min(len(b.pool), 2))
    terms = list(dict.fromkeys([*b.sinks, *ends, *some]))
    several = len(terms) > 3 and rng.random() < 0.2
    groups = [terms[::2], terms[1::2]] if several else [terms]
    losses = []
    for group in groups:
        form = rng.choice(("({}).mean()", "({}).square().mean()", "({}).tanh().sum() * 0.01"))
        total = " + ".join(f"{{{position}}}" for position in range(len(group)))
        losses.append(
            b.make(
                form.format(total.replace("{", "{{").replace("}", "}}"))
                .replace("{{", "{")
                .replace("}}", "}"),
                *group,
                prefix="loss",
            )
        )
    for loss in losses:
        b.call("note('loss', {0})", loss)
    with b.into(Phase.BACKWARD):
        for loss in losses[:-1]:  # they share parts of the graph
            b.call("{0}.backward(retain_graph=True)", loss)
        weights = [weight for weight, _ in BACKWARDS]
        code = rng.choices([code for _, code in BACKWARDS], weights=weights)[0]
        b.call(BACKWARDS[0][1] if b.calm else code, losses[-1])
    for emit in b.closing:
        emit()
    _optimize(b)


OPTIMIZERS = (
    "torch.optim.SGD([{leaves}], lr=0.02)",
    "torch.optim.SGD([{leaves}], lr=0.01, momentum=0.9, foreach=True)",
    "torch.optim.SGD([{leaves}], lr=0.01, momentum=0.9, nesterov=True, foreach=False)",
    "torch.optim.SGD([{leaves}], lr=0.01, fused=True)",
    "torch.optim.Adam([{leaves}], lr=1e-3, foreach=True)",
    "torch.optim.Adam([{leaves}], lr=1e-3, foreach=False)",
    "torch.optim.AdamW([{leaves}], lr=1e-3, fused=True)",
    "torch.optim.Adagrad([{leaves}], lr=1e-2)",
    "torch.optim.RMSprop([{leaves}], lr=1e-3)",
)


def _optimize(b: Builder) -> None:
    rng = b.rng
    with b.into(Phase.AFTER):
        attacks = b.phases[Phase.AFTER]
        own: list = []
        b._into = own
        if rng.random() < 0.9:
            every = [*b.leaves, *b.other_leaves]
            leaves = ", ".join(f"{{{i}}}" for i in range(len(every)))
            expression = rng.choice(OPTIMIZERS).replace("{leaves}", leaves)
            optimizer = b.prepared(expression, "optimizer", *every)
            if rng.random() < 0.15:
                b.call(f"torch.nn.utils.clip_grad_norm_([{leaves}], 1.0)", *every)
            if rng.random() < 0.08:
                b.call("{0}.step(lambda: None)", optimizer)
            else:
                b.call("{0}.step()", optimizer)
            if rng.random() < 0.8:
                b.call(f"{{0}}.zero_grad(set_to_none={rng.random() < 0.7})", optimizer)
        else:
            for leaf in [*b.leaves, *b.other_leaves]:
                b.write(
                    "if {0}.grad is not None:\n    {0}.data.add_({0}.grad, alpha=-0.01)\n    {0}.grad = None",
                    leaf,
                )
        for leaf in b.side_leaves:
            if rng.random() < 0.5:
                b.write("{0}.grad = None", leaf)
        b._into = attacks
        b.phases[Phase.AFTER] = attacks + own if rng.random() < 0.5 else own + attacks


__all__ = ["Case", "aims", "make_case", "FILLERS", "TERMS", "Kind"]
