"""Reruns that take what has a copy in a tier below for one op at a time, since there is no room to hold all of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.act.plans import follow
from delta_runtime.core.events import Exit
from delta_runtime.core.plan import NEVER, Interval, Plan
from delta_runtime.core.step_graph import StepGraph
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.plans import planned

N = 1 << 18
BLOCK_BYTES = 4 * N
_runs = 0


@torch.library.custom_op("delta_test::sine_and_count", mutates_args=())
def sine_and_count(x: Tensor) -> tuple[Tensor, Tensor]:
    """The second result is another one each time."""
    global _runs
    _runs += 1
    return x.sin(), x.cos() + _runs / 1000


def _backward(ctx, sine: Tensor, count: Tensor) -> Tensor:  # noqa: ANN001
    (x,) = ctx.saved_tensors
    return sine * x.cos() - count * x.sin()


sine_and_count.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)


def loss_of(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    global _runs
    _runs = 0
    sine, count = sine_and_count(parameters[0] * x + parameters[1])
    return (sine * count * 0.3).tanh().sin().sum()


def plan_of(graph: StepGraph) -> Plan:
    """Swap the second result of the op, and drop all else."""
    op = next(op for op, name in enumerate(graph.op_name) if "sine_and_count" in name)
    second = max(value for value in graph.saved.tolist() if graph.value_op[value] == op)
    changes = {}
    for row, value in enumerate(graph.saved.tolist()):
        use = int(graph.uses[graph.use_offsets[row]])
        begin = int(graph.op_tick[graph.value_op[value]])
        end = max(int(graph.saved_at[row]) + 1, int(graph.alone_at[row]))
        way, copy_back_at = (Exit.SWAP, use) if value == second else (Exit.DROP, NEVER)
        changes[value] = [
            Interval(begin, end, way, copy_back_at),
            Interval(use, graph.ticks),
        ]
    return planned(graph, changes, as_written=False)


@pytest.mark.parametrize("room_blocks", [2, 3, 4, 8])
def test_the_copy_of_a_value_counts_and_not_what_the_rerun_makes_of_it(room_blocks: int) -> None:
    """The op runs again for its first result; with `verify="off"` nobody compares what comes of the second."""
    cpu_pool.install()
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(N, generator=generator).requires_grad_() for _ in range(2)]
    x = torch.randn(N, generator=generator)
    loss_of(parameters, x).backward()
    wanted = [each.grad for each in parameters]
    runtime = delta.Runtime(
        "8GB",
        device="cpu",
        policy="auto",
        host_budget="1GB",
        link_bytes_per_s=2e10,
        min_bytes=0,
        verify="off",
    )
    with contextlib.closing(runtime), runtime:
        session = runtime.session
        plan: Plan | None = None
        graph: StepGraph | None = None
        for index in range(8):
            for each in parameters:
                each.grad = None
            if graph is not None and plan is not None:
                follow(session, [(graph, plan)])
            with runtime.step():
                loss = loss_of(parameters, x)
                if plan is not None:
                    for _ in range(2):
                        session.make_room(1 << 40)
                        time.sleep(0.02)
                        session.take_in_transfers()
                    assert session.levels().swapped_now_bytes == BLOCK_BYTES
                    session.set_budget(session.live_bytes() + room_blocks * BLOCK_BYTES)
                loss.backward()
                del loss
                session.set_budget(8 << 30)
            assert all(
                torch.equal(each.grad, w) for each, w in zip(parameters, wanted, strict=True)
            )
            if index == 5:
                graph = runtime.graph()
                plan = plan_of(graph)
        assert runtime.report().totals.replayed_ops > 0
