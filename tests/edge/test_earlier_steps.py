"""Values of an earlier step in a later one, and several backwards in one: a record has its own values only.

A step that is only entered begins after backward: what was fetched ahead of several micro-batches, kept from the last
step or added up over all of them was made by ops of another step, whose keys mean other values now.
"""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.core.step_graph import StepGraph
from tests.support.bitwise import Snapshot, assert_same_bits, freeze, gradients
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.nets import net

WIDTH, ROWS, LAYERS = 64, 1024, 6


def inputs_by_name(graph: StepGraph, name: str) -> list[list[int]]:
    """Of each op of that name in forward: the values of this step that it reads."""
    return [
        graph.inputs_of(op).tolist()
        for op in range(graph.n_ops)
        if graph.op_name[op] == name and not graph.op_backward[op]
    ]


def check(graph: StepGraph) -> None:
    """Every value that an op reads was made by an op before it."""
    for op in range(graph.n_ops):
        for value in graph.inputs_of(op):
            assert 0 <= value < graph.n_values
            assert graph.value_op[value] < op, f"{graph.op_name[op]} reads what comes later"


def test_a_value_of_an_earlier_step_is_no_value_of_this_one():
    """Both are the first value of their step: with the same key it would be read for the other."""
    w = torch.ones(ROWS, WIDTH, requires_grad=True)
    runtime = delta.Runtime("100%", device="cpu")
    with runtime:
        early = w * 2  # value 0
        waiting = early.sin()  # a graph that needs it, and lives on
        (w.exp() + 1).sum().backward()
        (w.sigmoid() + early.detach()).sum().backward()
        torch.zeros(3)  # a step begins: the last one is recorded
        graph = runtime.graph()
        assert inputs_by_name(graph, "aten::add.Tensor") == [[0]]  # of sigmoid, and not of `early`
        assert "aten::sigmoid" in graph.op_name and "aten::exp" not in graph.op_name
        check(graph)
        waiting.sum().backward()
    runtime.close()


def test_what_was_made_in_an_earlier_step_and_saved_in_this_one_is_not_among_its_values():
    w = torch.ones(ROWS, WIDTH, requires_grad=True)
    runtime = delta.Runtime("100%", device="cpu")
    with runtime:
        early = w + 1  # value 0
        waiting = (early * 2).sin()  # a graph with a recipe that reads it, and lives on
        (w.exp() * 1).sum().backward()
        small = w.sum()  # value 0
        (early.detach() * w.cos().sin()).sum().backward()
        torch.zeros(3)
        graph = runtime.graph()
        assert graph.saved.tolist() == [1]  # of cos, for sin
        assert graph.value_bytes[graph.saved].tolist() == [4 * ROWS * WIDTH]
        del small
        waiting.sum().backward()
    runtime.close()


def penalty(model: nn.Module, index: int) -> torch.Tensor:
    """The gradient of the output is part of the loss: two backwards, the first with create_graph."""
    torch.manual_seed(index)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + gradient.square().mean()
    loss.backward()
    return loss


def two_losses(model: nn.Module, index: int) -> torch.Tensor:
    """Two backwards through one graph, with an op between them."""
    torch.manual_seed(index)
    y = model(torch.randn(ROWS, WIDTH))
    y.square().mean().backward(retain_graph=True)
    loss = y.abs().mean() * 2
    loss.backward()
    return loss


def micro_batches(model: nn.Module, index: int) -> torch.Tensor:
    """Four, fetched and padded ahead; the losses are added up over them, as trainers do."""
    torch.manual_seed(index)
    ahead = []
    for _ in range(4):
        x = torch.stack([torch.randn(WIDTH) for _ in range(ROWS)])
        mask = torch.stack([torch.ones(WIDTH) for _ in range(ROWS)])
        ahead.append((x, mask, x.masked_fill(mask == 0, -100)))
    count = sum((target != -100).sum() for _, _, target in ahead)
    total = torch.zeros(())
    for x, mask, target in ahead:
        loss = ((model(x * mask) - target) * mask).square().sum() / count
        loss.backward()
        total = total + loss.detach()
    return total


STEPS = {penalty: 1, two_losses: 1, micro_batches: 4}
"""Steps that the runtime counts in each."""


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_several_backwards_and_values_of_earlier_steps(step, caplog):
    """Same bits, steps counted once, plans made and followed, and nothing to tell the log."""
    caplog.set_level(logging.INFO)

    def train(runtime: delta.Runtime | None, times: int) -> Snapshot:
        model = net(WIDTH, LAYERS, nn.Tanh, dropout=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        snapshot: Snapshot = {}
        for index in range(times):
            loss = step(model, index)
            snapshot |= {f"{index}: {k}": v for k, v in gradients(model).items()}
            snapshot[f"{index}: loss"] = freeze(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if runtime is not None:
                check(runtime.graph())
        return snapshot

    cpu_pool.install()
    gc.collect()
    cpu_pool.reset_peak()
    base_bytes = cpu_pool.allocated_bytes()
    expected = train(None, 8)
    budget_bytes = base_bytes + int(0.75 * (cpu_pool.peak_bytes() - base_bytes))
    gc.collect()
    runtime = delta.Runtime(budget_bytes, device="cpu")
    with runtime:
        assert_same_bits(train(runtime, 8), expected)
    report = runtime.report()
    assert report.totals.steps == 8 * STEPS[step]
    assert report.totals.drops > 0
    assert report.last.plan_hits > 0 and report.last.plan_misses == 0
    assert not caplog.records
    assert np.isfinite(runtime.graph().seconds)
    runtime.close()


def test_steps_end_also_where_every_graph_is_kept():
    """Without an optimizer that PyTorch knows, and with retain_graph at each backward: after a hundred."""
    w = torch.ones(8, requires_grad=True)
    runtime = delta.Runtime("100%", device="cpu")
    with runtime:
        for _ in range(250):
            (w.exp() * 2).sum().backward(retain_graph=True)
    assert runtime.report().totals.steps == 3
    runtime.close()
