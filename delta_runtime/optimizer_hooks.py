"""Tells whoever listens of the steps of all optimizers.

Covers steps that Python runs. A step that torch.compile traces is not told: a hook would break the trace,
and compiled code tells of its writes itself (`raw_access.py`). Between attaching and detaching, which may
be many, the hooks are the same functions under the same keys: compiled steps stay compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

OptimizerHook = Callable[[Any, Any, Any], None]
"""Takes the optimizer, and the positional and keyword arguments of its `step`."""

_listening: tuple[OptimizerHook, OptimizerHook] | None = None
_handles: list[tuple[Any, OptimizerHook]] = []
"""Of both hooks, from the first time on; a handle can be put back after it was removed."""


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _listening is not None:
        _listening[0](optimizer, args, kwargs)


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_dynamo_compiling() and _listening is not None:
        _listening[1](optimizer, args, kwargs)


def attach(before: OptimizerHook, after: OptimizerHook) -> None:
    """Call `before` ahead of each step of an optimizer, and `after` behind it, until `detach`. One pair at a time."""
    global _listening
    _listening = (before, after)
    if any(handle.hooks_dict_ref() is None for handle, _ in _handles):
        _handles.clear()  # somebody put other tables in place
    if not _handles:
        _handles.append((register_optimizer_step_pre_hook(_before), _before))
        _handles.append((register_optimizer_step_post_hook(_after), _after))
    for handle, hook in _handles:
        handle.hooks_dict_ref()[handle.id] = hook


def detach(before: OptimizerHook) -> None:
    """Call neither of the pair any more. Nothing, if it is not the one that is attached."""
    global _listening
    if _listening is None or _listening[0] != before:
        return
    _listening = None
    for handle, _ in _handles:
        handle.remove()
