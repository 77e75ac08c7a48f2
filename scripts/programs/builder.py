"""Puts the instructions of a program together while it is made.

Most values are *squares*: float32, 32 x 32, which is 4 KiB, the size from which on storages are managed by default. The
builder knows the squares that can be used now (the pool), the leaves, and what is needed only once in a program.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from scripts.programs.faults import Fault
from scripts.programs.program import Attack, Instruction, Kind, Phase, Program

SIDE = 32
T = TypeVar("T")


class Builder:
    """Collects the instructions of one program.

    Args:
        rng: where all choices come from.
        steps: number of steps of the program.

    Attributes:
        pool: squares that depend on a leaf and can be used now.
        leaves, other_leaves: squares, and other shapes, that the optimizer updates.
        calm: nothing that a signal leaves half done: no contexts of torch's, which do not bear that.
        sinks: squares that the loss has to depend on.
    """

    def __init__(self, rng: random.Random, steps: int) -> None:
        self.rng = rng
        self.steps = steps
        self.phases: dict[Phase, list[Instruction]] = {phase: [] for phase in Phase}
        self.pool: list[str] = []
        self.leaves: list[str] = []
        self.other_leaves: list[str] = []
        self.side_leaves: list[str] = []
        self.lasting: set[str] = set()
        self.held: set[str] = set()
        self.sinks: list[str] = []
        self.closing: list[Callable[[], None]] = []
        self.attributes: set[str] = set()
        self.calm = False
        self.interrupts: dict[int, float] = {}
        self.group = -1
        self.when: tuple[int, ...] | None = None
        self._into = self.phases[Phase.FORWARD]
        self._phase = Phase.FORWARD
        self._once: dict[str, str] = {}
        self._count = 0

    # ------------------------------------------------------------------ chance

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        """One of them."""
        return self.rng.choice(choices)

    def number(self, low: float = 0.3, high: float = 1.7) -> str:
        """A number as source."""
        return f"{self.rng.uniform(low, high):.3f}"

    @property
    def even_steps(self) -> tuple[int, ...]:
        return tuple(range(0, self.steps, 2))

    @property
    def odd_steps(self) -> tuple[int, ...]:
        return tuple(range(1, self.steps, 2))

    # ------------------------------------------------------------------ emitting

    def fresh(self, prefix: str) -> str:
        """A name that nothing else has."""
        self._count += 1
        return f"{prefix}{self._count}"

    def emit(
        self,
        kind: Kind,
        code: str,
        *args: str,
        out: Sequence[str] = (),
        body: Sequence[Instruction] = (),
        attack: Attack | None = None,
    ) -> None:
        """Adds an instruction where the builder stands."""
        self._into.append(
            Instruction(
                kind,
                code,
                out=tuple(out),
                args=args,
                body=tuple(body),
                when=self.when,
                group=self.group,
                attack=attack,
            )
        )

    def make(self, expression: str, *args: str, prefix: str = "h") -> str:
        """Assigns an expression to a new name."""
        name = self.fresh(prefix)
        self.emit(Kind.MAKE, "{o} = " + expression, *args, out=(name,))
        return name

    def make_two(self, expression: str, *args: str, prefix: str = "h") -> tuple[str, str]:
        """Assigns an expression to two new names."""
        names = self.fresh(prefix), self.fresh(prefix)
        self.emit(Kind.MAKE, "{o}, {p} = " + expression, *args, out=names)
        return names

    def view(self, expression: str, *args: str, prefix: str = "v") -> str:
        """Assigns an alias of the first argument to a new name."""
        name = self.fresh(prefix)
        self.emit(Kind.VIEW, "{o} = " + expression, *args, out=(name,))
        return name

    def write(self, code: str, *args: str) -> None:
        """Writes to the first argument."""
        self.emit(Kind.WRITE, code, *args)

    def call(self, code: str, *args: str) -> None:
        """Does anything else."""
        self.emit(Kind.CALL, code, *args)

    def sink(self, name: str) -> None:
        """A square that the loss has to depend on."""
        self.sinks.append(name)

    def at_the_end(self, emit: Callable[[], None]) -> None:
        """Has this called when the backward of the step's loss has been emitted."""
        group, when = self.group, self.when

        def later() -> None:
            before, self.group = self.group, group
            with self.only(when), self.into(Phase.BACKWARD):
                emit()
            self.group = before

        self.closing.append(later)

    def join(self, name: str) -> str:
        """Lets the rest of the program use a square."""
        self.pool.append(name)
        return name

    def square(self, expression: str, *args: str) -> str:
        """A new square for the pool."""
        return self.join(self.make(expression, *args))

    @contextlib.contextmanager
    def block(
        self,
        code: str,
        *args: str,
        kind: Kind = Kind.BLOCK,
        out: Sequence[str] = (),
        attack: Attack | None = None,
    ) -> Iterator[None]:
        """What is emitted inside becomes the body of an instruction."""
        outer, body = self._into, []
        when, self.when = self.when, None
        self._into = body
        try:
            yield
        finally:
            self._into, self.when = outer, when
        self.emit(kind, code, *args, out=out, body=body, attack=attack)

    @contextlib.contextmanager
    def into(self, phase: Phase) -> Iterator[None]:
        """What is emitted inside goes to another phase."""
        outer, before = self._into, self._phase
        self._into, self._phase = self.phases[phase], phase
        try:
            yield
        finally:
            self._into, self._phase = outer, before

    @contextlib.contextmanager
    def hook(self, on: str) -> Iterator[None]:
        """What is emitted inside runs in backward, when it comes by this tensor."""
        code = "def hook_{i}(gradient):\n    {body}\n{0}.register_hook(hook_{i})"
        phase, self._phase = self._phase, Phase.BACKWARD
        try:
            with self.block(code, on, kind=Kind.HOOK):
                yield
        finally:
            self._phase = phase

    @contextlib.contextmanager
    def thread(self, attack: Attack | None = None) -> Iterator[str]:
        """What is emitted inside runs on another thread; yields the name of the job, which must be waited for."""
        job = self.fresh("job")
        code = "def on_thread_{i}():\n    {body}\n{o} = Job(on_thread_{i})"
        with self.block(code, kind=Kind.THREAD, out=(job,), attack=attack):
            yield job

    @contextlib.contextmanager
    def only(self, when: tuple[int, ...] | None) -> Iterator[None]:
        """What is emitted inside runs in these steps only."""
        before, self.when = self.when, when
        try:
            yield
        finally:
            self.when = before

    def strike(self, kind: Kind, code: str, *args: str, fault: Fault, on: Sequence[str]) -> None:
        """Emits the moment of a fault that endangers what `on` names."""
        self.emit(kind, code, *args, attack=Attack(fault, self._phase, tuple(on)))

    def moment(self, fault: Fault, *on: str) -> Attack:
        """The same for instructions that are emitted by other means."""
        return Attack(fault, self._phase, on)

    # ------------------------------------------------------------------ what programs have

    def once(self, key: str, expression: str, prefix: str = "c") -> str:
        """A name that `prepare` assigns, the same each time that it is asked for."""
        if key not in self._once:
            self._once[key] = self.prepared(expression, prefix)
        return self._once[key]

    def prepared(self, expression: str, prefix: str = "c", *args: str) -> str:
        """A new name that `prepare` assigns."""
        name = self.fresh(prefix)
        with self.only(None), self.into(Phase.PREPARE):
            self.emit(Kind.MAKE, "{o} = " + expression, *args, out=(name,))
        return name

    def leaf(self) -> str:
        """A parameter that the optimizer updates."""
        if len(self.leaves) < 2 or (len(self.leaves) < 4 and self.chance(0.2)):
            self.leaves.append(self._parameter("w"))
        return self.pick(self.leaves)

    def side_leaf(self) -> str:
        """A parameter that no optimizer updates, so that graphs over it outlive the step."""
        if not self.side_leaves or (len(self.side_leaves) < 2 and self.chance(0.3)):
            self.side_leaves.append(self._parameter("s"))
        return self.pick(self.side_leaves)

    def _parameter(self, prefix: str) -> str:
        group, self.group = self.group, -1
        name = self.prepared("torch.randn(32, 32).mul_(0.4).requires_grad_()", prefix)
        self.group = group
        return name

    def weight(self, key: str, shape: str, scale: float = 0.3) -> str:
        """A parameter of another shape, for one kind of layer."""
        key = f"weight {key} {shape}"
        if key not in self._once:
            group, self.group = self.group, -1
            self._once[key] = self.prepared(
                f"torch.randn({shape}).mul_({scale}).requires_grad_()", "w"
            )
            self.other_leaves.append(self._once[key])
            self.group = group
        return self._once[key]

    def batch(self) -> str:
        """Data of this step."""
        data = self.once("data", "[torch.randn(32, 32) for _ in range(STEPS)]", "data")
        return self.make("{0}[step]", data, prefix="x")

    def any_square(self) -> str:
        """A square that depends on a leaf, or a leaf."""
        if self.pool and self.chance(0.92):
            # Recent ones more often, so that programs are deep and not only wide.
            position = len(self.pool) - 1 - int(self.rng.expovariate(0.45))
            return self.pool[max(0, position)]
        return self.leaf()

    def finish(self, seed: int, micro: int) -> Program:
        """The program; family and settings are decided elsewhere."""
        return Program(
            seed=seed,
            steps=self.steps,
            micro=micro,
            phases={phase: tuple(tops) for phase, tops in self.phases.items()},
            lasting=frozenset(self.lasting),
            held=frozenset(self.held),
            interrupts=dict(self.interrupts),
        )
