"""Attacks by compiled parts and by C++, which read and write memory past the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.programs.attacks.common import USES, Aim, Attacker, making, writing
from scripts.programs.attacks.memory import OWN_COUNTERS
from scripts.programs.builder import Builder
from scripts.programs.faults import Fault
from scripts.programs.program import Kind

BACKENDS = ("eager", "aot_eager", "inductor")

MADE = (
    "compiled(compiled_chain, {backend})({0}, {1})",
    "compiled(compiled_layers, {backend})({0}, {1})",
    "compiled(compiled_dropout, {backend})({0})",
    "compiled(compiled_in_place, {backend})({0} * 1.0)",
    "compiled(compiled_two, {backend})({0}, {1})[0]",
    "compiled(compiled_batched, {backend})({0}, {1})",
)
"""Of a square and a leaf."""

WRITES = (
    "compiled(compiled_scale_, {backend})({0})",
    "compiled(compiled_fill_, {backend})({0})",
    "compiled(compiled_copy_, {backend})({0}, {0}.clone())",
)
MEMORY = (
    "torch.zeros(32, 32)",
    "torch.ones(32, 32)",
    "{0}.detach() * 0.5",
    "{0}.detach().clone()",
    "torch.rand(32, 32)",
)


def compiled(b: Builder, aim: Aim) -> Iterator[None]:
    """Values that compiled code makes, and memory that it writes."""
    backend = repr(b.pick(BACKENDS))
    if b.chance(0.5):
        code = "{o} = " + b.pick(MADE).replace("{backend}", backend)

        def make(leaf: str) -> str:
            x = b.make("{0} * 1.0", leaf, prefix="x")
            y = b.fresh("y")
            b.emit(Kind.MAKE, code, x, leaf, out=(y,), attack=b.moment(aim.fault, y))
            return b.make(b.pick(USES), y)

        yield from making(b, aim, make)
        return
    write = b.pick(WRITES).replace("{backend}", backend)

    def memory() -> str:
        if b.chance(0.5):
            x = b.make("{0}.detach() * 0.5", b.any_square(), prefix="x")
            return b.make(b.pick(OWN_COUNTERS), x, b.leaf(), prefix="m")
        return b.make(b.pick(MEMORY), b.any_square(), prefix="m")

    def strike(m: str) -> None:
        with b.block("with torch.no_grad():\n    {body}", attack=b.moment(aim.fault, m)):
            b.write(write, m)

    yield from writing(b, aim, memory, strike, visible=True)


NATIVE_MADE = (
    "native().ops.scaled({0}.detach(), 0.7) * {1}",
    "native().ops.filled({0}.detach()) * {1}",
    "native().ops.filled({0}.detach()) + {1}",
    "native().module.filled({0}.detach()) * {1}",
    "native().module.filled({0}.detach()) + {1}",
)
"""Of a square and a leaf."""

NATIVE_WRITES = (
    "native().ops.scale_named_({0}, 0.7)",
    "native().ops.scale_unnamed({0}, 0.7)",
    "native().module.scale_unnamed({0}, 0.7)",
)


def native_code(b: Builder, aim: Aim) -> Iterator[None]:
    """Ops in C++, and functions in C++ that write to memory by themselves."""
    if b.chance(0.5):

        def make(leaf: str) -> str:
            x = b.make("{0}.tanh()", leaf, prefix="x")
            y = b.fresh("y")
            code = "{o} = " + b.pick(NATIVE_MADE)
            b.emit(Kind.MAKE, code, x, leaf, out=(y,), attack=b.moment(aim.fault, y))
            return b.make(b.pick(USES), y)

        yield from making(b, aim, make)
        return

    def strike(m: str) -> None:
        b.strike(Kind.WRITE, b.pick(NATIVE_WRITES), m, fault=aim.fault, on=(m,))

    def memory() -> str:
        return b.make(b.pick(MEMORY), b.any_square(), prefix="m")

    yield from writing(b, aim, memory, strike, visible=True)


ATTACKS: dict[Fault, Attacker] = {Fault.COMPILED: compiled, Fault.NATIVE_CODE: native_code}
