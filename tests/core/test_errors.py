"""What the errors say, and that they survive the way from one process to another."""

import copy
import pickle

import pytest

from delta_runtime.core import errors
from delta_runtime.core.errors import (
    BudgetInfeasible,
    DeltaError,
    InplaceModification,
    PlanDiverged,
    RecomputeMismatch,
    UsageError,
)

GIB = 1024**3


def test_all_errors_derive_from_delta_error():
    found = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert found >= {BudgetInfeasible, InplaceModification, PlanDiverged, RecomputeMismatch}
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
    error = BudgetInfeasible(GIB, 3 * GIB, "aten::_log_softmax", "1.00 GiB is exposed")
    assert (error.asked_bytes, error.floor_bytes) == (GIB, 3 * GIB)
    assert (error.floor_op, error.details) == ("aten::_log_softmax", "1.00 GiB is exposed")
    for told in ("1.00 GiB", "3.00 GiB", "aten::_log_softmax", "is exposed", "raise the budget"):
        assert told in str(error)


def test_budget_infeasible_without_a_known_floor_does_not_invent_one():
    assert "0 B" not in str(BudgetInfeasible(GIB, 0))


@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error",
    [
        BudgetInfeasible(GIB, 2 * GIB, "aten::mm", "pinned"),
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
