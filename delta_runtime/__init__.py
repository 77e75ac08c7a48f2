"""A memory-budgeted training runtime for eager PyTorch.

    import delta_runtime as delta

    with delta.Runtime(budget="10GiB") as runtime:
        train()
    print(runtime.report())

Public names are loaded when they are first used, so that the torch-free parts (`delta_runtime.core`,
`delta_runtime.online`, `delta_runtime.planners`) can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delta_runtime import cpu_pool
    from delta_runtime.core.errors import (
        BudgetInfeasible,
        DeltaError,
        InplaceModification,
        NeedsValues,
        PlannerInfeasible,
        RecomputeMismatch,
        SwapFailed,
        UsageError,
    )
    from delta_runtime.core.plan import Plan
    from delta_runtime.core.step_graph import StepGraph
    from delta_runtime.dry_step import estimate
    from delta_runtime.report.step_report import StepReport
    from delta_runtime.runtime import Runtime, mark_written
    from delta_runtime.simulate.card import Card
    from delta_runtime.simulate.estimate import Estimate
    from delta_runtime.torch_hooks import disable

__version__ = "0.1.0"

__all__ = [
    "BudgetInfeasible",
    "Card",
    "DeltaError",
    "Estimate",
    "InplaceModification",
    "NeedsValues",
    "Plan",
    "PlannerInfeasible",
    "RecomputeMismatch",
    "Runtime",
    "StepGraph",
    "StepReport",
    "SwapFailed",
    "UsageError",
    "cpu_pool",
    "disable",
    "estimate",
    "mark_written",
]

_HOME = {
    "BudgetInfeasible": "core.errors",
    "DeltaError": "core.errors",
    "InplaceModification": "core.errors",
    "PlannerInfeasible": "core.errors",
    "RecomputeMismatch": "core.errors",
    "SwapFailed": "core.errors",
    "UsageError": "core.errors",
    "NeedsValues": "core.errors",
    "Estimate": "simulate.estimate",
    "Card": "simulate.card",
    "Plan": "core.plan",
    "StepGraph": "core.step_graph",
    "StepReport": "report.step_report",
    "Runtime": "runtime",
    "disable": "torch_hooks",
    "estimate": "dry_step",
    "mark_written": "runtime",
}


def __getattr__(name: str) -> Any:
    if name == "cpu_pool":
        found: Any = importlib.import_module("delta_runtime.cpu_pool")
    elif name in _HOME:
        found = getattr(importlib.import_module(f"delta_runtime.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'delta_runtime' has no attribute {name!r}")
    # If that was the first import of torch, the entry point had to wait until we were whole.
    import delta_runtime_autoload

    delta_runtime_autoload.resume()
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
