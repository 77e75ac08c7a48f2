"""What the errors say, and that they survive the way from one process to another."""

import copy
import pickle

import pytest

from delta_runtime.core import errors
from delta_runtime.core.errors import (
    BudgetInfeasible,
    DeltaError,
    InplaceModification,
    RecomputeMismatch,
    UsageError,
)

GIB = 1024**3


def test_all_errors_derive_from_delta_error():
    found = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert found >= {BudgetInfeasible, InplaceModification, RecomputeMismatch}
    assert all(issubclass(error, DeltaError) for error in found)
    assert issubclass(InplaceModification, RuntimeError)  # as autograd's own
    assert issubclass(UsageError, ValueError)


def test_message_has_the_parts_that_were_given():
    error = DeltaError(
        "The tier is full.", asked="2 GiB", tried="disk", change="Raise host_budget."
    )
    assert str(error).splitlines() == [
        "The tier is full.",
        "  asked:  2 GiB",
        "  tried:  disk",
        "  change: Raise host_budget.",
    ]
    assert str(UsageError("No.")) == "No."


def test_error_raised_without_words_still_says_something():
    assert "bit for bit" in str(RecomputeMismatch())


def test_budget_infeasible_carries_the_numbers_and_says_them():
    error = BudgetInfeasible(GIB, 2 * GIB, "aten::_log_softmax", 3 * GIB, "0.50 GiB is exposed")
    assert (error.asked_bytes, error.lower_bound_bytes) == (GIB, 2 * GIB)
    assert (error.least_budget_bytes, error.lower_bound_op) == (3 * GIB, "aten::_log_softmax")
    assert error.details == "0.50 GiB is exposed"
    first, *rest = str(error).splitlines()
    for told in ("1.00 GiB", "lower bound", "2.00 GiB", "aten::_log_softmax", "3.00 GiB"):
        assert told in first
    assert any("0.50 GiB is exposed" in line for line in rest)
    # What is advised is what is expected to hold, not what nothing goes below.
    assert "raise the budget to 3.00 GiB" in rest[-1] and "2.00 GiB" not in rest[-1]


def test_budget_infeasible_without_known_numbers_does_not_invent_any():
    text = str(BudgetInfeasible(GIB, 0))
    assert "0 B" not in text and "lower bound" not in text
    assert "without strict" in text  # how to get to know the least budget


def test_budget_infeasible_with_a_bound_that_explains_nothing_does_not_name_it():
    assert "lower bound" not in str(BudgetInfeasible(2 * GIB, GIB, "aten::mm", 3 * GIB))


@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error",
    [
        BudgetInfeasible(GIB, 2 * GIB, "aten::mm", 3 * GIB, "pinned"),
        UsageError("No.", asked="0", change="Ask for more."),
        InplaceModification("Changed."),
    ],
)
def test_errors_survive_copy_and_pickle(error, clone):
    twin = clone(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
    assert twin.args == error.args


def test_the_least_budget_of_another_step_is_no_advice() -> None:
    error = BudgetInfeasible(10 << 20, 0, least_budget_bytes=3 << 20)
    assert "3.00 MiB" not in str(error)
    assert error.least_budget_bytes == 0
