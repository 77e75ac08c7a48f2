"""The shapes that attacks have in common.

Two of them: *writing* (memory is made, values are derived from it and saved, and it is written in the phase that is
asked for), and *making* (what is saved is made in that phase, in a way that does not repeat). After the optimizer there
is no graph of an ordinary step left; there the graph of a leaf that no optimizer touches is kept until the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scripts.programs.builder import Builder
from scripts.programs.faults import Fault
from scripts.programs.program import Kind, Phase

SAVES_BOTH = (
    "{0} * {1}",
    "torch.mm({0}, {1}) * 0.2",
    "torch.addcmul({1}, {0}, {1})",
    "F.linear({1}, {0}) * 0.2",
    "torch.maximum({0} * 0.5, {1}) + {0}",
    "{1} / ({0}.square() + 1)",
)
"""Of memory and a leaf; the memory is saved for backward."""

SAVES_NEITHER = (
    "{0} + {1}",
    "{1} - {0}",
    "torch.add({1}, {0}, alpha=0.7)",
    "torch.cat(({0}[:16] + {1}[:16], {1}[16:]))",
    "{0}.flip(0) + {1}",
    "torch._foreach_add([{0}], [{1}])[0]",
    "torch.roll({0}, 5, 0) - {1}",
    "{1}.clone().add_({0})",
)
"""Of memory and a leaf; the memory is not saved, so that autograd allows that it changes."""

USES = (
    "{0}.sin()",
    "{0}.tanh()",
    "{0} * {0}",
    "F.gelu({0})",
    "{0}.sigmoid()",
    "{0}.softmax(-1) * 8",
    "{0}.square().sqrt() + {0}.cos()",
    "F.silu({0}) * {0}",
)
"""Of a square, which is saved or whose result is."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What an attack goes for.

    Args:
        fault: the fault.
        phase: when it has to happen.
    """

    fault: Fault
    phase: Phase


Attacker = Callable[[Builder, Aim], Iterator[None]]


def late(aim: Aim) -> bool:
    """Whether the graph has to outlive its step."""
    return aim.phase is Phase.AFTER


def leaf_for(b: Builder, aim: Aim) -> str:
    """A leaf that may be saved until the attack is over."""
    return b.side_leaf() if late(aim) else b.leaf()


@contextlib.contextmanager
def making_steps(b: Builder, aim: Aim) -> Iterator[None]:
    """The steps in which what is attacked is made: all, or every other where the graph outlives its step."""
    with b.only(b.even_steps if late(aim) else b.when):
        yield


def finish_late(b: Builder, h: str) -> str:
    """Keeps the graph of a square until the next step, which calls its backward."""
    kept = b.fresh("late")
    b.lasting.add(kept)
    b.emit(Kind.MAKE, "{o} = ({0} * 0.01).sum()", h, out=(kept,))
    with b.only(b.odd_steps), b.into(b.pick((Phase.FORWARD, Phase.BETWEEN))):
        code = "if {0} is not None:\n    {0}.backward()\n    {o} = None"
        b.emit(Kind.CALL, code, kept, out=(kept,))
    return kept


def derive(b: Builder, memory: str, leaf: str, *, saves: bool) -> str:
    """A chain of values whose recipes start from the memory; what is saved of it is let go of."""
    expression = b.pick(SAVES_BOTH if saves and b.chance(0.6) else SAVES_NEITHER)
    y = b.make(expression, memory, leaf, prefix="y")
    if b.chance(0.4):
        y = b.make(
            b.pick(("{0} * 1.1", "{0}.tanh()", "{0} + 0.1", "{0}.exp().clamp(max=3)")),
            y,
            prefix="y",
        )
    return b.make(b.pick(USES), y)


def writing(
    b: Builder,
    aim: Aim,
    make: Callable[[], str],
    strike: Callable[[str], None],
    *,
    visible: bool,
) -> Iterator[None]:
    """Makes memory, derives from it, strikes in the phase that is asked for.

    Args:
        make: emits what makes the memory, returns its name.
        strike: emits the attack on the memory of that name.
        visible: the write moves the version of what autograd saved, which then must not be the memory itself.
    """
    leaf = leaf_for(b, aim)
    with making_steps(b, aim):
        m = make()
    yield
    first = aim.phase is Phase.FORWARD and b.chance(0.5)
    with making_steps(b, aim):
        if first:
            strike(m)
        h = derive(b, m, leaf, saves=first or not visible)
    yield
    if first:
        b.join(h)
        yield
        return
    if aim.phase is Phase.FORWARD:
        b.join(b.make("{0} * 1.1", h))
        yield
        strike(m)
    elif aim.phase is Phase.BETWEEN:
        b.join(h)
        with b.into(Phase.BETWEEN):
            strike(m)
    elif aim.phase is Phase.BACKWARD:
        z = b.make("{0} * 1.1", h)
        with b.hook(z):
            strike(m)
        b.sink(z)
    else:
        with making_steps(b, aim):
            finish_late(b, h)
            with b.into(Phase.AFTER):
                strike(m)
    yield


def making(b: Builder, aim: Aim, make: Callable[[str], str], loss: bool = True) -> Iterator[None]:
    """Makes a square in the phase that is asked for, by `make(leaf)`, and asks for its gradient later."""
    leaf = leaf_for(b, aim)
    if aim.phase is Phase.FORWARD:
        yield
        b.join(make(leaf))
    elif aim.phase is Phase.BETWEEN:
        yield
        with b.into(Phase.BETWEEN):
            s = b.make("({0} * 0.01).sum()", make(leaf), prefix="l")
        with b.into(Phase.BACKWARD):
            b.call("{0}.backward()", s)
    elif aim.phase is Phase.BACKWARD:
        z = b.make("{0} * 1.1", b.any_square())
        s = b.fresh("l")
        with b.hook(z):
            with b.block("with torch.enable_grad():\n    {body}"):
                h = make(leaf)
                b.emit(Kind.MAKE, "{o} = ({0} * 0.01).sum()", h, out=(s,))
        b.sink(z)
        b.at_the_end(lambda: b.call("{0}.backward()", s))
    else:
        with making_steps(b, aim), b.into(Phase.AFTER):
            finish_late(b, make(leaf))
    yield
