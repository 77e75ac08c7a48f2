"""The errors of delta_runtime.

Each says what was wrong, and as far as it is known what was asked, what there was, what was tried
and what to change. Covers the classes only; who raises them says when.
"""

from __future__ import annotations

from typing import Any

from delta_runtime.core.units import format_bytes


class DeltaError(Exception):
    """Base class of every error that delta_runtime raises on purpose.

    Args:
        problem: one sentence, what went wrong.
        asked: what the caller wanted.
        found: what there was instead.
        tried: what was done about it before giving up.
        change: what the reader can do now.

    The empty ones are left out of the message.

    Example:
        >>> print(DeltaError("The tier is full.", asked="2 GiB", change="Raise host_budget."))
        The tier is full.
          asked:  2 GiB
          change: Raise host_budget.
    """

    def __init__(
        self,
        problem: str = "",
        *,
        asked: str = "",
        found: str = "",
        tried: str = "",
        change: str = "",
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.asked = asked
        self.found = found
        self.tried = tried
        self.change = change

    def __str__(self) -> str:
        told = {
            "asked": self.asked,
            "found": self.found,
            "tried": self.tried,
            "change": self.change,
        }
        lines = [f"  {label + ':':<7} {text}" for label, text in told.items() if text]
        return "\n".join([self.problem or self._summary(), *lines])

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with `args` alone; errors travel between processes
        # (data-loader workers, launchers), so they are rebuilt from their attributes instead.
        return _rebuild, (type(self), self.args, self.__dict__)

    def _summary(self) -> str:
        """Return the first sentence of the class's docstring, for errors raised without words."""
        return (type(self).__doc__ or type(self).__name__).splitlines()[0]


def _rebuild(cls: type[DeltaError], args: tuple[Any, ...], state: dict[str, Any]) -> DeltaError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class BudgetInfeasible(DeltaError):
    """The budget cannot be met by evicting all that may be evicted.

    Training state is as it was before the op that asked; nothing has been evicted for it.

    Args:
        asked_bytes: the budget.
        lower_bound_bytes: no budget below that can be met, as far as the step has run; 0 if nothing
            is known.
        lower_bound_op: name of the op that sets it: its inputs, outputs and workspace.
        least_budget_bytes: what is expected to hold; 0 as long as no step has run to its end.
        details: what stood in the way: pins, exposed storages, unmanaged bytes.
    """

    def __init__(
        self,
        asked_bytes: int,
        lower_bound_bytes: int,
        lower_bound_op: str = "",
        least_budget_bytes: int = 0,
        details: str = "",
    ) -> None:
        if least_budget_bytes <= asked_bytes:
            least_budget_bytes = 0  # that of another step: this one needs more
        told = [f"The budget of {format_bytes(asked_bytes)} cannot be met."]
        if lower_bound_bytes > asked_bytes:
            by = f" (by {lower_bound_op})" if lower_bound_op else ""
            told.append(f"The lower bound of any budget is {format_bytes(lower_bound_bytes)}{by}.")
        if least_budget_bytes:
            told.append(f"The least budget is about {format_bytes(least_budget_bytes)}.")
        super().__init__(
            " ".join(told),
            asked=f"a budget of {format_bytes(asked_bytes)} ({asked_bytes:,} bytes)",
            found=details,
            tried="evicting every saved tensor that may be evicted",
            change=(
                f"raise the budget to {format_bytes(least_budget_bytes)} "
                f"({least_budget_bytes:,} bytes) or more, or use a smaller batch"
                if least_budget_bytes
                else "raise the budget, or use a smaller batch; the report of one step without strict "
                "names the least budget"
            ),
        )
        self.asked_bytes = asked_bytes
        self.lower_bound_bytes = lower_bound_bytes
        self.lower_bound_op = lower_bound_op
        self.least_budget_bytes = least_budget_bytes
        self.details = details


class PlannerInfeasible(BudgetInfeasible):
    """The planner that a policy names has no plan within the budget; others may have one.

    Training state is as it was. Without strict=True it is a warning, and the joint plan is followed instead.

    Args:
        planner: its name.
        asked_bytes: the budget.
        least_budget_bytes: for which it has one; 0 where it has none at all.
    """

    def __init__(self, planner: str, asked_bytes: int, least_budget_bytes: int) -> None:
        least = format_bytes(least_budget_bytes)
        has = f"The least budget that it has a plan for is {least}." if least_budget_bytes else ""
        DeltaError.__init__(
            self,
            f"The planner {planner!r} has no plan within {format_bytes(asked_bytes)}. {has}".rstrip(),
            asked=f"a budget of {format_bytes(asked_bytes)} ({asked_bytes:,} bytes)",
            tried=f"policy={planner!r}",
            change=(
                f"raise the budget to {least} ({least_budget_bytes:,} bytes) or more, or take policy='auto'"
                if least_budget_bytes
                else "take policy='auto'"
            ),
        )
        self.planner = planner
        self.asked_bytes = asked_bytes
        self.lower_bound_bytes = 0
        self.lower_bound_op = ""
        self.least_budget_bytes = least_budget_bytes
        self.details = ""


class RecomputeMismatch(DeltaError):
    """A recomputed value is not, bit for bit, the value that was dropped.

    The gradients of this step must not be used.
    """


class SwapFailed(DeltaError):
    """A saved tensor was swapped to disk, cannot be read any more, and cannot be recomputed either.

    Gradients of the backward that raised are incomplete; weights and optimizer state are as they
    were.
    """


class InplaceModification(DeltaError, RuntimeError):
    """A tensor that backward needs was changed in place after autograd saved it.

    It is the error that autograd itself raises where no hooks are installed, so it is a
    RuntimeError too.
    """


class UsageError(DeltaError, ValueError):
    """An argument, an environment variable or an order of calls that makes no sense.

    Nothing has been changed when it is raised.
    """


class NeedsValues(UsageError):
    """A step that is not computed asked for a number that it would have computed; the message names the line.

    The tensors of that step are worth nothing. What was there before is untouched.
    """
