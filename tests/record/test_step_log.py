"""What a record says of the values that a step saved."""

from __future__ import annotations

import torch
from torch import nn

import delta_runtime as delta
from delta_runtime.core.step_graph import StepGraph
from tests.support.fixtures import one_thread  # noqa: F401


def recorded(*, probed: bool, kept: bool) -> StepGraph:
    """Record a step in which an activation is saved for a while by what comes to nothing, and saved again.

    Args:
        probed: whether it is.
        kept: whether the graph of autograd outlives the step.
    """
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())))
    runtime = delta.Runtime(policy="off", device="cpu", min_bytes=0)
    with runtime.step():
        hidden = torch.randn(256, 64)
        for number, part in enumerate(net):
            hidden = part(hidden)
            if probed and number == 2:
                probe = (hidden * hidden).mean()
                del probe
        loss = hidden.square().mean()
        loss.backward(retain_graph=kept)
    graph = runtime.graph()
    runtime.close()
    return graph


def last_use(graph: StepGraph, row: int) -> int:
    return int(graph.uses[graph.use_offsets[row] : graph.use_offsets[row + 1]].max(initial=-1))


def test_what_was_saved_again_is_held_for_as_long_as_any_of_its_pages():
    graph = recorded(probed=True, kept=True)
    assert len(graph.uses)
    for row, released_at in enumerate(graph.released_at.tolist()):
        assert last_use(graph, row) <= released_at == graph.ticks


def test_what_was_saved_again_is_let_go_of_with_the_last_of_its_pages():
    once, again = recorded(probed=False, kept=False), recorded(probed=True, kept=False)
    assert (again.released_at < again.ticks).all()
    for row, released_at in enumerate(again.released_at.tolist()):
        assert last_use(again, row) <= released_at
    later = again.n_ops - once.n_ops
    assert (again.released_at - later == once.released_at).all()
