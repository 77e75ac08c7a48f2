"""Which runtime is entered in this process: one at a time, on one thread.

Covers who may enter, and what becomes of a runtime whose thread ended or that a forked child inherits. Does not cover
what entering puts in place (torch_hooks).
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

import torch

from delta_runtime import raw_access
from delta_runtime.core.errors import BudgetInfeasible, UsageError
from delta_runtime.core.units import format_bytes
from delta_runtime.extension import _C
from delta_runtime.torch_hooks import TorchHooks


class Enterable(Protocol):
    """What this module has to know of a runtime."""

    budget_bytes: int
    hooks: TorchHooks

    def abandon(self) -> None:
        """End it without the thread that it is entered on."""

    def infeasible(self) -> BudgetInfeasible:
        """Return what is to be said of a budget that cannot be met."""

    def mark_written(self, tensor: torch.Tensor) -> None:
        """Take in that code outside of the dispatcher wrote to a tensor's storage."""


_entered: Enterable | None = None
_lock = threading.Lock()


def entered() -> Enterable | None:
    """Return the runtime that is entered in this process; None where none is."""
    return _entered


def claim(runtime: Enterable) -> None:
    """Make a runtime the one that is entered, on this thread.

    Raises:
        UsageError: another one is; it stays so.
    """
    global _entered
    with _lock:
        if _entered is not None and _entered.hooks.thread.is_alive():
            raise UsageError(
                "another runtime is entered already.",
                found=f"a runtime with a budget of {format_bytes(_entered.budget_bytes)}",
                change="Leave it first; one runtime manages the whole process.",
            )
        if _entered is not None:
            _entered.abandon()
        _entered = runtime
        runtime.hooks.thread = threading.current_thread()


def release(runtime: Enterable) -> None:
    """Make room for another one. Idempotent."""
    global _entered
    with _lock:
        if _entered is runtime:
            _entered = None


class BudgetInfeasibleInOp(BudgetInfeasible, torch.OutOfMemoryError):
    """A strict budget cannot be met, found out in the middle of an op.

    It is an OutOfMemoryError too, so that what takes smaller batches when memory runs out does so.

    Args:
        message: what was asked of the allocator.
    """

    def __init__(self, message: str = "") -> None:
        if _entered is None:  # left since then
            BudgetInfeasible.__init__(self, 0, 0, details=message)
            return
        told = _entered.infeasible()
        BudgetInfeasible.__init__(
            self,
            told.asked_bytes,
            told.lower_bound_bytes,
            told.lower_bound_op,
            told.least_budget_bytes,
            f"{message} {told.details}".strip(),
        )


def _forget_after_fork() -> None:
    """Start a forked child (a data-loader worker) with the runtime off."""
    global _entered, _lock
    _C.set_main_thread(threading.get_ident())  # the thread that forked is the only one here
    _lock = threading.Lock()  # whoever held it does not exist here
    raw_access.forget_lock()
    _C.forget_locks()
    runtime, _entered = _entered, None
    if runtime is None:
        return
    if runtime.hooks.thread is threading.current_thread():
        runtime.hooks.detach()
    runtime.abandon()  # hooks and observer may be of a thread that does not exist here


os.register_at_fork(after_in_child=_forget_after_fork)
_C.set_budget_error(BudgetInfeasibleInOp)
