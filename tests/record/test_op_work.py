"""What ops have to do is counted as torch.utils.flop_counter counts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import delta_runtime as delta
from delta_runtime.core.step_graph import OpWork, StepGraph
from tests.zoo.registry import ZOO

FLOAT = 4  # bytes


def recorded(loss: Callable[[], torch.Tensor]) -> StepGraph:
    """Return the record of one step."""
    runtime = delta.Runtime(policy="off", device="cpu", min_bytes=1)
    with runtime:
        loss().backward()
    graph = runtime.graph()
    runtime.close()
    return graph


def work_of(graph: StepGraph) -> OpWork:
    """Return what its ops have to do."""
    assert graph.work is not None
    return graph.work


def counted(loss: Callable[[], torch.Tensor]) -> int:
    """Return the operations of one step, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    return counter.get_total_flops()


def t(*sizes: int) -> torch.Tensor:
    """Return a tensor that needs a gradient, and that an op made."""
    return torch.randn(*sizes, requires_grad=True).sigmoid()


PRODUCTS: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: t(5, 7) @ t(7, 9),
    "bmm": lambda: t(3, 5, 7) @ t(3, 7, 9),
    "linear": lambda: F.linear(t(5, 7), t(9, 7), t(9)),
    "baddbmm": lambda: torch.baddbmm(t(3, 5, 9), t(3, 5, 7), t(3, 7, 9)),
    "conv1d": lambda: F.conv1d(t(2, 6, 20), t(4, 6, 3), stride=2),
    "conv2d": lambda: F.conv2d(t(3, 8, 12, 12), t(4, 8, 3, 3), padding=1, dilation=2),
    "transposed": lambda: F.conv_transpose2d(t(3, 8, 6, 6), t(8, 5, 3, 3), stride=2),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    def loss() -> torch.Tensor:
        return PRODUCTS[name]().sum()

    assert work_of(recorded(loss)).flops.sum() == counted(loss) > 0


def test_a_convolution_of_groups_has_the_work_of_its_groups() -> None:
    """Of its backward torch counts more: as if each channel were in each group."""

    def loss() -> torch.Tensor:
        return F.conv2d(t(3, 8, 12, 12), t(8, 1, 3, 3), groups=8).sum()

    once = 2 * (3 * 8 * 10 * 10) * (1 * 3 * 3)
    assert work_of(recorded(loss)).flops.sum() == 3 * once


def test_attention_has_two_products_forward_and_five_backward() -> None:
    """Torch does not count that of the CPU."""

    def loss() -> torch.Tensor:
        return F.scaled_dot_product_attention(t(2, 4, 10, 8), t(2, 4, 14, 8), t(2, 4, 14, 8)).sum()

    product = 2 * (2 * 4) * 10 * 14 * 8
    assert work_of(recorded(loss)).flops.sum() == 7 * product


def test_of_causal_attention_half_is_done() -> None:
    def loss() -> torch.Tensor:
        q = t(2, 4, 16, 8)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()

    assert work_of(recorded(loss)).flops.sum() == 7 * (2 * (2 * 4) * 16 * 16 * 8) / 2


@pytest.mark.parametrize("name", ["resnet", "gpt2_sdpa", "gpt2_eager", "unet", "swin"])
def test_models_are_counted_as_torch_counts_them(name: str) -> None:
    built = ZOO[name].build()
    batch = built.batch(0)
    flops = work_of(recorded(lambda: built.loss(batch))).flops.sum()
    assert flops == pytest.approx(counted(lambda: built.loss(batch)), rel=1e-6)


def test_bytes_are_those_that_are_read_and_written() -> None:
    table = nn.Embedding(1000, 16)
    rows = torch.arange(4)
    graph = recorded(lambda: (table(rows) * 2).expand(8, 4, 16).sigmoid().sum())
    moved = dict(zip(graph.op_name, work_of(graph).moved_bytes.tolist(), strict=True))
    taken = 4 * 16 * FLOAT
    assert moved["aten::embedding"] == rows.nbytes + taken  # not the whole table
    assert moved["aten::mul.Tensor"] == pytest.approx(2 * taken, abs=8)  # and a number
    assert moved["aten::sigmoid"] == taken + 8 * taken  # expanded elements lie at the same places


def test_views_and_empty_memory_move_nothing() -> None:
    def loss() -> torch.Tensor:
        x = t(4, 8, 16)
        return F.linear(x, t(32, 16)).sigmoid().mul(torch.empty_like(x.new_zeros(4, 8, 32))).sum()

    graph = recorded(loss)
    moved = list(zip(graph.op_name, work_of(graph).moved_bytes.tolist(), strict=True))
    free = [bytes_ for name, bytes_ in moved if name in ("aten::_unsafe_view", "aten::empty_like")]
    assert len(free) >= 2
    assert set(free) == {0}


def test_the_file_keeps_it() -> None:
    graph = recorded(lambda: PRODUCTS["linear"]().sum())
    work, again = work_of(graph), work_of(StepGraph.from_json(graph.to_json()))
    assert np.array_equal(again.flops, work.flops)
    assert np.array_equal(again.moved_bytes, work.moved_bytes)
    assert again.dtype == work.dtype
    assert "float32" in work.dtype
    without = dataclasses.replace(graph, work=None)
    assert StepGraph.from_json(without.to_json()).work is None


def test_half_precision_is_named() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        work = work_of(recorded(lambda: F.linear(t(8, 8), t(8, 8)).float().sum()))
    of_product = {dtype for dtype, flops in zip(work.dtype, work.flops, strict=True) if flops > 0}
    assert of_product == {"bfloat16"}
