"""torch.compile beside a runtime: compiled optimizers, and what dynamo traces. Compiled writes: test_versions.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

STEPS = 5
Entered = Callable[[], AbstractContextManager[object]]
Run = tuple[list[Tensor], int]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_step(kind: str, backend: str, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    if kind == "method":
        return torch.compile(optimizer.step, backend=backend)

    @torch.compile(backend=backend)
    def step() -> None:
        optimizer.step()

    return step


@dataclass(frozen=True)
class Training:
    kind: str
    name: str
    backend: str

    def run(self, step_of: Entered = nullcontext) -> Run:
        """The losses and weights of all steps, and how many graphs were compiled."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        results = self._train(step_of)
        return results, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def _train(self, step_of: Entered) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        optimizer = getattr(torch.optim, self.name)(net.parameters(), lr=torch.tensor(0.01))
        step = compiled_step(self.kind, self.backend, optimizer)
        kept = None
        results = []
        for k in range(STEPS):
            with step_of():
                optimizer.zero_grad()
                loss = net(torch.linspace(-1, 1, 512).view(8, 64) + k).square().mean()
                loss.backward()
                # What is dropped of this graph is made again from weights that have been written since.
                table = net[0].weight.detach() * 1.5
                late = (table.exp() * torch.ones(64, 64, requires_grad=True)).sin().sum()
                del table
                torch.zeros(1).add(1.0)
                step()
                if kept is not None:
                    kept.backward()
                kept = late
            results += [loss.detach(), *(p.detach().clone() for p in net.parameters())]
        return results


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("kind", ["method", "function"])
@pytest.mark.parametrize("per_step", [False, True])
def test_a_compiled_step(per_step: bool, kind: str, name: str, backend: str) -> None:
    cpu_pool.install()
    training = Training(kind, name, backend)
    ordinary = training.run()
    for policy in ("stress_drop_all", "auto"):
        runtime = delta.Runtime("100%", policy=policy, device="cpu", min_bytes=0)
        if per_step:
            results, graphs = training.run(step_of=runtime.step)
        else:
            with runtime:
                results, graphs = training.run()
        assert all(torch.equal(a, b) for a, b in zip(results, ordinary[0], strict=True))
        assert graphs <= ordinary[1] + 1, "each step is compiled anew"
        if policy == "stress_drop_all":
            assert runtime.report().totals.rebuilds > 0
        runtime.close()


def test_what_compiled_code_and_dynamo_hold_of_pytorch_stays_what_it_is() -> None:
    public, private = torch.autograd.graph.increment_version, torch._C._increment_version
    code = public.__code__
    runtime = delta.Runtime("100%", device="cpu")
    with runtime:
        assert torch.autograd.graph.increment_version is public
        assert torch._C._increment_version is private
        t = torch.zeros(3)
        public(t)
        public([t, t])
        public(x for x in (t,))
        assert t._version == 4
        with pytest.raises(RuntimeError, match="increment_version"):
            public(3)
    runtime.close()
    assert public.__code__ is code


@pytest.mark.parametrize("policy", ["dtr", "auto"])
def test_dynamo_leaves_the_policy_alone(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that it gives up, an op that needs room asks Python whom to evict."""
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda fault: told.append(str(fault.exc_value)))
    cpu_pool.install()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> None:
        for _ in range(1):
            print(end="")  # a graph break in a loop
            optimizer.zero_grad()
            for layer in net:
                x = layer(x).sin()
                print(end="")
            x.square().mean().backward()
            optimizer.step()

    budget_bytes = cpu_pool.allocated_bytes() + 6_000_000
    with delta.Runtime(budget_bytes, device="cpu", policy=policy, min_bytes=0) as runtime:
        for _ in range(4):
            step(torch.ones(512, 256))
    assert runtime.report().totals.drops > 0
    assert told == []
    runtime.close()


LENT: dict[str, Callable[[Tensor], object]] = {
    "numpy": lambda t: t.numpy(),
    "__array__": lambda t: np.asarray(t),
    "DLPack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "a storage's slice": lambda t: t.untyped_storage()[0:4],
    "a storage's writer": lambda t: t.untyped_storage().fill_(1),
}


@pytest.mark.parametrize("way", LENT.values(), ids=LENT)
def test_dynamo_leaves_what_tells_of_raw_memory_alone(way: Callable[[Tensor], object]) -> None:
    """Each loan has a number of its own: what dynamo made of one would fit no other."""

    @torch.compile(backend="eager")
    def lends(t: Tensor) -> None:
        for _ in range(1):
            print(end="")  # a graph break in a loop
            way(t)
            print(end="")

    def frames() -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for _ in range(12):
            lends(torch.ones(8))
        return torch._dynamo.utils.counters["frames"]["total"]

    without = frames()
    with delta.Runtime("100%", device="cpu") as runtime:
        # Fewer, where what other tests compiled is looked into without the runtime.
        assert frames() <= without
    runtime.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamo_does_not_trace_what_counts_a_write(backend: str) -> None:
    """Where dynamo gives a frame up it goes on with what that calls, and a count that it traces is lost."""

    @torch.compile(backend=backend)
    def counts(x: Tensor) -> None:
        for _ in range(1):
            print(end="")  # a graph break in a loop
            torch.autograd.graph.increment_version(x)

    with delta.Runtime("100%", device="cpu") as runtime:
        for _ in range(3):
            x, w = torch.ones(64), torch.ones(64, requires_grad=True)
            y = (x * w).sum()
            counts(x)
            assert x._version == 1
            with pytest.raises(RuntimeError):
                y.backward()
    runtime.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_keeps_its_dynamic_sizes(backend: str) -> None:
    """One graph for all lengths: nothing may ask a traced tensor for a size that is a symbol."""

    @torch.compile(backend=backend, dynamic=True)
    def of_any_length(x: Tensor) -> Tensor:
        return (x.sin() @ x.mT * x.shape[0]).sum()

    def graphs_and_gradients() -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        inputs = [torch.arange(3.0 * n).view(n, 3).requires_grad_() for n in (7, 9, 11, 13)]
        for x in inputs:
            of_any_length(x).backward()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], [x.grad for x in inputs]

    graphs, wanted = graphs_and_gradients()
    runtime = delta.Runtime("100%", device="cpu")
    with runtime.step():
        under_runtime, got = graphs_and_gradients()
    runtime.close()
    assert under_runtime == graphs == 1
    assert all(torch.equal(*pair) for pair in zip(wanted, got, strict=True))


def test_an_exported_program_keeps_its_dynamic_sizes() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3))
    runtime = delta.Runtime("100%", device="cpu")
    with runtime.step():
        program = torch.export.export(
            net, (torch.randn(7, 3),), dynamic_shapes=({0: torch.export.Dim("length")},)
        )
        program = program.run_decompositions()  # saves traced tensors
    runtime.close()
    assert len(program.range_constraints) == 1
    assert program.module()(torch.ones(11, 3)).shape == (11, 3)
