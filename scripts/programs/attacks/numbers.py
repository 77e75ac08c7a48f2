"""Attacks on how numbers come about: modes, subclasses, flags, ops that change or draw numbers of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scripts.programs.attacks.common import (
    USES,
    Aim,
    Attacker,
    finish_late,
    leaf_for,
    making,
    making_steps,
)
from scripts.programs.builder import Builder
from scripts.programs.faults import Fault
from scripts.programs.program import Kind, Phase

MODES = (
    "RoundingMode('mm', 'mul', 'sin', 'tanh')",
    "RoundingMode('mm')",
    "ScalingMode(1.5, 'mm', 'sin', 'tanh')",
    "ScalingMode(0.5, 'mul', 'add')",
    "NoiseMode(step, 'mm', 'mul')",
    "NoiseMode(7, 'mul', 'add', 'sin')",
    "InsteadMode()",
    "NumpyMode()",
    "CountingMode()",
    "RoundingFunctionMode()",
    "OtherFunctionMode()",
)
MODE_MAKES = (
    "{0} @ {1}",
    "{0} * {1}",
    "({0} * {1}).sin()",
    "torch.mm({0}, {1}) * 0.3",
    "({0} + {1}).tanh()",
    "torch.matmul({0}.view(2, 16, 32), {1}).view(32, 32)",
)


def dispatch_mode(b: Builder, aim: Aim) -> Iterator[None]:
    """Ops that run under a mode which changes their results; or a mode around backward."""
    if aim.phase is Phase.BACKWARD and b.chance(0.5):
        leaf = b.leaf()
        y = b.make("{0} @ {1}", b.any_square(), leaf, prefix="y")
        h = b.make(b.pick(USES), y)
        loss = b.make("({0} * 0.01).sum()", h, prefix="l")
        yield
        with b.into(Phase.BACKWARD):
            attack = b.moment(aim.fault, y)
            with b.block(f"with {b.pick(MODES)}:\n    {{body}}", attack=attack):
                b.call("{0}.backward(retain_graph=True)", loss)
        return

    def make(leaf: str) -> str:
        x = leaf if b.chance(0.4) else b.make("{0}.detach() * 1.0", b.any_square(), prefix="x")
        y = b.fresh("y")
        attack = b.moment(aim.fault, y)
        with b.block(f"with {b.pick(MODES)}:\n    {{body}}", attack=attack):
            b.emit(Kind.MAKE, "{o} = " + b.pick(MODE_MAKES), x, leaf, out=(y,))
            if b.chance(0.3):
                b.emit(Kind.MAKE, "{o} = " + b.pick(MODE_MAKES[1:5]), y, leaf, out=(y,))
        return b.make(b.pick(USES), y)

    yield from making(b, aim, make)


SUBCLASSES = (
    "ScaledTensor({0}.detach())",
    "WrappedTensor({0}.detach())",
    "QuantizedTensor.of({0}.detach())",
)
SUBCLASS_USES = (
    "{0} @ {1}",
    "{0} * {1}",
    "torch.addmm({0}, {0}, {1})",
    "F.linear({0}, {1})",
    "torch.cat(({0}[:16] * 1.0, ({0} * {1})[16:]))",
    "torch.where({0} > 0, {0}, {0} * {1})",
    "torch.lerp({0}, {0} * {1}, 0.3)",
    "{0} + {1}",
    "{0}.clone().mul_({1})",
    "{0}.clone().add_({1})",
    "torch._foreach_mul([{0}], [{1}])[0]",
    "torch.stack(({0}, {0} * {1})).sum(0)",
)


def subclass_operand(b: Builder, aim: Aim) -> Iterator[None]:
    """Plain results of ops with an operand that is a subclass."""

    def make(leaf: str) -> str:
        source = b.any_square()
        weight = b.make(b.pick(SUBCLASSES), source, prefix="u")
        x = b.make("{0} * 1.0", leaf, prefix="x")
        y = b.fresh("y")
        b.emit(
            Kind.MAKE,
            "{o} = " + b.pick(SUBCLASS_USES),
            x,
            weight,
            out=(y,),
            attack=b.moment(aim.fault, y),
        )
        return b.make(b.pick(USES), y)

    yield from making(b, aim, make)


# ------------------------------------------------------------------------------------ flags


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that changes numbers.

    Args:
        on: source that sets it.
        off: source that puts it back.
        make: of a square, what comes out otherwise with it.
    """

    on: str
    off: str
    make: str


_CONV = "F.conv2d({0}.view(1, 4, 16, 16), torch.linspace(-1, 1, 400).view(4, 4, 5, 5), padding=2).view(32, 32) * 0.2"
_MKLDNN = ("torch._C._set_mkldnn_enabled(False)", "torch._C._set_mkldnn_enabled(True)")
_PRECISION = (
    "torch.set_float32_matmul_precision('medium')",
    "torch.set_float32_matmul_precision('highest')",
)
_DENORMAL = ("torch.set_flush_denormal(True)", "torch.set_flush_denormal(False)")
_DETERMINISTIC = (
    "torch.use_deterministic_algorithms(True)",
    "torch.use_deterministic_algorithms(False)",
)
_THREADS = ("torch.set_num_threads(2)", "torch.set_num_threads(1)")
_DTYPE = ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)")
_MATH = ("torch._C._set_sdp_use_flash(False)", "torch._C._set_sdp_use_flash(True)")

FLAGS = (
    Flag(*_MKLDNN, _CONV),
    Flag(*_MKLDNN, "F.gelu({0}.bfloat16()).float()"),
    Flag(*_PRECISION, "torch.mm({0}, {0}) * 0.1"),
    Flag(*_PRECISION, "F.linear({0}, {0}, {0}[0]) * 0.1"),
    Flag(*_PRECISION, "torch.addmm({0}, {0}, {0}) * 0.1"),
    Flag(
        *_PRECISION,
        "torch.bmm({0}.view(2, 16, 32), {0}.view(2, 32, 16)).view(16, 32).repeat(2, 1) * 0.1",
    ),
    Flag(*_DENORMAL, "(({0} * 1e-37) * 1e-3) * 1e20 * 1e20"),
    Flag(*_DENORMAL, "({0}.tanh() * 1e-39 + 1e-40) * 1e20 * 1e19"),
    Flag(*_DETERMINISTIC, "by_flags({0})"),
    Flag(*_DETERMINISTIC, "{0}.index_put((torch.arange(32) % 5,), {0}, accumulate=True)"),
    Flag(*_THREADS, "{0} * {0}.repeat(8, 8).sin().sum() * 1e-3"),
    Flag(*_DTYPE, "{0} + torch.linspace(0, 1, 1024).view(32, 32).float()"),
    Flag(*_DTYPE, "{0} * torch.ones(32, 32).div(3).float()"),
    Flag(*_MATH, "F.scaled_dot_product_attention(*({0}.view(1, 2, 16, 32),) * 3).view(32, 32)"),
)


def numeric_flag(b: Builder, aim: Aim) -> Iterator[None]:
    """A flag that has one value where a value is made and another where it would be made again."""
    flag = b.pick(FLAGS)
    leaf = leaf_for(b, aim)

    def victim() -> str:
        x = b.make("{0} * 1.0", leaf, prefix="x")
        return b.make(flag.make, x, prefix="y")

    def finish(y: str) -> str:
        return b.make(b.pick(("{0}.sin()", "{0}.tanh()", "{0} * {0}", "{0}.sigmoid()")), y)

    yield
    if aim.phase is Phase.FORWARD:
        if b.chance(0.5):  # made with it, made again without
            first, second = (flag.on, flag.off)
        else:
            first, second = ("", flag.on)
        y = b.fresh("y")
        x = b.make("{0} * 1.0", leaf, prefix="x")
        if first:
            b.strike(Kind.CALL, first, fault=aim.fault, on=(y,))
        b.emit(Kind.MAKE, "{o} = " + flag.make, x, out=(y,))
        h = finish(y)
        if first:
            b.call(second)
        else:
            b.strike(Kind.CALL, second, fault=aim.fault, on=(y,))
            with b.into(Phase.AFTER):
                b.call(flag.off)
        b.join(h)
    elif aim.phase is Phase.BETWEEN:
        y = victim()
        b.join(finish(y))
        with b.into(Phase.BETWEEN):
            b.strike(Kind.CALL, flag.on, fault=aim.fault, on=(y,))
        with b.into(Phase.AFTER):
            b.call(flag.off)
    elif aim.phase is Phase.BACKWARD:
        y = victim()
        z = b.make("{0} * 1.1", finish(y))
        with b.hook(z):
            b.strike(Kind.CALL, flag.on, fault=aim.fault, on=(y,))
        b.sink(z)
        with b.into(Phase.AFTER):
            b.call(flag.off)
    else:
        with making_steps(b, aim):
            y = victim()
            kept = finish_late(b, finish(y))
            with b.into(Phase.AFTER):
                b.strike(Kind.CALL, flag.on, fault=aim.fault, on=(y,))
        with b.only(b.odd_steps), b.into(Phase.BACKWARD):
            b.call(flag.off)
        del kept
    yield


# ------------------------------------------------------------------------------------ ops of their own

TURNING = (
    "turns_with_number({0}, step, {threshold})",
    "turns_with_value({0}.detach(), {1}, {threshold})",
    "turns_with_value({0}, {1}, {threshold})",
    "turns_python({0}.detach(), {1}, {threshold})",
)
"""Of a square and a counter; noise from a step on. A number among the arguments makes another recipe of each step; a
tensor's value does not."""


def op_changes(b: Builder, aim: Aim) -> Iterator[None]:
    """A custom op that repeats at first, and from some step on does not."""
    counter = b.prepared("torch.zeros(1)", "n")
    with b.into(Phase.AFTER):
        b.write("{0}.add_(1)", counter)
    threshold = b.pick((1, 2, 3, 4, 4, 5))  # everything is compared in the first steps
    code = b.pick(TURNING).replace("{threshold}", str(threshold))

    def make(leaf: str) -> str:
        x = b.make("{0} * 1.0", leaf, prefix="x")
        y = b.fresh("y")
        b.emit(Kind.MAKE, "{o} = " + code, x, counter, out=(y,), attack=b.moment(aim.fault, y))
        y = b.make(b.pick(("{0} * {1}", "{0} + {1}")), y, leaf, prefix="y")
        return b.make(b.pick(USES), y)

    yield from making(b, aim, make)


DRAWING = (
    "draws_numpy({0}.detach())",
    "draws_numpy({0})",
    "draws_python({0}.detach())",
    "draws_torch({0}.detach())",
    "draws_torch({0})",
)


def audit_draws(b: Builder, aim: Aim) -> Iterator[None]:
    """A custom op that draws numbers each time that it runs."""
    code = b.pick(DRAWING)

    def make(leaf: str) -> str:
        x = b.make("{0} * 1.0", leaf, prefix="x")
        y = b.fresh("y")
        b.emit(Kind.MAKE, "{o} = " + code, x, out=(y,), attack=b.moment(aim.fault, y))
        return b.make(b.pick(("{0} * {1}", "({0} + {1}).sin()", "{0}.sin() * {1}")), y, leaf)

    yield from making(b, aim, make)


ATTACKS: dict[Fault, Attacker] = {
    Fault.DISPATCH_MODE: dispatch_mode,
    Fault.SUBCLASS_OPERAND: subclass_operand,
    Fault.NUMERIC_FLAG: numeric_flag,
    Fault.OP_CHANGES: op_changes,
    Fault.AUDIT_DRAWS: audit_draws,
}
