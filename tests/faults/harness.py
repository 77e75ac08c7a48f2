"""Runs a small program ordinarily and under a mode of eviction, and says what became of it.

A program is a function that makes leaves and models and returns its step; a step takes its number and returns what must
not change: losses, gradients, buffers. The harness adds the state of every generator, of torch, numpy and `random`.
There are four outcomes: the same bits (after something was rebuilt or copied back), kept (the same bits, nothing ever
left), loud (an error where the ordinary run has none), and silent (other bits, or no error where the ordinary run has
one). Silent is never legal. Loud is legal only where a test says so, and the steps after it must go on as ordinary.
"""

from __future__ import annotations

import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

import delta_runtime as delta
import delta_runtime.runtime  # noqa: F401  what is imported with it may draw; test_python_random.py looks at that
from delta_runtime.core.errors import DeltaError
from tests.support.bitwise import FrozenTensor, Snapshot, difference, freeze
from tests.support.managed import Probe, live_bytes, managed, measured

N = 128
"""Side of the square matrices of the programs: each is far above the least size that is managed."""

Results = Sequence[Tensor | None] | Mapping[str, Tensor | None]
Step = Callable[[int], Results]
Program = Callable[[], Step]
Around = Callable[[], AbstractContextManager[object]]

DROPPING = ("drop_all", "random")
EVERY_WAY = ("drop_all", "random", "swap_all", "mix", "budget")
_SEEDS = {"random": (1, 2), "mix": (1, 2)}

by_dropping = pytest.mark.parametrize("mode", DROPPING)
in_every_way = pytest.mark.parametrize("mode", EVERY_WAY)


@dataclass(frozen=True, slots=True)
class Same:
    """The ordinary bits, and `rebuilt` values went and came back."""

    rebuilt: int

    def __str__(self) -> str:
        return f"the same bits; {self.rebuilt} values went and came back"


@dataclass(frozen=True, slots=True)
class Kept:
    """The ordinary bits, and nothing ever left."""

    def __str__(self) -> str:
        return "the same bits, because nothing ever left"


@dataclass(frozen=True, slots=True)
class Loud:
    """An error where the ordinary run has none."""

    told: str
    steps: tuple[int, ...]
    """Numbers of the steps that raised."""
    last: int
    """Number of the last step of the run."""

    def __str__(self) -> str:
        return f"steps {list(self.steps)} raised, and no ordinary one did: {self.told}"


@dataclass(frozen=True, slots=True)
class Silent:
    """Other bits, or no error where the ordinary run has one."""

    found: str

    def __str__(self) -> str:
        return f"SILENTLY WRONG: {self.found}"


Outcome = Same | Kept | Loud | Silent


@dataclass(frozen=True, slots=True)
class _StepRecord:
    before: _RandomStates
    left: Snapshot
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _RandomStates:
    torch_state: FrozenTensor
    numpy_state: bytes
    python_state: bytes

    @staticmethod
    def now() -> _RandomStates:
        return _RandomStates(
            freeze(torch.get_rng_state()),
            pickle.dumps(np.random.get_state()),
            pickle.dumps(random.getstate()),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch_state.tensor())
        np.random.set_state(pickle.loads(self.numpy_state))
        random.setstate(pickle.loads(self.python_state))

    def snapshot(self) -> Snapshot:
        def as_bytes(content: bytes) -> FrozenTensor:
            return FrozenTensor(torch.uint8, (len(content),), content)

        return {
            "random state of torch": self.torch_state,
            "random state of numpy": as_bytes(self.numpy_state),
            "random state of python": as_bytes(self.python_state),
        }


@dataclass(slots=True)
class _Run:
    steps: list[_StepRecord] = field(default_factory=list)
    probe: Probe = field(default_factory=Probe)
    peak_bytes: int = 0
    base_bytes: int = 0


def _one_step(step: Step, k: int) -> _StepRecord:
    """Runs one step and freezes what it returns; nothing of it is alive afterwards."""
    before = _RandomStates.now()
    left: Snapshot = {}
    error: Exception | None = None
    try:
        results = step(k)
        named = (
            results
            if isinstance(results, Mapping)
            else {f"result {i}": r for i, r in enumerate(results)}
        )
        left = {name: None if t is None else freeze(t) for name, t in named.items()}
    except (RuntimeError, DeltaError) as caught:
        # With its traceback it would hold the frames of the step, and their tensors.
        error = caught.with_traceback(None)
        error.__context__ = error.__cause__ = None
    return _StepRecord(before, left | _RandomStates.now().snapshot(), error)


@contextmanager
def _entered(mode: str, seed: int, budget_bytes: int | None) -> Iterator[Probe]:
    if mode not in ("off", "compared"):
        with managed(mode, seed=seed, budget_bytes=budget_bytes) as probe:
            yield probe
        return
    probe = Probe()
    runtime = (
        delta.Runtime("100%", device="cpu", policy="off")
        if mode == "off"
        else delta.Runtime(
            "100%", device="cpu", policy="stress_drop_all", min_bytes=0, verify="always"
        )
    )
    try:
        with runtime:
            yield probe
    finally:
        probe.rebuilt = runtime.report().totals.rebuilds
        runtime.close()


def _run(
    program: Program,
    mode: str,
    n_steps: int,
    seed: int = 0,
    expected: _Run | None = None,
    budget_bytes: int | None = None,
    around: Around = nullcontext,
) -> _Run:
    run = _Run(base_bytes=live_bytes())
    with measured() as peak, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(42)
        np.random.seed(42)
        random.seed(42)
        step = program()
        with around(), _entered(mode, seed, budget_bytes) as probe:
            for k in range(n_steps):
                record = _one_step(step, k)
                run.steps.append(record)
                if record.error is not None and expected is not None and k + 1 < n_steps:
                    expected.steps[k + 1].before.restore()
        del step
    run.probe = probe
    run.peak_bytes = peak.peak_bytes
    return run


def _first_silent(run: _Run, expected: _Run) -> str:
    """What differs first from the ordinary run in the steps that did not raise, or ""."""
    for k, (got, wanted) in enumerate(zip(run.steps, expected.steps, strict=True)):
        if wanted.error is not None:
            if got.error is None:
                return f"step {k}: no error where the ordinary run raises {wanted.error!r}"
            continue
        if got.error is None:
            found = difference(got.left, wanted.left)
            if found:
                return f"step {k}: {found}"
    return ""


def _judged(run: _Run, expected: _Run) -> Outcome:
    silent = _first_silent(run, expected)
    loud = [
        (k, got.error)
        for k, (got, wanted) in enumerate(zip(run.steps, expected.steps, strict=True))
        if got.error is not None and wanted.error is None
    ]
    if silent:
        before = f" (steps {[k for k, _ in loud]} raised: {loud[0][1]})" if loud else ""
        return Silent(silent + before)
    if loud:
        first = loud[0][1]
        return Loud(
            f"{type(first).__name__}: {first}", tuple(k for k, _ in loud), len(run.steps) - 1
        )
    return Same(run.probe.rebuilt) if run.probe.rebuilt else Kept()


def outcome(
    program: Program, mode: str, *, steps: int = 3, seed: int = 0, around: Around = nullcontext
) -> Outcome:
    """Runs `program` ordinarily twice, then managed, and compares.

    Args:
        program: see the module's docstring.
        mode: of `tests.support.managed`; "budget" for three quarters of what the ordinary run needs; "off" for a
            runtime whose policy evicts nothing; "compared" for one that drops everything and compares each rebuild.
        steps: how often the step is run.
        seed: of modes "random" and "mix".
        around: entered before the runtime.

    Raises:
        AssertionError: the ordinary run does not repeat itself, so that nothing can be compared.
    """
    return _outcome(program, mode, _ordinary(program, steps, around), seed, around)


def _ordinary(program: Program, steps: int, around: Around) -> _Run:
    expected = _run(program, "ordinary", steps, around=around)
    again = _run(program, "ordinary", steps, expected=expected, around=around)
    repeated = _judged(again, expected)
    assert isinstance(repeated, Kept), f"the ordinary run does not repeat itself: {repeated}"
    return expected


def _outcome(program: Program, mode: str, expected: _Run, seed: int, around: Around) -> Outcome:
    budget_bytes = None
    if mode == "budget":
        budget_bytes = expected.base_bytes + 3 * (expected.peak_bytes - expected.base_bytes) // 4
    run = _run(program, mode, len(expected.steps), seed, expected, budget_bytes, around)
    return _judged(run, expected)


def check(
    program: Program,
    mode: str,
    *,
    steps: int = 3,
    may_be_loud: bool = False,
    may_be_kept: bool = False,
    raises: bool = False,
    around: Around = nullcontext,
) -> None:
    """Asserts that the outcome is a legal one, for every seed of the mode.

    Args:
        program: see the module's docstring.
        mode: see `outcome`.
        steps: how often the step is run.
        may_be_loud: nothing but an error is possible where a value has gone already. It must come from this runtime,
            and where everything is dropped at once the last step must be past it.
        may_be_kept: keeping all that the program saves is the only right outcome; else something must have gone.
        raises: the ordinary run raises, and so must the managed one.
        around: entered before the runtime.
    """
    expected = _ordinary(program, steps, around)
    errors = [record.error for record in expected.steps if record.error is not None]
    assert bool(errors) == raises, f"the ordinary run: {errors[0] if errors else 'no error'}"
    for seed in _SEEDS.get(mode, (0,)):
        found = _outcome(program, mode, expected, seed, around)
        told = f"{mode}, seed {seed}: {found}"
        assert not isinstance(found, Silent), told
        if isinstance(found, Loud):
            assert may_be_loud, told
            assert "delta_runtime" in found.told or "RecomputeMismatch" in found.told, told
            if mode == "drop_all":
                assert found.last not in found.steps, f"the last step is not past it: {told}"
        elif isinstance(found, Kept) and mode in (
            "drop_all",
            "compared",
        ):  # the other modes need luck for it
            assert may_be_kept, f"nothing was rebuilt, so nothing was tested: {told}"


# ------------------------------------------------------------------------------------------ parts of programs


def leaf(*sizes: int, seed: int = 0) -> Tensor:
    """A leaf with fixed content, whatever the state of the global generator."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*sizes, generator=generator) * 0.1).requires_grad_()


def constant(*sizes: int, seed: int = 100) -> Tensor:
    return leaf(*sizes, seed=seed).detach()


def sources(n: int, *sizes: int) -> list[Tensor]:
    """Tables for `n` steps. Call it where the program is built: what a step makes itself has a recipe."""
    return [constant(*sizes, seed=1000 + k) for k in range(n)]


def boundary() -> None:
    """An op, before which something can be evicted."""
    torch.zeros(1).add(1.0)


def taken(*leaves: Tensor) -> list[Tensor]:
    """The gradients of leaves, which are let go of them."""
    gradients = []
    for each in leaves:
        assert each.grad is not None, "a leaf of the program has no gradient"
        gradients.append(each.grad)
        each.grad = None
    return gradients


@contextmanager
def threads_running(*bodies: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs each body in a thread of its own for the duration of the block; each must end when its event is set.

    Raises:
        Exception: the first that a body raised.
    """
    stop = threading.Event()
    errors: list[Exception] = []

    def run(body: Callable[[threading.Event], None]) -> None:
        try:
            body(stop)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def in_thread(body: Callable[[], None]) -> None:
    """Runs `body` on a thread of its own and waits for it; an error in it is raised here."""
    with threads_running(lambda _: body()):
        pass
