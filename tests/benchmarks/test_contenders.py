"""The peers that benchmarks/peers.py compares with do what their names say, and leave the model as it was."""

from __future__ import annotations

import contextlib
import dataclasses
from argparse import Namespace

import pytest
import torch

from benchmarks import peers
from benchmarks.contenders import PEERS, HostLink, contender, segmented
from delta_runtime import cpu_pool
from scripts.workloads import SIZED, TrainState, gpt2
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(200)


TINY = dataclasses.replace(
    SIZED["gpt"], name="tiny", batch_size=16, size=64, size_step=16, build_model=gpt2(256, 64, 6)
)


def gradients_and_peak(state: TrainState, around: contextlib.AbstractContextManager) -> tuple:
    state.optimizer.zero_grad(set_to_none=True)
    batch = state.batch(0)
    torch.manual_seed(5)  # of dropout
    cpu_pool.reset_peak()
    with around:
        state.loss(batch).backward()
    grads = [p.grad.clone() for p in state.model.parameters()]
    state.optimizer.zero_grad(set_to_none=True)
    return grads, cpu_pool.peak_bytes() - cpu_pool.allocated_bytes()


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_trains_in_less_with_the_same_gradients(name: str) -> None:
    cpu_pool.install()
    state = TINY.build(0)
    before = [*state.model.modules()]
    expected, ordinary_bytes = gradients_and_peak(state, contextlib.nullcontext())
    link = HostLink(1e12)
    found, bytes_ = gradients_and_peak(state, contender(name, state.model, TINY.blocks, link))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert bytes_ < 0.95 * ordinary_bytes
    assert [*state.model.modules()] == before
    again, after_bytes = gradients_and_peak(state, contextlib.nullcontext())
    assert all(map(torch.equal, again, expected))
    assert after_bytes == pytest.approx(ordinary_bytes, rel=0.05)


def test_a_link_takes_its_time_and_no_device_memory() -> None:
    cpu_pool.install()
    tensor = torch.randn(1 << 16).reshape(256, 256).t()
    before = cpu_pool.allocated_bytes()
    link = HostLink(tensor.nbytes / 0.05)
    begin = peers.time.perf_counter()
    cpu_pool.reset_peak()
    packed = link.pack(tensor)
    assert cpu_pool.peak_bytes() <= before
    back = link.unpack(packed)
    assert peers.time.perf_counter() - begin >= 0.099
    assert torch.equal(back, tensor)


def test_groups_are_as_many_as_they_are_long() -> None:
    model = TINY.build_model(32)
    with segmented(model, TINY.blocks) as n_groups:
        assert n_groups == 2  # of three blocks each
        assert [group.again for group in model.transformer.h] == [True, False]
    assert len(model.transformer.h) == 6


def test_blocks_are_named_as_their_classes_are() -> None:
    for name in ("vit", "unet"):
        workload = SIZED[name]
        found = {type(each).__name__ for each in workload.build_model(32).modules()}
        assert set(workload.blocks) <= found


@pytest.mark.filterwarnings("ignore")
def test_the_runtime_beside_the_peers() -> None:
    cpu_pool.install()
    arguments = Namespace(
        peers=["checkpoint", "offloaded"], link="pcie5", rounds=1, steps=1, bound_seconds=2.0
    )
    rows = peers.eager_rows(TINY, arguments)
    assert [row.peer for row in rows] == arguments.peers
    for row in rows:
        assert row.equal and not row.failure
        assert 0 < row.ours_peak_bytes <= row.peak_bytes < row.ordinary_bytes
        assert row.seconds > 0 and row.ours_s > 0
    assert rows[1].bound_s is None  # copies may help
    lines = peers.docs_tables(rows)["peers"]
    assert len(lines) == 4 and lines[2].startswith("| tiny | checkpoint |")
