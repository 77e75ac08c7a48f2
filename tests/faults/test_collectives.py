"""Collectives write their arguments although no schema says so: what they filled is not what its op would make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from tests.faults.collective_programs import ALONE, TOGETHER, complaint, process_group, run_rank
from tests.faults.harness import in_every_way
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not in this build of torch"),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with process_group(0, 1, dist.HashStore()):
        yield


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("forward", ALONE, ids=lambda f: f.__name__)
@in_every_way
def test_one_process(mode: str, forward) -> None:
    found = complaint(forward, mode)
    assert not found, found


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What two processes found wrong, by program."""
    directory = tmp_path_factory.mktemp("collectives")
    died = "was not reached"
    try:
        torch.multiprocessing.spawn(run_rank, args=(str(directory),), nprocs=2)
    except ProcessException as error:
        died = str(error)
    found = [torch.load(directory / f"found{rank}") for rank in range(2)]
    return [{f.__name__: each.get(f.__name__, died) for f in TOGETHER} for each in found]


@pytest.mark.parametrize(
    "forward",
    TOGETHER,
    ids=lambda f: f.__name__,
)
def test_two_processes(by_two: list[dict[str, str]], forward) -> None:
    for rank, found in enumerate(by_two):
        assert found[forward.__name__] == "", f"rank {rank}"
