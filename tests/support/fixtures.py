"""Fixtures that a test module imports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from delta_runtime.planners import joint_heuristic


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Runs every test of the importing module on one thread: with other jobs on the machine two are far slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint planner ends each search soon, unless it is told how long to search: any plan that fits will do."""
    for limit in ("MOST_TO_SEARCH", "MOST_EFFORT"):
        monkeypatch.setattr(joint_heuristic, limit, 1_000_000)
