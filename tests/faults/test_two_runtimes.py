"""Two runtimes in one process, one entered after the other: what one sees being written, the other has to hear of.

Does not cover: entering one within the other, which raises (tests/edge/test_bad_input.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import delta_runtime as delta
from tests.faults.harness import N, boundary
from tests.support.fixtures import one_thread  # noqa: F401

WRITES: dict[str, Callable[[Tensor], object]] = {
    "op": lambda x: x.mul_(2.0),
    "data": lambda x: x.data.mul_(2.0),
    "out": lambda x: torch.mul(x, 2.0, out=x.data),
    "list": lambda x: torch._foreach_mul_([x.data], 2.0),
    "numpy": lambda x: x.numpy().__imul__(2.0),
    "storage": lambda x: x.untyped_storage().fill_(0x3D),
}


def new_runtime() -> delta.Runtime:
    return delta.Runtime("100%", device="cpu", policy="stress_drop_all", min_bytes=0)


@pytest.mark.parametrize(
    ("closed", "backward_in"),
    [
        (False, "first"),
        *((closed, each) for closed in (False, True) for each in ("second", "neither")),
    ],
)
@pytest.mark.parametrize("how", WRITES)
def test_a_write_under_the_one_and_a_graph_of_the_other(
    how: str, closed: bool, backward_in: str
) -> None:
    def gradients(managed: bool) -> tuple[list[Tensor], int]:
        found, drops = [], 0
        first = new_runtime() if managed else contextlib.nullcontext()
        second = new_runtime() if managed else contextlib.nullcontext()
        for step in range(6):
            if isinstance(first, delta.Runtime) and closed:
                first = new_runtime()
            w, x = torch.linspace(0.1, 1, N).requires_grad_(), torch.linspace(0.1, 2, N)
            with first:
                loss = ((x * (1.0 + step)).sin() * w).sum()
                boundary()
                boundary()
            if isinstance(first, delta.Runtime):
                drops += first.report().totals.drops if closed or step == 5 else 0
                if closed:
                    first.close()
            with second:
                (w.detach() * 2).sum()
                if step >= 3:
                    WRITES[how](x)
            inside = {"first": first, "second": second, "neither": contextlib.nullcontext()}
            with inside[backward_in]:
                loss.backward()
            assert w.grad is not None
            found.append(w.grad)
        for each in (first, second):
            if isinstance(each, delta.Runtime):
                each.close()
        return found, drops

    ours, drops = gradients(managed=True)
    for step, (mine, right) in enumerate(zip(ours, gradients(managed=False)[0], strict=True)):
        assert torch.equal(mine, right), step
    assert drops > 0
