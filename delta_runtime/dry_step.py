"""Records a training step without computing it, and says what it would come to on a card.

Covers `estimate`, and how a step is found in a function or a script. Ops that compute nothing are `record.dry_run`'s
concern, what a card makes of the record is `simulate.estimate`'s.

Note: what is recorded
  1. The runtime is entered at the first module's forward of a step: what is there by then persists (weights, a batch).
  2. An optimizer's state that comes to be in the step is taken for there before, as it is in all later ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer as optimizers

from delta_runtime import cpu_pool
from delta_runtime.core.errors import UsageError
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.units import parse_budget
from delta_runtime.extension import _C
from delta_runtime.measured_card import measured_card
from delta_runtime.record.dry_run import dry_run
from delta_runtime.runtime import Runtime
from delta_runtime.simulate.card import Card, load_card
from delta_runtime.simulate.estimate import Estimate, estimate_of
from delta_runtime.simulate.under_policy import check_policy

Budget = str | int | float
_WANTED_STEPS = 2  # of a script: the optimizer's state is there in the second


@dataclass(frozen=True, slots=True)
class DryStep:
    """A step that was recorded without computing it.

    Args:
        graph: its record; seconds are those that the dry step took, and mean nothing.
        optimizer_peak_bytes: highest live bytes while the optimizer stepped; 0 where none did.
    """

    graph: StepGraph
    optimizer_peak_bytes: int


class _Enough(BaseException):
    """As many steps of a script were seen as are needed: unwinds it. Nothing is to catch it."""


class _Watch:
    """Enters a runtime at the first forward, and looks at what optimizers need.

    Args:
        runtime: that records.
        enough: after so many steps of optimizers the program is unwound; 0: never.
    """

    def __init__(self, runtime: Runtime, enough: int = 0) -> None:
        self._runtime = runtime
        self._enough = enough
        self._entered = False
        self._steps: dict[int, int] = {}
        self._grown: dict[int, int] = {}
        self._before_bytes = 0
        self.optimizer_tick = 0
        """Of the step: its last op before the optimizer's."""
        self.optimizer_peak_bytes = 0
        self._states: list[tuple[Any, dict[Any, Any]]] = []
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._seen: set[int] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs meanwhile; the runtime is left at the end."""
        handles = [
            register_module_forward_pre_hook(self._at_forward),
            optimizers.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizers.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self._entered:
                self._runtime.__exit__(None, None, None)
            self._give_back()

    @property
    def new_state_bytes(self) -> int:
        """Bytes of optimizers' state that came to be in the last step."""
        return sum(self._grown.values())

    def _give_back(self) -> None:
        """Give optimizers the state that they had, and parameters their gradients: what came since is worth nothing."""
        for optimizer, state in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)
        for parameter, gradient in self._grads:
            parameter.grad = gradient

    def _at_forward(self, module: torch.nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self._grads.append((parameter, parameter.grad))
        if torch.is_grad_enabled() and not self._entered:
            self._runtime.__enter__()
            self._entered = True

    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        if id(optimizer) not in self._steps:
            self._steps[id(optimizer)] = 0
            self._states.append(
                (optimizer, {key: dict(each) for key, each in optimizer.state.items()})
            )
        if len(set(self._steps.values())) == 1:  # the first of its step
            session = self._runtime.session
            self.optimizer_tick = session.tick() - session.step_begin_tick()
        self._before_bytes = _C.cpu_pool.live_bytes()
        _C.cpu_pool.reset_peak()

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self.optimizer_peak_bytes = max(self.optimizer_peak_bytes, _C.cpu_pool.peak_bytes())
        self._grown[id(optimizer)] = max(0, _C.cpu_pool.live_bytes() - self._before_bytes)
        self._steps[id(optimizer)] += 1
        if self._enough and min(self._steps.values()) >= self._enough:
            raise _Enough


def record_dry_step(step: Callable[[], Any]) -> DryStep:
    """Record a training step without computing it.

    Args:
        step: trains one step; it is called twice, and the second step is recorded. Or it builds a model and an
            optimizer, and returns such a function. Tensors that it makes take no memory; others are not touched.

    Raises:
        NeedsValues: the step asks for a number that was not computed; the message names the line.
        UsageError: the step ran no forward and backward, or another runtime is entered.
    """
    with _dry():
        runtime, watch = _begin()
        with contextlib.closing(runtime), watch.watching():
            made = step()
        again = made if callable(made) else step
        runtime, watch = _begin()
        with contextlib.closing(runtime):
            with watch.watching():
                if callable(made):
                    again()
                again()
            return _recorded(runtime, watch)


def record_dry_script(run: Callable[[], None]) -> DryStep:
    """Record the second training step of a program without computing it; the program ends there.

    Args:
        run: runs the program.

    Raises:
        NeedsValues: the program asks for a number that was not computed; the message names the line.
        UsageError: no step was seen.
    """
    runtime, watch = _begin(_WANTED_STEPS)
    with contextlib.closing(runtime):
        try:
            with _dry(), watch.watching():
                run()
        except _Enough:
            pass
        except SystemExit as leaving:
            if leaving.code:
                raise
        return _recorded(runtime, watch)


def _begin(enough: int = 0) -> tuple[Runtime, _Watch]:
    cpu_pool.install()
    runtime = Runtime(policy="off", device="cpu")
    return runtime, _Watch(runtime, enough)


@contextlib.contextmanager
def _dry() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), dry_run():
        yield


def _recorded(runtime: Runtime, watch: _Watch) -> DryStep:
    if runtime.steps.graph is None:
        raise UsageError(
            "No step was seen.",
            change="Have it run forward of a module with gradients, and backward.",
        )
    graph = runtime.graph()
    if watch.new_state_bytes > 0:
        graph = _with_state(graph, watch.new_state_bytes, watch.optimizer_tick)
    return DryStep(graph, watch.optimizer_peak_bytes)


def _with_state(graph: StepGraph, state_bytes: int, optimizer_tick: int) -> StepGraph:
    """Return the step with an optimizer's state there from the begin on."""
    before = graph.op_tick <= optimizer_tick
    return replace(
        graph,
        op_ordinary_bytes=graph.op_ordinary_bytes + np.where(before, state_bytes, 0),
        persistent_bytes=graph.persistent_bytes + state_bytes,
    )


def estimate(
    step: Callable[[], Any],
    *,
    card: str | Card = "rtx4090",
    budget: Budget | Sequence[Budget] | None = None,
    policy: str = "auto",
    measured: StepGraph | None = None,
) -> Estimate:
    """Say what a training step would come to on a card, without the card, computing, or memory for its tensors.

    Args:
        step: trains one step; or builds model and optimizer, and returns a function that does. Build big models in it:
            there they take no memory.
        card: name of a card (`python -m delta_runtime estimate --help` lists them), a file like theirs, or a `Card`;
            "here" measures this machine.
        budget: bytes ("10GiB"), a share of what tensors can have on the card ("50%", 0.5), or several.
        policy: by which values leave device memory.
        measured: a record that was made on the card (`runtime.graph()`), of the same model with a smaller batch, say:
            ops take as long as they did there, and as much workspace.

    Returns:
        The estimate; it prints as a table.

    Raises:
        NeedsValues: the step asks for a number that was not computed; the message names the line.
        UsageError: no step was seen; no such card, budget or policy.

    Example:
        >>> def build():                                     # doctest: +SKIP
        ...     model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     def step():
        ...         model(input_ids=ids, labels=ids).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     return step
        >>> print(delta.estimate(build, card="rtx4090"))     # doctest: +SKIP
    """
    check_policy(policy)
    on = card_of(card) if isinstance(card, str) else card
    budgets = budgets_of(budget, on)
    dry = record_dry_step(step)
    return estimate_of(
        dry.graph,
        on,
        budgets,
        policy=policy,
        optimizer_peak_bytes=dry.optimizer_peak_bytes,
        measured=measured,
    )


def card_of(name: str) -> Card:
    """Return a card by its name, from a file, or this machine as it is measured.

    Raises:
        UsageError: there is no such card.
    """
    return measured_card() if name == "here" else load_card(name)


def budgets_of(budget: Budget | Sequence[Budget] | None, card: Card) -> list[int]:
    """Read budgets, of which shares are of what tensors can have on a card.

    Raises:
        UsageError: one makes no sense.
    """
    if budget is None:
        return []
    several = [budget] if isinstance(budget, (str, int, float)) else list(budget)
    found = [parse_budget(each, card.usable_bytes) for each in several]
    if any(each is None for each in found):
        raise UsageError("budget='auto' needs a device.", change="Give bytes, or a share.")
    return [int(each) for each in found if each is not None]
