"""Attacks on the order of things: exceptions, signals, several backwards, leaving in the middle, writes in backward."""

from __future__ import annotations

from collections.abc import Iterator

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
from scripts.programs.fillers import BINARY, UNARY
from scripts.programs.program import Kind, Phase


def saved_written(b: Builder, aim: Aim) -> Iterator[None]:
    """A function that writes to what it saved, in its backward, while others have saved the same.

    Ordinarily autograd raises where the write moved the version of what another node saved; past the counter, the
    other node computes with what was written.
    """
    quiet = b.chance(0.4)
    function = "WritesSavedData" if quiet else "WritesSaved"
    leaf = leaf_for(b, aim)
    # A step that raises ends there, so it does so once.
    steps = None if quiet else (b.rng.randrange(b.steps),)
    yield
    with b.only(b.even_steps if aim.phase is Phase.AFTER else steps):
        x = b.make(b.pick(("{0} * 1.0", "{0}.tanh()", "{0} + 0.1")), leaf, prefix="y")
        other = b.make(b.pick(("{0}.sin()", "{0} * {0}", "{0}.square()", "{0}.cos()")), x)
        written = b.fresh("h")
        factor = b.number()
        code = f"{{o}} = {function}.apply({{0}}, {factor})"
        b.emit(Kind.MAKE, code, x, out=(written,))
        z = b.make("{0} + {1}", other, written)
        loss = b.make("({0} * 0.01).sum()", z, prefix="l")
        twice = quiet or b.chance(0.5)
        with b.into(aim.phase):
            code = "{0}.backward(retain_graph=True)\n{0}.backward()" if twice else "{0}.backward()"
            b.strike(Kind.CALL, code, loss, fault=aim.fault, on=(x,))
    yield


# ------------------------------------------------------------------------------------ exceptions

CAUGHT = (
    "try:\n    {body}\n    raise_planned()\nexcept Planned:\n    pass",
    "try:\n    {body}\n    torch.mm({0}, {0}[:5])\nexcept RuntimeError:\n    pass",
    "try:\n    {body}\n    pair = torch.ones(32, 32), torch.ones(3, 5)\n"
    "    torch._foreach_add_([torch.ones(32, 32), {0}.detach()], pair)\nexcept RuntimeError:\n    pass",
    "try:\n    {body}\n    torch.empty(1 << 60)\nexcept RuntimeError:\n    pass",
    "try:\n    {body}\n    {0}.view(7, 7)\nexcept RuntimeError:\n    pass",
    "try:\n    {body}\n    with torch.no_grad():\n        raise_planned()\nexcept Planned:\n    pass",
    "try:\n    {body}\n    torch.linalg.cholesky(-torch.eye(32) + 0 * {0}.detach())\nexcept RuntimeError:\n    pass",
    "try:\n    {body}\n    F.embedding(torch.tensor([99]), {0})\nexcept (IndexError, RuntimeError):\n    pass",
    "try:\n    {body}\n    torch.add({0}, 1, out={0})\nexcept RuntimeError:\n    pass",
)


def exception(b: Builder, aim: Aim) -> Iterator[None]:
    """Something raises: caught where it is, or out of the step, out of a hook, out of backward."""
    leaf = leaf_for(b, aim)
    caught = b.chance(0.55)
    once = (b.rng.randrange(b.steps),)
    yield
    with making_steps(b, aim):
        y = b.make(b.pick(BINARY[:6]), b.make("{0} * 1.0", leaf, prefix="x"), leaf, prefix="y")
        h = b.make(b.pick(USES), y)
        if aim.phase is Phase.AFTER:
            finish_late(b, h)
        else:
            b.join(h)
    yield

    def raise_here() -> None:
        attack = b.moment(aim.fault, y)
        if caught:
            with b.block(b.pick(CAUGHT), leaf, attack=attack):
                inner = b.make(b.pick(UNARY), leaf)
                if b.chance(0.4) and aim.phase is not Phase.BACKWARD:
                    b.call("({0} * 0.01).sum().backward()", inner)
        else:
            with b.only(once):
                b.emit(Kind.CALL, "raise_planned()", attack=attack)

    if aim.phase is Phase.FORWARD:
        raise_here()
    elif aim.phase is Phase.BACKWARD:
        z = b.make("{0} * 1.1", h)
        kind = b.rng.randrange(3)
        if kind == 0 and not caught:
            which = f"step == {once[0]}"
            last = b.fresh("h")
            code = f"{{o}} = RaisesInBackward.apply({{0}}, {which})"
            b.emit(Kind.MAKE, code, z, out=(last,), attack=b.moment(aim.fault, y))
            b.sink(last)
        else:
            with b.hook(z):
                raise_here()
            b.sink(z)
    else:
        with making_steps(b, aim), b.into(aim.phase):
            raise_here()
    yield


def interrupt(b: Builder, aim: Aim) -> Iterator[None]:
    """A signal arrives somewhere in a step, which is then run again."""
    del aim
    yield
    for step in range(b.steps):
        if step == 0 or b.chance(0.5):
            b.interrupts[step] = b.pick((0.0001, 0.0003, 0.001, 0.003, 0.006)) * b.rng.uniform(
                0.5, 2
            )
    for _ in range(2):
        b.square(b.pick(UNARY), b.any_square())


# ------------------------------------------------------------------------------------ leaves, lists


def leaf_attribute(b: Builder, aim: Aim) -> Iterator[None]:
    """A function whose backward uses an attribute of a leaf that it saved."""

    def make(leaf: str) -> str:
        if b.chance(0.6):
            code, key = "AddsToMain.apply({0}, {1}) * 0.2", f"{leaf}.main_grad"
            value = "torch.zeros(32, 32)"
        else:
            code, key, value = "ReadsAttribute.apply({0}, {1})", f"{leaf}.scale", b.number()
        if key not in b.attributes:
            b.attributes.add(key)
            with b.only(None), b.into(Phase.PREPARE):
                b.call(f"{{0}}.{key.split('.')[1]} = {value}", leaf)
            if "main_grad" in key:
                with b.only(None), b.into(Phase.AFTER):
                    b.call("note('main_grad', {0}.main_grad)", leaf)
        x = b.make("{0}.detach().tanh() * {1}", b.any_square(), b.side_leaf(), prefix="x")
        y = b.fresh("y")
        b.emit(Kind.MAKE, "{o} = " + code, x, leaf, out=(y,), attack=b.moment(aim.fault, x))
        return b.make(b.pick(USES), y)

    yield from making(b, aim, make)


LISTS = (
    "torch.stack([row * 0.5 for row in {0}.unbind(0)] * 2)[:32]",
    "torch.cat([{0}[:1] * 1.0] * 700)[:32]",
    "torch.stack(torch._foreach_mul(list({0}.unbind(0)), 0.5))",
    "torch.stack(torch._foreach_addcmul(list({0}.unbind(0)), list({0}.unbind(1)), list({0}.unbind(0))))",
    "torch.cat([piece.sin() for piece in {0}.split(1)])",
    "torch.block_diag(*[{0}[i : i + 4, i : i + 4] for i in range(0, 32, 4)]) + {0}",
    "torch.cartesian_prod({0}[0], {0}[1]).view(-1)[:1024].view(32, 32)",
)
LONG_LISTS = (
    "torch.cat([{0}[0]] * 33000)[:1024].view(32, 32) * 1.0",
    "torch.stack([{0}[0, 0]] * 33000)[:1024].view(32, 32) + {0}",
)
HALF_WAY = (
    "try:\n    torch._foreach_add_([{0}, {0}[:5]], [{1}, {1}])\nexcept RuntimeError:\n    pass",
    "try:\n    torch._foreach_mul_([{0}, {1}[:3]], [{1}, {1}])\nexcept RuntimeError:\n    pass",
    "try:\n    torch._foreach_lerp_([{0}, {0}], [{1}, {1}[:5]], 0.3)\nexcept RuntimeError:\n    pass",
    "try:\n    torch._foreach_copy_([{0}, {0}[:5]], [{1}, {1}[:4]])\nexcept RuntimeError:\n    pass",
)


def list_op(b: Builder, aim: Aim) -> Iterator[None]:
    """Ops on lists of tensors: many of them, or one that fails when a part is done."""
    kind = b.rng.random()

    def make(leaf: str) -> str:
        x = b.make("{0} * 1.0", leaf, prefix="x")
        y = b.fresh("y")
        if kind < 0.45:
            code = "{o} = " + b.pick(LISTS)
        elif kind < 0.48:  # long: once in a program
            code = (
                "{o} = "
                + b.pick(LONG_LISTS)
                + f" if step == {b.rng.randrange(b.steps)} else {{0}} * 0.5"
            )
        else:
            m = b.make(b.pick(("{0}.detach() * 0.5", "torch.ones(32, 32) * 1.0")), leaf, prefix="m")
            other = b.make("{0}.detach().tanh()", leaf, prefix="m")
            b.emit(Kind.WRITE, b.pick(HALF_WAY), m, other, attack=b.moment(aim.fault, m))
            return b.make(b.pick(USES), b.make("{0} * {1}", m, x, prefix="y"))
        b.emit(Kind.MAKE, code, x, out=(y,), attack=b.moment(aim.fault, y))
        return b.make(b.pick(USES), y)

    yield from making(b, aim, make)


# ------------------------------------------------------------------------------------ backwards

SEVERAL = (
    "{0}.backward(retain_graph=True)\n{0}.backward()",
    "{0}.backward(retain_graph=True)\n{0}.backward(retain_graph=True)\n{0}.backward()",
    "{0}.backward(create_graph=True)",
    "{o} = torch.autograd.grad({0}, {1}, create_graph=True)[0]\n({o}.square().sum() + {0}).backward()",
    "{o} = torch.autograd.grad({0}, {1}, create_graph=True)[0]\n"
    "{o} = torch.autograd.grad({o}.tanh().sum(), {1}, create_graph=True)[0]\n"
    "{o}.square().sum().backward()",
    "{0}.backward(retain_graph=True, create_graph=True)\n{1}.grad.square().sum().backward()\n"
    "{1}.grad = {1}.grad.detach()",
    "{o} = torch.autograd.grad({0}, {1}, retain_graph=True)[0]\n{0}.backward()\nnote('gradient', {o})",
    "{o} = torch.autograd.grad({0}, {1})[0]\n{1}.grad = {o} if {1}.grad is None else {1}.grad + {o}",
    "with torch.no_grad():\n    {0}.backward(retain_graph=True)\n{0}.backward()",
    "try:\n    {0}.backward()\n    {0}.backward()\nexcept RuntimeError:\n    pass",
    "{o} = torch.autograd.grad({0}, {1}, torch.tensor(0.5), retain_graph=True)[0]\n"
    "{0}.backward(inputs=[{1}])\nnote('gradient', {o})",
    "torch.autograd.backward([{0}, {0} * 2])",
)


def several_backwards(b: Builder, aim: Aim) -> Iterator[None]:
    """Backwards of one graph: several, differentiable, of parts."""
    leaf = leaf_for(b, aim)
    yield
    with making_steps(b, aim):
        y = b.make(b.pick(BINARY[:5]), b.make("{0}.tanh()", leaf, prefix="x"), leaf, prefix="y")
        y = b.make(
            b.pick(
                ("{0}.sin()", "{0}.tanh()", "{0} * {0}", "{0}.sigmoid()", "{0}.exp().clamp(max=2)")
            ),
            y,
            prefix="y",
        )
        y = b.make(b.pick(("{0}.sin()", "{0} @ {0} * 0.1", "{0} * {0}")), y, prefix="y")
        loss = b.make("({0} * 0.05).sum()", y, prefix="l")
        if aim.phase is not Phase.AFTER:
            yield
        code = b.pick(SEVERAL)
        with b.into(aim.phase):
            out = (b.fresh("g"),) if "{o}" in code else ()
            b.emit(Kind.CALL, code, loss, leaf, out=out, attack=b.moment(aim.fault, y))
    yield


# ------------------------------------------------------------------------------------ leaving

LEAVE = (
    "with delta.disable():\n    {body}",
    "with delta.disable():\n    with delta.disable():\n        {body}",
    "with delta.disable():\n    torch.func.grad(lambda v: v.sin().sum())(torch.ones(32, 32))\n    {body}",
)


def left_elsewhere(b: Builder, aim: Aim) -> Iterator[None]:
    """The runtime is disabled around a backward, or closed in the middle, by this thread or another one."""
    leaf = leaf_for(b, aim)
    yield
    with making_steps(b, aim):
        y = b.make(b.pick(BINARY[:5]), b.make("{0}.tanh()", leaf, prefix="x"), leaf, prefix="y")
        h = b.make(b.pick(USES), y)
        loss = b.make("({0} * 0.01).sum()", h, prefix="l")
        if aim.phase is not Phase.AFTER:
            yield
        closing = b.chance(0.25)
        with b.into(aim.phase):
            attack = b.moment(aim.fault, y)
            if not closing:
                with b.block(b.pick(LEAVE), attack=attack):
                    b.call("{0}.backward()", loss)
            else:
                last = b.steps - 1
                code = (
                    "close_runtimes(MANAGEMENT)"
                    if b.chance(0.5)
                    else "Job(close_runtimes, MANAGEMENT).wait()"
                )
                if b.when is None or last in b.when:
                    with b.only((last,)):
                        b.emit(Kind.CALL, code, attack=attack)
                b.call("{0}.backward()", loss)
    yield


def python_random(b: Builder, aim: Aim) -> Iterator[None]:
    """Numbers of Python's and of numpy's generators are drawn, and must not depend on a runtime being there."""
    yield
    code = b.pick(
        (
            "note('number', random.random())",
            "note('number', [random.gauss(0, 1), random.randrange(10)])",
            "note('number', np.random.rand(3))",
            "note('number', random.sample(range(100), 5))",
        )
    )
    if aim.phase is Phase.BACKWARD:
        z = b.make("{0} * 1.1", b.any_square())
        with b.hook(z):
            b.emit(Kind.CALL, code, attack=b.moment(aim.fault))
        b.sink(z)
    else:
        with b.into(aim.phase):
            b.emit(Kind.CALL, code, attack=b.moment(aim.fault))
    yield


ATTACKS: dict[Fault, Attacker] = {
    Fault.SAVED_WRITTEN: saved_written,
    Fault.EXCEPTION: exception,
    Fault.INTERRUPT: interrupt,
    Fault.LEAF_ATTRIBUTE: leaf_attribute,
    Fault.LIST_OP: list_op,
    Fault.SEVERAL_BACKWARDS: several_backwards,
    Fault.LEFT_ELSEWHERE: left_elsewhere,
    Fault.PYTHON_RANDOM: python_random,
}
