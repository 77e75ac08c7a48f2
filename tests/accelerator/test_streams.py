"""Programs that use more than one stream themselves: what the runtime adds must not take an order away.

Each of these was wrong once. The first steps of a program are timed, and timing waits for the device, which hides every
race; so the races come after step three.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import delta_runtime as delta

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

ELEMENTS = 1 << 18
BYTES = 4 * ELEMENTS
STEPS = 7


class Saves(torch.autograd.Function):
    """x + 0, with x as its gradient whatever comes in: from a copy that nobody else holds, or from a buffer."""

    @staticmethod
    def forward(ctx, x, buffer, before_backward):
        y = x.clone() if buffer is None else buffer
        ctx.save_for_backward(y)
        ctx.before_backward, ctx.late = before_backward, buffer is None
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        ctx.before_backward()
        # The copy reads when its stream comes to it; the product, on the simulated device, at once.
        return y.clone() if ctx.late else gradient * y, None, None


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def leaf(device: torch.device) -> torch.Tensor:
    x = torch.linspace(1, 2, ELEMENTS).to(device).requires_grad_()
    torch.accelerator.synchronize()
    return x


def swapper(device: torch.device, budget: int | str = "90%", policy: str = "swap") -> delta.Runtime:
    return delta.Runtime(
        1 << 34 if device.type == "fake" and budget == "90%" else budget,
        device=str(device),
        policy=policy,
        host_budget="256MiB",
        min_bytes=0,
    )


def test_a_page_of_a_stream_that_lags_behind(device, controls):
    """It is evicted while the program is on another stream, and its own has not written it yet."""
    x = leaf(device)
    runtime = swapper(device, policy="stress_swap_all")
    side = torch.Stream(device=device)
    for step in range(STEPS):
        x.grad = None
        with runtime.step():
            side.wait_stream(current())
            controls.delay(0.2, side)
            with side:
                out = Saves.apply(x, None, lambda: None)
            h = x.detach().clone().requires_grad_()
            for _ in range(5):
                h = h.sin()
            current().wait_stream(side)
            (out.sum() + h.sum()).backward()
        torch.accelerator.synchronize()
        assert torch.equal(x.grad.cpu(), x.detach().cpu()), f"step {step}"
        del out, h
    assert runtime.report().totals.swap_outs > STEPS
    runtime.close()


def test_a_page_comes_back_to_its_own_stream(device, controls):
    """Else its memory goes to another stream when backward lets it go, while its own still reads it."""
    runtime = swapper(device)
    side = torch.Stream(device=device)
    for step in range(STEPS):
        x = leaf(device)
        with runtime.step():
            side.wait_stream(current())
            with side:
                out = Saves.apply(x, None, lambda: controls.delay(0.2, side))
            current().wait_stream(side)
            z = out.sin().sum()
            torch.accelerator.synchronize()
            runtime.session.make_room(1 << 40)
            torch.accelerator.synchronize()
            z.backward()
        torch.accelerator.synchronize()
        assert torch.equal(x.grad.cpu(), x.detach().cpu()), f"step {step}"
    assert runtime.session.counters().swap_ins >= STEPS
    runtime.close()


def test_a_buffer_of_another_stream_stays(device, controls):
    """It was allocated before the runtime could see where, so nobody knows who gets its memory next."""
    runtime = swapper(device)
    for step in range(STEPS):
        x = leaf(device)
        buffer = torch.empty(ELEMENTS, device=device)
        torch.accelerator.synchronize()
        side = torch.Stream(device=device)
        with runtime.step():
            side.wait_stream(current())
            with side:
                buffer.copy_(x.detach())
                out = Saves.apply(x, buffer, lambda: None)
                buffer = None
                controls.slow_copies(20e6)
                runtime.session.make_room(1 << 40)
            other = torch.full((ELEMENTS,), 7.0, device=device)  # takes what came free
            torch.accelerator.synchronize()
            controls.slow_copies(0)
            current().wait_stream(side)
            out.sum().backward()
        torch.accelerator.synchronize()
        assert torch.equal(x.grad.cpu(), x.detach().cpu()), f"step {step}"
        del other
    runtime.close()


def test_no_python_runs_inside_a_copy(device, controls):
    """A dispatch mode would see the lane's copies, under a lock that freeing a graph needs."""
    seen: list[str] = []
    graphs: list[torch.Tensor] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            graphs.clear()
            return function(*args, **(kwargs or {}))

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.sin()
        return x.sum()

    runtime = swapper(device)
    x = leaf(device)
    with runtime.step():
        loss = chain(x)
        graphs.append(chain(x))
        with Spy():
            runtime.session.make_room(1 << 40)
            assert seen == []
            loss.backward()
        assert seen
    y = x.detach().requires_grad_()
    chain(y).backward()
    assert torch.equal(x.grad.cpu(), y.grad.cpu())
    runtime.close()


def test_room_is_made_of_what_is_on_its_way_back(device, controls):
    runtime = swapper(device)
    x = leaf(device)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x.sin()
        return x.sum()

    for _ in range(5):
        with runtime.step():
            chain(x).backward()
    x.grad = None
    freed: list[int] = []

    def late(_: object) -> None:
        freed.append(runtime.session.make_room(1 << 40))

    with runtime.step():
        loss = chain(x)
        runtime.session.make_room(1 << 40)
        torch.accelerator.synchronize()
        runtime.session.take_in_transfers()
        controls.slow_copies(50e6)
        node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
        node.register_prehook(late)
        loss.backward()
    controls.slow_copies(0)
    assert runtime.session.counters().prefetches > 2
    assert freed and freed[0] >= BYTES
    y = x.detach().requires_grad_()
    chain(y).backward()
    assert torch.equal(x.grad.cpu(), y.grad.cpu())
    runtime.close()
