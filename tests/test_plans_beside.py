"""Plans made beside training: the next step follows them, nobody waits for them, and no thread is left behind."""

# ruff: noqa: PT012
from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.config import planning_requested
from delta_runtime.core.errors import UsageError
from delta_runtime.core.interrupts import Interrupted, give_way
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.device import core_idles, cores_of_its_own
from delta_runtime.known_step import CALIBRATION_STEPS
from delta_runtime.plan_cache import PlanCache
from delta_runtime.planners import joint_heuristic
from delta_runtime.planning_time import PlanningTime
from delta_runtime.plans_beside import PlansBeside
from tests.support import warm_children
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.large_graphs import large_graph
from tests.support.nets import net
from tests.support.plans import record_again
from tests.support.step_graphs import chain

ROOT = Path(__file__).resolve().parents[1]
MIB = 1024**2
GRAPH = chain([8 * MIB] * 12, [1e-2] * 12)
BUDGET_BYTES = GRAPH.peak_bytes // 2
WIDTH, ROWS, LAYERS = 64, 512, 6

real_plan = joint_heuristic.plan


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DELTA_PLANNING", "beside")
    yield
    for thread in planning_threads():  # asked to stop, or at its end
        thread.join(10)
    assert not planning_threads()


def planning_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "delta_runtime plans"]


class Gate:
    """Holds plans back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.threads: list[threading.Thread] = []
        monkeypatch.setattr(joint_heuristic, "plan", self._plan)

    def _plan(self, graph: StepGraph, budget_bytes: int, **options: object) -> Plan:
        self.threads.append(threading.current_thread())
        while not self.is_open.is_set():
            give_way()
        return real_plan(graph, budget_bytes, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def tight(**settings: object) -> delta.Runtime:
    return delta.Runtime(
        cpu_pool.allocated_bytes() + 8 * ROWS * WIDTH * 4, device="cpu", **settings
    )


def step(model: nn.Module) -> None:
    model(torch.ones(ROWS, WIDTH)).square().mean().backward()


def train(runtime: delta.Runtime, model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model.zero_grad(set_to_none=True)  # where gradients are there, a step has other ops
        with runtime.step():
            step(model)


# ---------------------------------------------------------------- one runtime


def test_a_step_follows_the_plan_that_was_made_beside_the_one_before():
    model, runtime = net(WIDTH, LAYERS), tight()
    for _ in range(CALIBRATION_STEPS + 1):
        train(runtime, model)
        assert runtime.wait_for_plan()
    train(runtime, model)
    plan, last = runtime.plan(), runtime.report().last
    assert plan is not None and last.plan_hits > 0 and last.plan_misses == 0
    assert runtime.report().totals.planning_s > 0
    runtime.close()


def test_training_goes_on_while_a_plan_is_made_and_follows_it_from_a_begin_on(gate):
    model, runtime = net(WIDTH, LAYERS), tight()
    train(runtime, model, 3)
    assert runtime.plan() is None and not runtime.wait_for_plan(0.01)
    assert gate.threads and threading.main_thread() not in gate.threads
    model.zero_grad(set_to_none=True)
    with runtime.step():
        step(model)
        gate.is_open.set()
        assert runtime.wait_for_plan()
        assert runtime.plan() is None, "this step goes on as it began"
    train(runtime, model)
    assert runtime.plan() is not None
    runtime.close()


def test_gradients_are_those_of_an_ordinary_run_whenever_the_plans_come():
    expected, model = net(WIDTH, LAYERS), net(WIDTH, LAYERS)
    runtime = tight()
    for _ in range(12):
        expected.zero_grad(set_to_none=True)
        step(expected)
        train(runtime, model)
    runtime.close()
    for a, b in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_waiting_where_nothing_is_planned_returns_at_once(monkeypatch):
    runtime = tight()
    assert runtime.wait_for_plan() and runtime.wait_for_plan(0.0)
    runtime.close()
    assert runtime.wait_for_plan()
    monkeypatch.setenv("DELTA_PLANNING", "between")
    runtime = tight()
    train(runtime, net(WIDTH, LAYERS))
    assert runtime.plan() is not None and runtime.wait_for_plan()
    runtime.close()


def test_an_error_is_told_and_training_goes_on(monkeypatch, caplog):
    def fails(*_: object, **__: object) -> Plan:
        raise RuntimeError("no plan today")

    monkeypatch.setattr(joint_heuristic, "plan", fails)
    model, runtime = net(WIDTH, LAYERS), tight()
    train(runtime, model)
    assert runtime.wait_for_plan() and runtime.plan() is None
    train(runtime, model)
    runtime.close()
    assert "no plan today" in caplog.text


@pytest.mark.parametrize("how", ["close", "collected"])
def test_no_thread_is_left_behind(how, gate):
    runtime = tight()
    train(runtime, net(WIDTH, LAYERS))
    assert len(planning_threads()) == 1
    if how == "close":
        runtime.close()
        assert not planning_threads()
    threads = planning_threads()
    del runtime
    for thread in threads:
        thread.join(10)


def test_several_runtimes_plan_at_once(gate):
    models = [net(WIDTH, LAYERS), net(WIDTH, LAYERS + 1)]
    runtimes = [tight(), tight()]
    for runtime, model in zip(runtimes, models, strict=True):
        train(runtime, model)
    assert len(planning_threads()) == 2
    gate.is_open.set()
    for runtime, model in zip(runtimes, models, strict=True):
        assert runtime.wait_for_plan()
        train(runtime, model)
        assert runtime.plan() is not None
        runtime.close()


def test_ctrl_c_while_waiting_leaves_a_runtime_that_works(gate):
    runtime, model = tight(), net(WIDTH, LAYERS)
    train(runtime, model)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        runtime.wait_for_plan()
    timer.join()
    gate.is_open.set()
    assert runtime.wait_for_plan() and runtime.plan() is not None
    runtime.close()


PROGRAM = """
import os, sys, threading, time
os.environ["DELTA_PLANNING"] = "beside"
import torch
import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.core.interrupts import give_way
from delta_runtime.planners import joint_heuristic
from tests.support.nets import net

def endless(*_, **__):
    while True:
        give_way()

joint_heuristic.plan = endless
model = net(64, 6)
runtime = delta.Runtime(cpu_pool.allocated_bytes() + 8 * 512 * 64 * 4, device="cpu")
with runtime.step():
    model(torch.ones(512, 64)).square().mean().backward()
assert any(each.name == "delta_runtime plans" for each in threading.enumerate())
"""
ENDS = {
    "exit": "",
    "error": "raise SystemExit(0)",
    "fork": """
pid = os.fork()
if pid == 0:
    assert runtime.wait_for_plan()
    runtime.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
""",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_interpreter_ends_while_a_plan_is_made(end):
    done = warm_children.run(
        ["-c", PROGRAM + end], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- the cache of plans


def cache(plans: PlansBeside, **settings: object) -> PlanCache:
    return PlanCache(plans=True, planning=PlanningTime(limited=False), beside=plans, **settings)


def test_with_another_budget_another_plan_is_made(gate):
    plans = PlansBeside()
    known = cache(plans)
    gate.is_open.set()
    for _ in range(CALIBRATION_STEPS):
        known.learn(GRAPH, BUDGET_BYTES)
        assert plans.wait() and known.take_made()
    for budget_bytes in (BUDGET_BYTES, BUDGET_BYTES + 16 * MIB):
        known.learn(GRAPH, budget_bytes)
        assert plans.wait() and known.take_made() == (budget_bytes != BUDGET_BYTES)
        assert known.plan is not None
        assert known.plan.to_json() == real_plan(GRAPH, budget_bytes, effort=4.0).to_json()


def test_a_graph_that_was_recorded_again_meanwhile_gets_another_plan(gate):
    plans = PlansBeside()
    known = cache(plans)
    gate.is_open.set()
    for _ in range(CALIBRATION_STEPS):
        known.learn(GRAPH, BUDGET_BYTES)
        assert plans.wait() and known.take_made()
    assert known.settled or known.plan is not None
    gate.is_open.clear()
    record_again(known)
    known.learn(GRAPH, BUDGET_BYTES)
    record_again(known)
    gate.is_open.set()
    assert plans.wait() and known.take_made()
    assert not known.settled and known.wants_log(missed=False)
    known.learn(GRAPH, BUDGET_BYTES)
    assert plans.wait() and known.take_made() and known.settled


def test_what_is_planned_beside_training_counts_against_the_time_for_it():
    plans, planning = PlansBeside(), PlanningTime()
    known = PlanCache(plans=True, planning=planning, beside=plans)
    before_s = planning.left_s
    known.learn(GRAPH, BUDGET_BYTES)
    assert plans.wait() and known.take_made()
    assert planning.beside_s > 0
    assert planning.left_s < before_s


# ---------------------------------------------------------------- the thread


def test_it_is_asked_to_stop_and_waited_for():
    plans = PlansBeside()
    ended = []

    def make() -> Plan:
        try:
            while True:
                give_way()
        except Interrupted:
            ended.append(True)
            raise

    plans.begin(make)
    assert plans.take() is None and not plans.is_idle and not plans.wait(0.01)
    plans.stop()
    assert ended and plans.is_idle and plans.take() is None
    plans.stop()


def test_when_plans_are_made_is_a_choice():
    assert planning_requested({}) == "beside"
    assert planning_requested({"DELTA_PLANNING": "between"}) == "between"
    with pytest.raises(UsageError, match="^DELTA_PLANNING: "):
        planning_requested({"DELTA_PLANNING": "never"})


def longest_gaps_s(make: Callable[[], Plan]) -> list[float]:
    """How long this thread was kept waiting, at the most, while a plan was made; the longest last."""
    plans = PlansBeside()
    gaps = []
    plans.begin(make)
    last_s = time.perf_counter()
    while plans.take() is None:
        time.sleep(0.001)  # as an op that lets go of Python's lock
        now_s = time.perf_counter()
        gaps.append(now_s - last_s - 0.001)
        last_s = now_s
    return sorted(gaps)


def test_training_gets_pythons_lock_while_a_large_graph_is_planned_for(one_thread):  # noqa: F811
    graph = large_graph("transformer", 2000)
    links = Links(*[0.25 * graph.activation_bytes / graph.seconds] * 2)
    gaps = longest_gaps_s(
        lambda: real_plan(graph, int(0.6 * graph.peak_bytes), effort=4.0, links=links)
    )
    assert len(gaps) > 20
    # Other processes take the cores away now and then: of the usual wait it can be said.
    assert np.median(gaps) < 0.006


@pytest.mark.parametrize(
    ("device", "cores", "processes", "idle"),
    [
        ("cpu", 2, 1, False),
        ("cpu", 3, 1, True),
        ("cpu", 2.5, 1, False),
        ("cpu", 4, 2, False),
        ("cuda", 1, 1, False),
        ("cuda", 2, 1, True),
        ("cuda", 2, 2, False),
    ],
)
def test_training_leaves_a_core_idle_where_there_are_more_than_it_computes_on(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: float, processes: int, idle: bool
) -> None:
    """Two threads compute on the CPU, one waits for an accelerator, in each process of the machine."""
    monkeypatch.setattr("delta_runtime.device.cores_of_its_own", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert core_idles(torch.device(device))() is idle


@pytest.mark.parametrize(("planning", "idles"), [("beside", True), ("between", False)])
def test_only_plans_made_beside_training_have_the_time_of_a_core_that_idles(
    monkeypatch: pytest.MonkeyPatch, planning: str, idles: bool
) -> None:
    monkeypatch.setenv("DELTA_PLANNING", planning)
    monkeypatch.setattr(
        "delta_runtime.steps.core_idles", lambda device: lambda: device.type == "cpu"
    )
    with contextlib.closing(tight()) as runtime:
        assert runtime.steps.planning.core_idles() is idles


@pytest.mark.parametrize(
    ("threads", "real", "quota", "cores"),
    [(16, 8, None, 8), (4, 8, None, 4), (8, 8, 2.5, 2.5), (2, None, None, 1), (2, 2, 4.0, 2)],
)
def test_cores_count_once_and_as_far_as_the_process_may_use_them(
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    real: int | None,
    quota: float | None,
    cores: float,
) -> None:
    monkeypatch.setattr("delta_runtime.device.usable_cores", lambda: threads)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None if logical else real)
    monkeypatch.setattr("delta_runtime.device.cgroup_cores", lambda: quota)
    assert cores_of_its_own() == cores
