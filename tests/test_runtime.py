"""The runtime as users see it: steps and contexts, what it leaves behind, exceptions, reports, strictness.

Covers the public API on the CPU with small networks. Does not cover: bad arguments (test_bad_input.py), every op and
real models (tests/sweeps), how long anything takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import delta_runtime as delta
from delta_runtime import _C, cpu_pool, entered
from delta_runtime.core.errors import RecomputeMismatch
from delta_runtime.core.step_graph import StepGraph
from tests.support.bitwise import (
    Snapshot,
    assert_same_bits,
    buffers,
    freeze,
    gradients,
    parameters,
    prefixed,
    random_state,
)
from tests.support.fixtures import one_thread  # noqa: F401

LAYERS = 8
WIDTH = 128
ROWS = 1024
STEPS = 4


class Net(nn.Module):
    """Linear, batch norm, GELU, dropout: half a MiB per activation, and state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def batch(index: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(index))


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    return model, optimizer


def state_of(model: nn.Module) -> Snapshot:
    return parameters(model) | buffers(model) | random_state()


def train(
    runtime: delta.Runtime | None = None,
    *,
    steps: int = STEPS,
    inside: bool = False,
    rows: int = ROWS,
) -> Snapshot:
    """Trains for a few steps, each in `runtime.step()`; `inside`: the optimizer too."""
    model, optimizer = build()
    snapshot: Snapshot = {}
    for index in range(steps):
        x = batch(index, rows)
        optimizer.zero_grad(set_to_none=True)
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = model(x)
            loss.backward()
            if inside:
                optimizer.step()
        if not inside:
            optimizer.step()
        snapshot |= prefixed(f"step {index}", {"loss": freeze(loss)} | gradients(model))
        del loss
    return snapshot | state_of(model)


@dataclass(frozen=True)
class Ordinary:
    """An ordinary run: its bits, and a budget that leaves it half of what it needs."""

    snapshot: Snapshot
    base_bytes: int
    peak_bytes: int

    def budget(self, share: float = 0.5) -> int:
        return cpu_pool.allocated_bytes() + int(share * (self.peak_bytes - self.base_bytes))


@pytest.fixture(scope="module")
def ordinary() -> Ordinary:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cpu_pool.install()
    gc.collect()
    base_bytes = cpu_pool.allocated_bytes()
    cpu_pool.reset_peak()
    snapshot = train()
    torch.set_num_threads(threads)
    return Ordinary(snapshot, base_bytes, cpu_pool.peak_bytes())


def leftovers() -> list[str]:
    """What a runtime that was left must not leave behind."""
    found = []
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        found.append("saved-tensor hooks")
    if _C.cpu_pool.soft_limit_bytes():
        found.append("a soft limit")
    if entered.entered() is not None:
        found.append("an entered runtime")
    if _global_optimizer_pre_hooks:
        found.append("an optimizer hook before")
    if _global_optimizer_post_hooks:
        found.append("an optimizer hook after")
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    yield
    found = leftovers()
    if found:  # so that one fault does not make all later tests fail
        runtime = entered.entered()
        if runtime is not None:
            entered.release(runtime)
            runtime.session.leave()
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        _global_optimizer_pre_hooks.clear()
        _global_optimizer_post_hooks.clear()
    assert not found


# ------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("inside", [False, True], ids=["optimizer outside", "optimizer inside"])
def test_steps_inside_half_give_the_same_bits(ordinary, inside):
    budget = ordinary.budget()
    runtime = delta.Runtime(budget)
    cpu_pool.reset_peak()
    with cpu_pool.capacity(budget):
        assert_same_bits(train(runtime, inside=inside), ordinary.snapshot)
    assert cpu_pool.peak_bytes() <= budget
    report = runtime.report()
    assert report.totals.steps == STEPS
    assert report.last.drops > 0 and report.last.rebuilds > 0
    assert report.over_budget_bytes == 0
    runtime.close()


def test_a_context_finds_the_steps_by_itself(ordinary):
    with delta.Runtime(ordinary.budget()) as runtime:
        assert_same_bits(train(), ordinary.snapshot)
    assert runtime.report().totals.steps == STEPS
    assert runtime.report().last.drops > 0


def test_a_context_around_marked_steps(ordinary):
    with delta.Runtime(ordinary.budget()) as runtime:
        assert_same_bits(train(runtime), ordinary.snapshot)
    assert runtime.report().totals.steps == STEPS


@pytest.mark.parametrize("marked", [True, False], ids=["one step", "found steps"])
def test_gradient_accumulation(ordinary, marked):
    def accumulate(runtime: delta.Runtime | None) -> Snapshot:
        model, optimizer = build()
        for index in range(2):
            with runtime.step() if runtime and marked else contextlib.nullcontext():
                for part in range(3):
                    model(batch(3 * index + part)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return state_of(model)

    expected = accumulate(None)
    runtime = delta.Runtime(ordinary.budget())
    with contextlib.nullcontext() if marked else runtime:
        assert_same_bits(accumulate(runtime), expected)
    assert runtime.report().totals.drops > 0
    if marked:
        assert runtime.report().totals.steps == 2


def test_an_optimizer_that_calls_a_closure(ordinary):
    """The forward inside optimizer.step(closure) is a forward like any other."""

    def run() -> Snapshot:
        model, optimizer = build()
        for index in range(2):
            x = batch(index)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad(set_to_none=True)
                loss = model(x)
                loss.backward()
                return loss

            optimizer.step(closure)
        return state_of(model)

    expected = run()
    with delta.Runtime(ordinary.budget()) as runtime:
        assert_same_bits(run(), expected)
    assert runtime.report().totals.drops > 0
    assert runtime.report().over_budget_bytes == 0


def test_alternating_shapes(ordinary):
    def run(runtime: delta.Runtime | None) -> Snapshot:
        model, optimizer = build()
        for index in range(6):
            x = batch(index, (ROWS, ROWS // 2)[index % 2])
            optimizer.zero_grad(set_to_none=True)
            with runtime.step() if runtime else contextlib.nullcontext():
                model(x).backward()
            optimizer.step()
        return state_of(model)

    expected = run(None)
    budget = ordinary.budget()
    runtime = delta.Runtime(budget)
    assert_same_bits(run(runtime), expected)
    assert runtime.report().totals.peak_bytes <= budget


def test_two_backwards_over_one_graph(ordinary):
    def run() -> Snapshot:
        model, _ = build()
        loss = model(batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    expected = run()
    with delta.Runtime(ordinary.budget()) as runtime:
        assert_same_bits(run(), expected)
    assert runtime.report().totals.rebuilds > 0


def test_evaluation_between_steps_counts_as_no_step(ordinary):
    model, _ = build()
    runtime = delta.Runtime(ordinary.budget())
    with runtime.step(), torch.no_grad():
        model(batch(0))
    assert runtime.report().totals.steps == 0


@pytest.mark.parametrize("policy", ["auto", "delta", "dtr", "lru", "next_use"])
def test_policies_give_the_same_bits(ordinary, policy):
    runtime = delta.Runtime(ordinary.budget(0.6), policy=policy)
    assert_same_bits(train(runtime), ordinary.snapshot)
    assert runtime.report().totals.drops > 0


@pytest.mark.parametrize("verify", ["always", "first", "off"])
def test_every_way_of_verifying_gives_the_same_bits(ordinary, verify):
    runtime = delta.Runtime(ordinary.budget(), verify=verify)
    assert_same_bits(train(runtime, steps=2), train(steps=2))
    assert runtime.report().totals.drops > 0


def test_policy_off_observes_and_evicts_nothing(ordinary):
    runtime = delta.Runtime(ordinary.budget(), policy="off")
    assert_same_bits(train(runtime), ordinary.snapshot)
    report = runtime.report()
    assert (report.totals.drops, report.budget_bytes) == (0, 0)
    assert report.totals.packs > 0
    assert "only observed" in report.verdict()


def test_several_runtimes_one_after_the_other(ordinary):
    for share in (0.5, 0.7, 0.5):
        runtime = delta.Runtime(ordinary.budget(share))
        assert_same_bits(train(runtime), ordinary.snapshot)
        assert runtime.report().totals.steps == STEPS
        runtime.close()
        assert not leftovers()


def test_runtimes_in_turns(ordinary):
    """Two that are not entered at the same time do not disturb each other."""
    first, second = delta.Runtime(ordinary.budget(0.5)), delta.Runtime(ordinary.budget(0.7))
    model, optimizer = build()
    for index in range(STEPS):
        x = batch(index)
        optimizer.zero_grad(set_to_none=True)
        with (first, second)[index % 2].step():
            loss = model(x)
            loss.backward()
        optimizer.step()
        del loss
    assert_same_bits(state_of(model), {name: ordinary.snapshot[name] for name in state_of(model)})
    assert first.report().totals.steps == second.report().totals.steps == STEPS // 2


# -------------------------------------------------------------------------- backward outside of the context


def forward_inside(budget: int, *, close: bool) -> tuple[nn.Module, torch.Tensor, delta.Runtime]:
    model, _ = build()
    runtime = delta.Runtime(budget)
    with runtime.step():
        loss = model(batch(0))
    if close:
        runtime.close()
    return model, loss, runtime


@pytest.mark.parametrize("close", [False, True], ids=["left", "closed"])
def test_backward_after_the_runtime_was_left(ordinary, close):
    expected, _ = build()
    expected(batch(0)).backward()
    model, loss, runtime = forward_inside(ordinary.budget(), close=close)
    assert runtime.report().totals.drops > 0
    loss.backward()
    assert_same_bits(gradients(model), gradients(expected))


def test_backward_after_the_runtime_is_gone(ordinary):
    expected, _ = build()
    expected(batch(0)).backward()
    model, loss, runtime = forward_inside(ordinary.budget(), close=True)
    del runtime
    gc.collect()
    loss.backward()
    assert_same_bits(gradients(model), gradients(expected))


def test_a_graph_that_is_never_used_leaves_nothing_live(ordinary):
    base_bytes = cpu_pool.allocated_bytes()
    model, loss, runtime = forward_inside(ordinary.budget(), close=False)
    del model, loss
    gc.collect()
    assert runtime.session.levels().live_tickets == 0
    assert cpu_pool.allocated_bytes() == base_bytes


@pytest.mark.parametrize("marked", [True, False], ids=["step", "context"])
def test_many_steps_leave_no_more_live_than_a_few(ordinary, marked):
    """Fresh inputs at each step: they are anchored while recipes need them, and not one step longer."""
    model, optimizer = build()
    runtime = delta.Runtime(ordinary.budget())
    live, records = [], []
    with contextlib.nullcontext() if marked else runtime:
        for index in range(12):
            x = batch(index)
            optimizer.zero_grad(set_to_none=True)
            with runtime.step() if marked else contextlib.nullcontext():
                model(x).backward()
            optimizer.step()
            del x
            gc.collect()
            live.append(cpu_pool.allocated_bytes())
            records.append(_C.live_records())
    assert runtime.report().last.drops > 0
    assert live[-1] <= live[3] + 65536  # malloc's rounding; a batch is eight times that
    assert records[-1] <= records[3]


def test_backward_of_an_earlier_forward_inside_a_step(ordinary):
    expected, _ = build()
    expected(batch(0)).backward()
    model, _ = build()
    loss = model(batch(0))  # ordinary
    runtime = delta.Runtime(ordinary.budget(1.0))
    with runtime.step():
        loss.backward()
    assert_same_bits(gradients(model), gradients(expected))


# ---------------------------------------------------------------------------------------------- exceptions


class Stop(Exception):
    """Raised by the tests in unexpected places."""


def fail_in_forward(model: nn.Module, x: torch.Tensor) -> None:
    model(x)
    raise Stop


def fail_in_a_kernel(model: nn.Module, x: torch.Tensor) -> None:
    model(x) @ torch.ones(3, 3)


def fail_in_backward(model: nn.Module, x: torch.Tensor) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise Stop

    handle = model.blocks[2][0].weight.register_hook(fail)
    try:
        model(x).backward()
    finally:
        handle.remove()


def fail_by_keyboard(model: nn.Module, x: torch.Tensor) -> None:
    model(x).backward()
    raise KeyboardInterrupt


FAILURES = [fail_in_forward, fail_in_a_kernel, fail_in_backward, fail_by_keyboard]


@pytest.mark.parametrize("marked", [True, False], ids=["step", "context"])
@pytest.mark.parametrize("fail", FAILURES)
def test_an_exception_leaves_nothing_behind(ordinary, fail, marked):
    runtime = delta.Runtime(ordinary.budget())
    model, _ = build()
    before = parameters(model)
    with pytest.raises((Stop, RuntimeError, KeyboardInterrupt)):
        with runtime.step() if marked else runtime:
            fail(model, batch(0))
    assert not leftovers()
    assert_same_bits(parameters(model), before)
    del model
    # The same runtime trains on as if nothing had been, and still manages.
    assert_same_bits(train(runtime), ordinary.snapshot)
    assert runtime.report().last.drops > 0


def test_an_optimizer_that_raises_does_not_blind_the_runtime(ordinary):
    """Taping is off while an optimizer steps; an exception in there must not leave it off."""

    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            raise Stop

    model, _ = build()
    runtime = delta.Runtime(ordinary.budget())
    optimizer = Failing(model.parameters(), lr=0.1)
    with contextlib.suppress(Stop), runtime.step():
        model(batch(0)).backward()
        optimizer.step()
    assert not leftovers()
    del model, optimizer
    assert_same_bits(train(runtime), ordinary.snapshot)
    assert runtime.report().last.drops > 0


def test_a_warning_made_an_error_leaves_nothing_behind():
    """Over the budget the runtime warns; where warnings are errors, that one leaves it cleanly too."""
    model, _ = build()
    runtime = delta.Runtime(cpu_pool.allocated_bytes() + 4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="budget"), runtime.step():
            model(batch(0)).backward()
    assert not leftovers()


def test_out_of_memory_at_the_capacity_leaves_training_intact(ordinary):
    """A capacity below what the budget allows: the OutOfMemoryError goes through, and one can go on."""
    model, _ = build()
    before = parameters(model)
    runtime = delta.Runtime(ordinary.budget(1.0))
    with cpu_pool.capacity(cpu_pool.allocated_bytes() + 2**20):
        with pytest.raises(torch.OutOfMemoryError), runtime.step():
            model(batch(0)).backward()
    assert not leftovers()
    assert_same_bits(parameters(model), before)
    del model
    gc.collect()
    assert_same_bits(train(runtime), ordinary.snapshot)


# -------------------------------------------------------------------------------------- budgets not to be met


def test_over_the_budget_it_warns_once_and_gives_the_same_bits(ordinary):
    runtime = delta.Runtime(ordinary.budget(0.05))
    with pytest.warns(RuntimeWarning, match="budget of .* was passed") as caught:
        assert_same_bits(train(runtime), ordinary.snapshot)
    assert len(caught) == 1
    report = runtime.report()
    assert report.over_budget_bytes == report.totals.peak_bytes - report.budget_bytes > 0
    assert "passed by" in report.verdict()
    assert report.bounds.lower_op and report.bounds.lower_op in report.verdict()
    assert report.budget_bytes < report.bounds.lower_bytes <= report.bounds.least_bytes
    assert report.shortfall is not None and report.shortfall.missing_bytes > 0
    assert "not found when asked for" in str(report)


def test_where_all_was_found_nothing_is_said_of_room(ordinary):
    runtime = delta.Runtime(ordinary.budget())
    train(runtime)
    assert runtime.report().shortfall is None
    assert "not found when asked for" not in str(runtime.report())
    runtime.close()


def test_strict_raises_budget_infeasible_and_one_can_go_on(ordinary):
    model, optimizer = build()
    before = parameters(model)
    budget = ordinary.budget(0.1)
    runtime = delta.Runtime(budget, strict=True)
    with pytest.raises(delta.BudgetInfeasible) as caught, runtime.step():
        model(batch(0)).backward()
    error = caught.value
    assert not leftovers()
    assert error.asked_bytes == budget
    assert error.lower_bound_bytes > budget
    assert error.lower_bound_op.startswith("aten::")
    assert error.lower_bound_op in str(error)
    assert "were not found when room was asked for" in str(error)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert_same_bits(parameters(model), before)
    runtime.close()
    del model, optimizer, caught, error
    gc.collect()
    larger = delta.Runtime(ordinary.budget(), strict=True)
    assert_same_bits(train(larger), ordinary.snapshot)
    assert larger.report().totals.drops > 0


def test_strict_never_passes_the_budget(ordinary):
    budget = ordinary.budget()
    runtime = delta.Runtime(budget, strict=True)
    assert_same_bits(train(runtime), ordinary.snapshot)
    assert runtime.report().totals.peak_bytes <= budget
    runtime.close()


# ------------------------------------------------------------------------------------------------- reports


def test_a_report_before_any_step_says_so():
    runtime = delta.Runtime("100%")
    report = runtime.report()
    assert report.totals.steps == 0
    assert "No step" in report.verdict()
    assert "No step" in str(report)
    with pytest.raises(delta.UsageError, match="no step"):
        runtime.graph()


def test_a_report_has_the_figures_of_the_pool(ordinary):
    budget = ordinary.budget()
    runtime = delta.Runtime(budget)
    model, _ = build()
    cpu_pool.reset_peak()
    with runtime.step():
        model(batch(0)).backward()
    report = runtime.report()
    assert report.last.peak_bytes == cpu_pool.peak_bytes() + report.last.uncounted_bytes
    assert report.budget_bytes == budget
    assert report.activation_bytes > ordinary.peak_bytes - budget
    assert report.as_dict()["last"]["drops"] == report.last.drops
    assert report.last.dropped_bytes > 0
    table = str(report)
    for told in ("budget", "peak (allocator)", "recompute time", "rescues", report.bounds.lower_op):
        assert told in table
    assert "Freed" in report.verdict()


def test_the_graph_counts_what_an_ordinary_run_needs(ordinary):
    """Its ordinary peak, seen from inside half, is the peak of a run without the runtime."""
    model, _ = build()
    base_bytes = cpu_pool.allocated_bytes()
    cpu_pool.reset_peak()
    model(batch(0)).backward()
    peak_bytes = cpu_pool.peak_bytes() - base_bytes
    model.zero_grad(set_to_none=True)
    runtime = delta.Runtime(ordinary.budget())
    with runtime.step():
        model(batch(0)).backward()
    graph = runtime.graph()
    assert graph.peak_bytes - base_bytes == pytest.approx(peak_bytes, rel=0.05)
    assert graph.n_ops > 0 and len(graph.saved) > 0


@pytest.mark.parametrize("layers", [[nn.SiLU(inplace=True)], [nn.Hardswish(inplace=True)]])
def test_the_graph_of_a_clone_that_autograd_saved_is_read_back(layers):
    """The clone, made within an op that writes in place, is an op of the same tick."""
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), *layers, nn.Linear(32, 32))
    runtime = delta.Runtime("100%", policy="off", min_bytes=0)
    with runtime.step():
        model(torch.randn(16, 32)).square().mean().backward()
    graph = runtime.graph()
    assert 0 in np.diff(graph.op_tick)
    assert StepGraph.from_json(graph.to_json()).to_json() == graph.to_json()


def test_a_report_says_why_nothing_could_be_evicted():
    model, _ = build()
    runtime = delta.Runtime("100%", min_bytes="1GiB")
    with runtime.step():
        model(batch(0)).backward()
    report = runtime.report()
    assert report.totals.packed_bytes == 0
    assert "smaller than min_bytes" in report.verdict()


def test_a_budget_that_never_binds_is_said_to_be_enough():
    model, _ = build()
    runtime = delta.Runtime("100%")
    with runtime.step():
        model(batch(0)).backward()
    assert runtime.report().totals.drops == 0
    assert "fits the budget" in runtime.report().verdict()


# ---------------------------------------------------------------------------------- written behind the back


def write_in_the_middle(model: nn.Module, x: torch.Tensor, mark: bool) -> Snapshot:
    """Overwrites an intermediate by its address, which nothing sees."""

    def middle() -> torch.Tensor:
        y = model.blocks[0](x)
        tripled = y.detach() * 3
        ctypes.memmove(y.data_ptr(), tripled.data_ptr(), y.nbytes)
        if mark:
            delta.mark_written(y)
        return y

    model.blocks[1](middle()).square().sum().backward()
    return gradients(model)


def test_mark_written_keeps_what_was_written_outside():
    expected = write_in_the_middle(build()[0], batch(0), mark=False)
    with delta.Runtime("100%", policy="stress_drop_all"):
        told = write_in_the_middle(build()[0], batch(0), mark=True)
    assert_same_bits(told, expected)
    # And without it the old content comes back, which is noticed: the test can fail.
    with (
        delta.Runtime("100%", policy="stress_drop_all"),
        pytest.raises(RecomputeMismatch, match="mark_written"),
    ):
        write_in_the_middle(build()[0], batch(0), mark=False)


def test_mark_written_of_a_runtime_and_without_one():
    x = torch.ones(2048)
    delta.mark_written(x)  # no runtime: nothing to tell
    runtime = delta.Runtime("100%")
    with runtime.step():
        runtime.mark_written(x)


# ------------------------------------------------------------------------------------------------- disable


def test_disable_takes_everything_away_for_its_duration(ordinary):
    model, _ = build()
    runtime = delta.Runtime(ordinary.budget())
    with runtime.step():
        before = runtime.session.counters()
        with delta.disable():
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert _C.cpu_pool.soft_limit_bytes() == 0
            model(batch(0, rows=64)).backward()
        after = runtime.session.counters()
        assert (after.packs, after.ops) == (before.packs, before.ops)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        assert _C.cpu_pool.soft_limit_bytes() > 0
        model(batch(1)).backward()
    assert runtime.report().totals.drops > 0


def test_disable_in_the_middle_of_a_forward_gives_the_same_bits(ordinary):
    def run(runtime: delta.Runtime | None) -> Snapshot:
        model, _ = build()
        with runtime.step() if runtime else contextlib.nullcontext():
            x = model.blocks[0](batch(0))
            with delta.disable():
                x = model.blocks[1](x)
            for block in model.blocks[2:]:
                x = block(x)
            x.square().mean().backward()
        return gradients(model) | state_of(model)

    runtime = delta.Runtime(ordinary.budget(0.4))
    assert_same_bits(run(runtime), run(None))
    assert runtime.report().totals.drops > 0


def test_disable_under_exceptions_nested_and_without_a_runtime():
    with delta.disable():
        pass
    runtime = delta.Runtime("100%")
    with runtime.step():
        with pytest.raises(Stop), delta.disable(), delta.disable():
            raise Stop
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def loader_that_is_disabled(batches: int) -> Iterator[None]:
    """Suspended inside of the block, as long as somebody holds it."""
    with delta.disable():
        for _ in range(batches):
            yield


@pytest.mark.parametrize("again", [False, True], ids=["left", "entered again"])
def test_disable_that_ends_after_its_runtime_was_left_puts_nothing_back(again):
    runtime = delta.Runtime("100%", device="cpu")
    loader = loader_that_is_disabled(3)
    with runtime:
        next(loader)
    if again:
        runtime.__enter__()
    loader.close()
    if again:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is runtime.hooks.pair[0]
        runtime.__exit__(None, None, None)
    assert not leftovers()
    with runtime.step(), delta.disable():
        pass
    runtime.close()
    assert not leftovers()


def test_disable_that_ends_on_another_thread_warns_and_stays_off_until_the_runtime_is_left():
    runtime = delta.Runtime("100%", device="cpu")
    loader = loader_that_is_disabled(3)
    with runtime:
        next(loader)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            thread = threading.Thread(target=loader.close)
            thread.start()
            thread.join()
        assert ["another thread" in str(each.message) for each in told] == [True]
    assert not leftovers()
    with runtime:
        assert runtime.hooks.are_attached
    runtime.close()
    assert not leftovers()


def test_disable_inside_of_other_hooks_takes_ours_away_and_not_theirs(ordinary):
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    model, _ = build()
    runtime = delta.Runtime(ordinary.budget(1.0))
    with runtime.step():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with delta.disable():
                before = len(packed)
                model(batch(0)).backward()
                assert len(packed) > before
            before = len(packed)
            model(batch(0)).backward()
            assert len(packed) > before


# ---------------------------------------------------------------------------------------- closing, threads


def test_close_inside_a_step_and_inside_a_context(ordinary):
    model, _ = build()
    runtime = delta.Runtime(ordinary.budget())
    with runtime.step():
        loss = model(batch(0))
        runtime.close()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        loss.backward()
    assert not leftovers()
    other = delta.Runtime(ordinary.budget())
    with other:
        other.close()
    assert not leftovers()


def test_entering_twice_is_leaving_twice(ordinary):
    runtime = delta.Runtime(ordinary.budget())
    with runtime:
        with runtime:
            pass
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def test_another_thread_cannot_enter_it_but_can_run_a_backward(ordinary):
    expected, _ = build()
    expected(batch(0)).backward()
    model, _ = build()
    runtime = delta.Runtime(ordinary.budget())
    errors = []

    def work(loss: torch.Tensor) -> None:
        torch.set_num_threads(1)
        try:
            with runtime:
                pass
        except delta.UsageError as error:
            errors.append(error)
        loss.backward()

    with runtime.step():
        loss = model(batch(0))
        thread = threading.Thread(target=work, args=(loss,))
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "thread" in str(errors[0])
    assert_same_bits(gradients(model), gradients(expected))
