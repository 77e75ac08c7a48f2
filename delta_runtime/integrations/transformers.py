"""A callback that makes transformers' Trainer train inside a byte budget.

    Trainer(..., callbacks=[DeltaCallback(budget="10GiB")])

Covers every call of the Trainer's `training_step`, so each micro-batch of gradient accumulation is a step of the
runtime. Does not cover evaluation, which saves nothing for a backward, nor several Trainers at once in one process.

Note: what a callback is not given
  1. The Trainer calls its callbacks without telling them who it is, and none of its events encloses forward and
     backward of a micro-batch, or is sent where one raises. So the callback looks for the Trainer among its callers,
     and puts `runtime.step()` around its `training_step`.
  2. The Trainer hands a log from callback to callback, those that print and send it first. So the callback goes to
     the front of the line when training begins.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from delta_runtime.core.errors import UsageError
from delta_runtime.core.units import BudgetSpec
from delta_runtime.report.step_report import StepReport
from delta_runtime.runtime import Runtime


class DeltaCallback(TrainerCallback):
    """Trains inside a byte budget, and adds what that costs to the Trainer's log.

    Each `train()` has a runtime of its own, made when training begins and closed when it ends. Logs with a `loss` get
    the entries of `Runtime.metrics`, of the last micro-batch.

    Args:
        budget: most bytes that the device may hold; see `Runtime`.
        options: further arguments of `Runtime`, but for `device`, which is the Trainer's.

    Example:
        >>> trainer = Trainer(model, arguments, callbacks=[DeltaCallback(budget="10GiB")])   # doctest: +SKIP
        >>> trainer.train()                                                                 # doctest: +SKIP
    """

    def __init__(self, budget: BudgetSpec = "auto", **options: Any) -> None:
        self.budget = budget
        self.options = options
        self.runtime: Runtime | None = None
        """Of the training that goes on, or that raised; None before and after."""
        self.report: StepReport | None = None
        """Of the last training, once it is over; None before."""
        self._step: _BudgetStep | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Make the runtime, and put it around `training_step`.

        Raises:
            UsageError: an argument of the runtime makes no sense, or no Trainer calls. The Trainer is as it was.
        """
        self.close()  # of a training that raised
        trainer = _calling_trainer(sys._getframe(1))
        runtime = Runtime(self.budget, device=str(args.device), **self.options)
        handler = trainer.callback_handler
        # A new list: the handler goes through the old one at this moment.
        handler.callbacks = [self, *(each for each in handler.callbacks if each is not self)]
        self.runtime, self._step = runtime, _BudgetStep(trainer, runtime)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the runtime's figures to a log of training, and to the Trainer's history of them."""
        if self.runtime is None or logs is None or "loss" not in logs:
            return
        figures = self.runtime.metrics()
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the runtime; `report` is what it came to."""
        self.close()

    def close(self) -> None:
        """End the budget, and set `report`. Idempotent.

        Training that ends does this by itself. After training that raised, the runtime keeps its tiers below the device
        until this is called, or the callback's next training begins.
        """
        runtime, self.runtime = self.runtime, None
        step, self._step = self._step, None
        if step is not None:
            step.undo()
        if runtime is not None:
            self.report = runtime.report()
            runtime.close()


class _BudgetStep:
    """A Trainer's `training_step` inside of `runtime.step()`, until `undo`."""

    def __init__(self, trainer: Trainer, runtime: Runtime) -> None:
        self._trainer = trainer
        self._is_over = False
        self._before = vars(trainer).get("training_step")  # of the object itself, if it has one
        training_step = trainer.training_step

        @functools.wraps(training_step)
        def budgeted(*args: Any, **kwargs: Any) -> Any:
            if self._is_over:  # somebody has put something around it, and left that there
                return training_step(*args, **kwargs)
            with runtime.step():
                return training_step(*args, **kwargs)

        self._budgeted = trainer.training_step = budgeted

    def undo(self) -> None:
        """Put back what was there; what somebody else has put around it since stays, and has no runtime within."""
        self._is_over = True
        if vars(self._trainer).get("training_step") is not self._budgeted:
            return
        if self._before is None:
            del self._trainer.training_step  # the class's own is seen again
        else:
            self._trainer.training_step = self._before


def _calling_trainer(frame: FrameType | None) -> Trainer:
    """Return the Trainer that a frame was called by, however far up."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise UsageError(
        "DeltaCallback was called by something else than transformers' Trainer.",
        change="Put `with delta_runtime.Runtime(budget).step():` around forward and backward instead.",
    )
