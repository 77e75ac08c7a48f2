"""The live bytes of a step: that they are the allocator's own, and the picture of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.support.fixtures import one_thread  # noqa: F401

MIB = 1 << 20


def trained(budget_share: float, layers: int = 6, rows: int = 1024, steps: int = 4):
    torch.manual_seed(0)
    cpu_pool.install()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(layers)))
    x = torch.randn(rows, 128)
    base_bytes = cpu_pool.allocated_bytes()
    cpu_pool.reset_peak()
    model(x).square().mean().backward()
    range_bytes = cpu_pool.peak_bytes() - base_bytes
    budget_bytes = base_bytes + int(budget_share * range_bytes) + 2 * MIB
    runtime = delta.Runtime(budget_bytes, device="cpu", min_bytes=0)
    for _ in range(steps):
        model.zero_grad()
        with runtime.step():
            model(x).square().mean().backward()
        runtime.wait_for_plan()
    report = runtime.report()
    runtime.close()
    return report


def test_the_highest_point_is_the_peak_and_lies_below_the_ordinary_step():
    report = trained(0.5)
    live = report.live
    assert report.last.drops > 0
    assert len(live.ops) == report.last.ops
    assert np.array_equal(live.ops, np.arange(len(live.ops)))
    assert 0 < live.peak_bytes.max() <= report.last.peak_bytes <= report.budget_bytes
    assert report.last.peak_bytes - live.peak_bytes.max() < MIB  # between ops there are only reruns
    assert live.ordinary_bytes.max() == report.ordinary_peak_bytes > live.peak_bytes.max()


def test_a_step_of_many_ops_has_fewer_points_with_the_highest_of_each():
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0)
    x = torch.ones(64, requires_grad=True)
    with runtime.step():
        y = x
        for _ in range(9000):
            y = y.sin()
        large = torch.ones(MIB)
        del large
        y.sum().backward()
    report = runtime.report()
    runtime.close()
    live = report.live
    assert 4096 <= len(live.ops) <= 8192
    assert report.last.ops > 2 * 8192
    assert (np.diff(live.ops) > 0).all()
    assert live.peak_bytes.max() == pytest.approx(report.last.peak_bytes, abs=MIB)
    assert live.peak_bytes.max() - live.peak_bytes.min() > 3 * MIB


def test_the_picture_is_written_and_returned(tmp_path):
    pytest.importorskip("matplotlib")
    report = trained(0.5)
    figure = report.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["with nothing evicted", "last step", "budget"]
    assert "live" not in report.as_dict()


def test_without_a_step_there_is_nothing_to_plot():
    runtime = delta.Runtime("100%", device="cpu")
    with pytest.raises(delta.UsageError, match="nothing to plot"):
        runtime.report().plot()
    runtime.close()
