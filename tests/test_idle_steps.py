"""Which steps are idle; that nothing is observed in them, and that a step which is another does not pass the budget.

Does not cover: how much time an idle step takes; benchmarks/overhead.py measures that.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.idle_steps import IDLE_STEPS, QUIET_STEPS, IdleSteps
from delta_runtime.known_step import CALIBRATION_STEPS, StepCost
from delta_runtime.torch_hooks import any_hooks
from tests.support.fixtures import one_thread  # noqa: F401

QUIET = StepCost(
    fingerprint=7, ops=50, begin_bytes=100, peak_bytes=600, seconds=0.1, rebuild_s=0.0, whole=True
)
SETTLED = CALIBRATION_STEPS + QUIET_STEPS
"""Steps before the first idle one."""
WIDTH, LAYERS, ROWS = 64, 6, 256
ROW_BYTES = 4 * WIDTH * ROWS


# ---------------------------------------------------------------- which steps


def quiet_steps(idle: IdleSteps, steps: int, cost: StepCost = QUIET) -> list[bool]:
    """What is said of so many steps that are all alike."""
    return [idle.saw_quiet(cost) for _ in range(steps)]


def test_enough_quiet_steps_in_a_row_make_the_next_ones_idle() -> None:
    idle = IdleSteps(1000)
    assert quiet_steps(idle, QUIET_STEPS - 1) == [False] + [True] * (QUIET_STEPS - 2)
    assert not idle.may_begin(100)
    quiet_steps(idle, 1)
    for _ in range(IDLE_STEPS):
        assert idle.may_begin(100)
        idle.was_idle()
    assert not idle.may_begin(100), "one is observed from time to time"
    quiet_steps(idle, 1)
    assert idle.may_begin(100)


def test_a_step_that_is_not_quiet_ends_it() -> None:
    idle = IdleSteps(1000)
    quiet_steps(idle, QUIET_STEPS)
    idle.forget()
    assert not idle.may_begin(0)
    quiet_steps(idle, QUIET_STEPS - 1)
    assert not idle.may_begin(0)


def test_what_is_live_at_the_begin_has_to_leave_room() -> None:
    idle = IdleSteps(1000)
    quiet_steps(idle, QUIET_STEPS)
    quiet_steps(idle, 1, replace(QUIET, peak_bytes=700))
    assert idle.may_begin(280) and not idle.may_begin(281)


def test_one_that_passed_the_budget_costs_many_observed_steps() -> None:
    idle = IdleSteps(1000)
    quiet_steps(idle, QUIET_STEPS)
    idle.passed()
    quiet_steps(idle, 8 * QUIET_STEPS - 1)
    assert not idle.may_begin(0)
    quiet_steps(idle, 1)
    assert idle.may_begin(0)


# ---------------------------------------------------------------- in the runtime


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.again = 1  # times that the last layers are run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:4]:
            x = torch.tanh(torch.nn.functional.dropout(layer(x), 0.1))
        for _ in range(self.again):
            for layer in self.layers[4:]:
                x = torch.tanh(layer(x))
        return x.square().mean()


class Training:
    """A net in training, with room for `share` of what a step of ROWS rows needs; all its steps so far."""

    def __init__(self, share: float | None, **options: object) -> None:
        torch.manual_seed(0)
        cpu_pool.install()
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.runtime: delta.Runtime | None = None
        self.step(ROWS)  # gradients are there from here on
        gc.collect()
        cpu_pool.reset_peak()
        self.base_bytes = cpu_pool.allocated_bytes()
        self.step(ROWS)
        self.range_bytes = cpu_pool.peak_bytes() - self.base_bytes
        self.budget_bytes = 0
        if share is not None:
            self.budget_bytes = self.base_bytes + int(share * self.range_bytes)
            self.runtime = delta.Runtime(self.budget_bytes, device="cpu", min_bytes=0, **options)

    def step(self, rows: int = ROWS) -> list[bytes]:
        """Loss and gradients of one step, bit for bit, outside of the pool."""
        torch.manual_seed(rows)
        x = torch.randn(rows, WIDTH)
        with self.runtime.step() if self.runtime else contextlib.nullcontext():
            loss = self.net(x)
            loss.backward()
        found = [loss.detach(), *(p.grad for p in self.net.parameters())]
        told = [each.numpy().tobytes() for each in found]
        del loss, found
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return told

    def settle(self) -> None:
        """Train until steps are idle."""
        for _ in range(SETTLED):
            self.step()
            self.runtime.wait_for_plan()

    @property
    def idle_steps(self) -> int:
        return self.runtime.report().totals.idle_steps


def trained(training: Training, rows: list[int]) -> list[bytes]:
    return [each for n in rows for each in training.step(n)]


def ordinary(rows: list[int]) -> list[bytes]:
    """The same without a runtime."""
    found = trained(Training(None), rows)
    gc.collect()
    return found


Make = Callable[..., Training]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes trainings, and ends them behind the test."""
    made: list[Training] = []

    def make(share: float = 1.5, **options: object) -> Training:
        made.append(Training(share, **options))
        return made[-1]

    yield make
    for training in made:
        training.runtime.close()
    assert not any_hooks()


@pytest.fixture
def training(make: Make) -> Training:
    return make()


def test_idle_steps_are_not_observed_and_change_no_bit(training: Training) -> None:
    rows = [ROWS] * (SETTLED + 10)
    wanted = ordinary(rows)
    found = trained(training, rows[:SETTLED])
    idle_steps = training.idle_steps
    packs, ops = training.runtime.session.packs(), training.runtime.session.counters().ops
    found += trained(training, rows[SETTLED:])
    assert training.runtime.session.packs() == packs
    assert training.runtime.session.counters().ops == ops
    assert found == wanted
    assert training.idle_steps == idle_steps + 10
    assert f"{training.idle_steps} of them were idle" in str(training.runtime.report())


def test_nothing_is_hooked_in_an_idle_step(training: Training) -> None:
    training.settle()
    training.step()
    hooked = []
    training.net.layers[5].register_forward_hook(lambda *_: hooked.append(any_hooks()))
    training.step()
    assert hooked == [False]


@pytest.mark.parametrize("factor", [2, 3])
def test_a_step_that_is_larger_from_its_first_op_stays_inside_the_budget(
    training: Training, factor: int
) -> None:
    rows = [ROWS] * (SETTLED + 20) + [factor * ROWS, ROWS, factor * ROWS, *[ROWS] * 3]
    wanted = ordinary(rows)
    found = trained(training, rows[: SETTLED + 20])
    assert training.idle_steps >= 19
    cpu_pool.reset_peak()
    drops = training.runtime.session.counters().drops
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found += trained(training, rows[SETTLED + 20 :])
    assert training.runtime.session.counters().drops > drops
    assert found == wanted
    assert cpu_pool.peak_bytes() <= training.budget_bytes
    assert training.runtime.report().totals.over_budget_steps == 0


def test_a_step_that_grows_later_wakes_up(make: Make) -> None:
    grown = [1] * (SETTLED + 1) + [9] * 3 + [1] * 3
    ordinary, wanted = Training(None), []
    for again in grown:
        ordinary.net.again = again
        wanted += ordinary.step()
    found = []
    training = make(1.9)
    for number, again in enumerate(grown):
        if number == SETTLED:
            cpu_pool.reset_peak()
        training.net.again = again
        found += training.step()
    assert found == wanted
    assert training.runtime.report().totals.drops > 0
    assert cpu_pool.peak_bytes() <= training.budget_bytes


@pytest.mark.filterwarnings("ignore")  # of a budget that is passed
@pytest.mark.parametrize("at", [4, 6])  # behind the first ops
def test_the_op_at_which_it_wakes_up_is_no_recipe(training: Training, at: int) -> None:
    """Its parts are no ops of their own: `addmm` copies the bias, and adds the product past the dispatcher."""
    grown = []

    def steps(training: Training, *, last_grows: bool) -> list[bytes]:
        grows = False

        def forward(x: Tensor) -> Tensor:
            for number, layer in enumerate([*training.net.layers] * 2):
                weight = layer.weight.t()
                if number == at and grows:
                    room_bytes = training.budget_bytes - cpu_pool.allocated_bytes()
                    grown.append(torch.empty((room_bytes - 2 * ROW_BYTES) // 4))
                x = torch.tanh(torch.addmm(layer.bias, x, weight))
            return x.square().mean()

        training.net.forward = forward
        told = []
        for step in range(SETTLED + 4):
            grows = last_grows and step == SETTLED + 3
            told += training.step()
            if training.runtime is not None:
                training.runtime.wait_for_plan()
        return told

    wanted = steps(Training(None), last_grows=False)
    gc.collect()
    assert steps(training, last_grows=True) == wanted
    assert training.idle_steps > 0 and training.runtime.report().totals.drops > 0


def test_a_step_that_wakes_up_too_late_passes_the_budget_once_and_says_so(
    training: Training,
) -> None:
    training.settle()
    training.step()
    kept = []

    def grow(*_: object) -> None:
        if not kept:
            kept.append(torch.empty(training.range_bytes // 4))

    training.net.layers[5].register_forward_hook(grow)
    with pytest.warns(RuntimeWarning, match="was passed"):
        training.step()
    kept.clear()
    assert training.runtime.report().totals.over_budget_steps == 1
    idle_steps = training.idle_steps
    kept.append(None)
    trained(training, [ROWS] * (4 * QUIET_STEPS))
    assert training.idle_steps == idle_steps, "after that, more steps have to be quiet"
    trained(training, [ROWS] * (5 * QUIET_STEPS))
    assert training.idle_steps > idle_steps


def test_a_step_in_which_nothing_is_saved_behind_the_waking_is_told_of(
    training: Training,
) -> None:
    """Its backward passes the budget all the same; the next steps are observed."""
    training.settle()
    training.step()
    kept = []

    def grow(x: Tensor) -> Tensor:
        loss = Net.forward(training.net, x)
        kept.append(torch.empty(training.range_bytes))
        return loss.view(())  # wakes up here

    training.net.forward = grow
    with pytest.warns(RuntimeWarning, match="was passed"):
        training.step()
    kept.clear()
    training.net.forward = lambda x: Net.forward(training.net, x)
    totals = training.runtime.report().totals
    assert totals.over_budget_steps == 1 and totals.steps == SETTLED + 2
    packs = training.runtime.session.packs()
    training.step()
    assert training.runtime.session.packs() > packs


def test_where_the_budget_binds_no_step_is_idle(make: Make) -> None:
    training = make(0.7)
    training.settle()
    trained(training, [ROWS] * 5)
    assert training.idle_steps == 0


@pytest.mark.parametrize("options", [{"strict": True}, {"policy": "stress_drop_all"}])
def test_who_wants_each_step_observed_has_no_idle_ones(
    make: Make, options: dict[str, object]
) -> None:
    training = make(**options)
    training.settle()
    trained(training, [ROWS] * 5)
    assert training.idle_steps == 0


def test_steps_of_several_shapes_are_idle_once_each_is_known(training: Training) -> None:
    shapes = [ROWS, ROWS // 2, ROWS // 4]
    wanted = ordinary(shapes * 20)
    found = trained(training, shapes * 20)
    assert found == wanted
    assert training.idle_steps > 20


def test_more_that_is_live_before_the_step_has_it_observed(make: Make) -> None:
    training = make(1.5)
    training.settle()
    training.step()
    idle_steps = training.idle_steps
    other = torch.empty(int(0.5 * training.range_bytes) // 4)
    cpu_pool.reset_peak()
    trained(training, [ROWS] * 3)
    assert training.idle_steps == idle_steps
    assert cpu_pool.peak_bytes() <= training.budget_bytes
    del other
    trained(training, [ROWS] * (QUIET_STEPS + CALIBRATION_STEPS + 1))
    assert training.idle_steps > idle_steps


# ---------------------------------------------------------------- hooks of others, threads, ends


def test_waking_up_within_hooks_of_others_goes_below_them(training: Training) -> None:
    """Theirs are taken away as they were put in place, and ours stay until the step is over."""
    training.settle()
    packed, seen = [], []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    forward = training.net.forward

    def hooked(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = training.net.layers[0](x)
        seen.append((any_hooks(), torch._C._autograd._top_saved_tensors_default_hooks(True)))
        return forward(y)

    training.net.forward = hooked
    training.step(2 * ROWS)
    assert packed
    ((any_left, top),) = seen
    assert any_left and top[0] is training.runtime.hooks.pair[0]
    packed.clear()
    training.net.forward = forward
    training.step()


def test_within_torch_func_nothing_wakes_up(training: Training) -> None:
    training.settle()

    def other(x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda y: (training.net.layers[0].weight @ y).sin().sum())
        return gradient(x[0]).sum() + Net.forward(training.net, x)

    training.net.forward = other
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.step()
        training.step()
    training.net.forward = lambda x: Net.forward(training.net, x)
    training.step()


def test_what_is_disabled_wakes_nothing_up(training: Training) -> None:
    training.settle()
    drops = training.runtime.session.packs()

    def other(x: Tensor) -> Tensor:
        with delta.disable():
            training.net.layers[0](torch.cat([x, x]))
            assert not any_hooks()
        assert not any_hooks()
        return Net.forward(training.net, x)

    training.net.forward = other
    training.step()
    assert training.runtime.session.packs() == drops
    training.net.forward = lambda x: Net.forward(training.net, x)
    trained(training, [ROWS] * 3)


def test_what_is_disabled_ends_no_watch(training: Training) -> None:
    """Nor does what comes first in a step, such as a teacher: what follows is compared all the same."""
    training.net.forward = lambda x: _behind_teacher(training, x)
    training.settle()
    training.step()
    assert training.idle_steps == 1
    drops = training.runtime.session.counters().drops
    cpu_pool.reset_peak()
    training.step(2 * ROWS)
    assert training.runtime.session.counters().drops > drops
    assert cpu_pool.peak_bytes() <= training.budget_bytes


def _behind_teacher(training: Training, x: Tensor) -> Tensor:
    with delta.disable(), delta.disable():
        assert not any_hooks()
        training.net.layers[0](x[:8]).sum()
    return Net.forward(training.net, x)


def test_behind_torch_func_a_larger_step_wakes_up(training: Training) -> None:
    def forward(x: Tensor) -> Tensor:
        torch.func.grad(lambda y: (training.net.layers[0].weight @ y).sin().sum())(x[0])
        return Net.forward(training.net, x)

    training.net.forward = forward
    training.settle()
    training.step()
    assert training.idle_steps == 1
    cpu_pool.reset_peak()
    training.step(2 * ROWS)
    assert cpu_pool.peak_bytes() <= training.budget_bytes


def test_a_kind_that_was_not_known_is_idle_once_it_is(training: Training) -> None:
    """A sequence that becomes longer for good."""
    training.settle()
    training.step()
    trained(training, [ROWS // 2] * 10)
    idle_steps = training.idle_steps
    trained(training, [ROWS // 2] * 10)
    assert training.idle_steps == idle_steps + 10


def test_behind_an_idle_step_that_raised_the_next_ones_are_observed(training: Training) -> None:
    training.settle()
    training.step()
    handle = training.net.layers[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.step()
    handle.remove()
    packs, idle_steps = training.runtime.session.packs(), training.idle_steps
    training.step()
    assert training.runtime.session.packs() > packs and training.idle_steps == idle_steps


@pytest.mark.parametrize("raises", [False, True])
def test_it_can_be_left_and_closed_in_an_idle_step(training: Training, raises: bool) -> None:
    training.settle()
    training.step()

    def forward(x: Tensor) -> Tensor:
        training.runtime.close()
        if raises:
            raise ZeroDivisionError
        return Net.forward(training.net, x)

    training.net.forward = forward
    with pytest.raises(ZeroDivisionError) if raises else contextlib.nullcontext():
        training.step()
    assert not any_hooks()
    with delta.Runtime("100%", device="cpu") as other:
        torch.ones(2).sum()
    other.close()


def test_an_error_in_an_idle_step_leaves_nothing_behind(training: Training) -> None:
    wanted = ordinary([ROWS] * (SETTLED + 2))
    training.settle()
    training.step()
    training.net.layers[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.step()
    training.net.layers[3]._forward_hooks.clear()
    training.optimizer.zero_grad(set_to_none=False)
    assert training.step() == wanted[-len(wanted) // (SETTLED + 2) :]


def test_another_thread_can_not_enter_meanwhile(training: Training) -> None:
    training.settle()
    raised = []

    def enter() -> None:
        try:
            training.runtime.__enter__()
        except delta.UsageError as error:
            raised.append(error)

    def forward(x: Tensor) -> Tensor:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return Net.forward(training.net, x)

    training.net.forward = forward
    training.step()
    assert len(raised) == 1
    assert training.idle_steps >= 1


def test_a_forked_child_trains_by_itself(training: Training) -> None:
    training.settle()
    training.step()

    def forward(x: Tensor) -> Tensor:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                loss = Net.forward(training.net, torch.cat([x, x]))
                status = 0 if torch.isfinite(loss) and not any_hooks() else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        return Net.forward(training.net, x)

    training.net.forward = forward
    training.step()


def test_a_profiler_works_throughout(training: Training) -> None:
    training.settle()
    for rows in (ROWS, 2 * ROWS, ROWS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            training.step(rows)
        names = {event.key for event in profile.key_averages()}
        assert "aten::addmm" in names
