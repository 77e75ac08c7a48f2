"""Proof that the comparisons can fail: each rule of recording and replaying, broken on purpose, gives wrong gradients.

Each case is small and depends on exactly one rule. While the rule is kept it has the ordinary bits, while it is broken
other bits or an error of the runtime.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from delta_runtime.core.errors import DeltaError
from tests.support.bitwise import Snapshot, difference, freeze
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import SABOTAGES, managed, sabotage

# Large blocks: the bytes of a freed one are not found again by chance.
ELEMENTS = 1 << 16


def _dropout(x: Tensor) -> Tensor:
    """The mask comes from the random state of its first run."""
    return F.dropout(x * 2.0, 0.5).tanh()


def _empty_filled_by_foreign_code(x: Tensor) -> Tensor:
    """The result of empty() is no recipe for what somebody else wrote there.

    The code has the address alone: memory that is lent to an array is also watched, by a rule of its own.
    """
    weight = torch.empty(ELEMENTS)
    ctypes.memset(weight.data_ptr(), 0x40, weight.nbytes)
    return x * weight


def _written_over_on_the_way(x: Tensor) -> Tensor:
    """Two rebuilds start from one source, and the first of them writes over it on the way."""
    table = _tables.pop()
    y = x * (table * 2.0)
    torch.zeros(1).add(1.0)  # an op boundary: the product is dropped
    table.mul_(5.0)
    z = y * (table + 1.0)  # asked for first
    torch.zeros(1).add(1.0)
    table.zero_()
    return z


def _one_number_times_a_python_number(x: Tensor) -> Tensor:
    """A Python number does not take part in type promotion as a tensor of its type would."""
    weight = x.mean() * 0.3
    return x * weight


def _saved_result_of_an_op_in_place(x: Tensor) -> Tensor:
    """sigmoid_ saves its result: the content after the write."""
    return (x * 3.0).sigmoid_() * 2.0


def _source_overwritten_after_use(x: Tensor) -> Tensor:
    """What is rebuilt from a source needs the source as it was."""
    table = _tables.pop()
    y = x * (table * 2.0)
    torch.zeros(1).add(
        1.0
    )  # an op boundary: the product is dropped, and the table is all that is left of it
    table.zero_()
    return y


_tables: list[Tensor] = []

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "NoRngRestore": _dropout,
    "EmptyAsOp": _empty_filled_by_foreign_code,
    "InplaceWithoutCopy": _written_over_on_the_way,
    "WrappedNumberLost": _one_number_times_a_python_number,
    "PreWriteValue": _saved_result_of_an_op_in_place,
    "NoCloneOnWrite": _source_overwritten_after_use,
}


def _spoil_freed_memory() -> None:
    blocks = [torch.full((ELEMENTS,), 7.0) for _ in range(64)]
    del blocks


def _gradient(case: Callable[[Tensor], Tensor], mode: str) -> Snapshot:
    x = torch.linspace(-1.0, 1.0, ELEMENTS, requires_grad=True)
    _tables[:] = [torch.full((ELEMENTS,), 3.0)]
    torch.manual_seed(11)
    with managed(mode):
        edge = get_gradient_edge(case(x))  # the output itself is let go
        _spoil_freed_memory()
        (gradient,) = torch.autograd.grad([edge], [x], [torch.linspace(1.0, 2.0, ELEMENTS)])
        return {"gradient": freeze(gradient), "random state": freeze(torch.get_rng_state())}


def test_every_switch_has_a_case() -> None:
    assert set(CASES) == set(SABOTAGES)


@pytest.mark.parametrize("name", SABOTAGES)
def test_the_rule_kept_gives_the_ordinary_bits(name: str) -> None:
    case = CASES[name]
    assert difference(_gradient(case, "drop_all"), _gradient(case, "ordinary")) == ""


@pytest.mark.parametrize("name", SABOTAGES)
def test_the_rule_broken_is_noticed(name: str) -> None:
    case = CASES[name]
    ordinary = _gradient(case, "ordinary")
    with sabotage(name):
        try:
            found = difference(_gradient(case, "drop_all"), ordinary)
        except (RuntimeError, DeltaError) as error:  # evidence tells of it
            found = str(error)
    assert found, f"{name} changed nothing: the comparison proves nothing about this rule"
    assert difference(_gradient(case, "drop_all"), ordinary) == "", "the switch was not mended"
