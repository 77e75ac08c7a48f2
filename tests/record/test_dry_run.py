"""A step whose ops compute nothing is recorded as the same step is that computes."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import deterministic

import delta_runtime as delta
from benchmarks.dry_records import record
from delta_runtime import cpu_pool
from delta_runtime.core.errors import NeedsValues, UsageError
from delta_runtime.record.dry_run import dry_run
from tests.zoo.registry import ZOO

_NEED_VALUES = {"mixtral": "one_hot", "wav2vec2": "ctc_loss"}
"""Models whose shapes depend on numbers, and the line that shows it."""
_WORKSPACES = ("lstm",)
"""Models with an op that saves memory of a size that only its kernel knows."""
_DRY = sorted(set(ZOO) - set(_NEED_VALUES) - set(_WORKSPACES))
_PEAK_RTOL = 0.05


@pytest.mark.parametrize("name", _DRY)
def test_a_dry_step_is_recorded_as_the_real_one(name: str) -> None:
    real, dry = record(name, dry=False), record(name, dry=True)
    assert dry.op_name == real.op_name
    assert dry.saved_bytes.tolist() == real.saved_bytes.tolist()
    assert dry.activation_bytes == real.activation_bytes
    assert dry.uses.tolist() == real.uses.tolist()
    assert dry.fingerprint == real.fingerprint
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=_PEAK_RTOL)


@pytest.mark.parametrize("name", sorted(_NEED_VALUES))
def test_a_step_that_needs_numbers_names_the_line(name: str) -> None:
    with pytest.raises(NeedsValues, match=_NEED_VALUES[name]):
        record(name, dry=True)


def test_workspaces_of_unknown_size_are_the_only_difference() -> None:
    for name in _WORKSPACES:
        real, dry = record(name, dry=False), record(name, dry=True)
        assert dry.op_name == real.op_name
        assert dry.activation_bytes < real.activation_bytes


def branch_on_a_loss(loss: torch.Tensor) -> None:
    if loss > 0:
        loss.backward()


def print_a_loss(loss: torch.Tensor) -> None:
    format(loss.item(), ".3f")


def list_numbers(loss: torch.Tensor) -> None:
    loss.tolist()


def take_an_array(loss: torch.Tensor) -> None:
    loss.detach().numpy()


@pytest.mark.parametrize(
    ("asks", "line"),
    [
        (branch_on_a_loss, "if loss > 0"),
        (print_a_loss, "loss.item"),
        (list_numbers, "loss.tolist"),
        (take_an_array, "numpy"),
    ],
)
def test_code_that_asks_for_numbers_is_told_its_line(asks, line: str) -> None:
    model = nn.Linear(256, 256)
    with dry_run():
        loss = model(torch.randn(64, 256)).square().mean()
        with pytest.raises(NeedsValues) as told:
            asks(loss)
    assert __file__ in str(told.value)
    assert line in str(told.value)


def test_what_is_known_computes() -> None:
    with dry_run():
        mask = torch.arange(16) % 3 == 0
        assert int(mask.sum()) == 6
        assert mask.nonzero().flatten().tolist() == [0, 3, 6, 9, 12, 15]
        step = torch.tensor(0.0)
        step += 1
        assert step.item() == 1.0


def test_afterwards_all_is_as_before() -> None:
    with dry_run():
        torch.randn(512, 512) @ torch.randn(512, 512)
    guarded = [getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__")]
    runtime = delta.Runtime(policy="off", device="cpu")
    with dry_run(), runtime:
        torch.randn(512, 512) @ torch.randn(512, 512)
    runtime.close()
    assert [getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__")] == guarded
    assert deterministic.fill_uninitialized_memory
    torch.manual_seed(0)
    first = torch.randn(300, 300)
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(300, 300))
    assert (first @ first).abs().sum() > 0
    assert len(first.numpy()) == len(first.tolist()) == 300


def test_what_was_there_before_has_its_content_back() -> None:
    counter, small, big = torch.tensor(3), torch.ones(8), torch.ones(512, 512)
    with dry_run():
        counter += 1
        small.mul_(2.0)
        big.add_(torch.randn(512, 512))
        assert counter.item() == 4
        big[0, :4].zero_()  # a small part of what is too big to be kept meanwhile
    assert counter.item() == 3
    assert small.tolist() == [1.0] * 8
    assert float(big.sum()) == 512 * 512


def save(t: torch.Tensor, path: Path) -> None:
    torch.save({"weight": t}, path)


def save_safely(t: torch.Tensor, path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    with dry_run():  # looks what was imported by then
        safetensors.save_file({"weight": t}, path)


def copy_out(t: torch.Tensor, _: Path) -> None:
    np.from_dlpack(t)


@pytest.mark.parametrize("gives_away", [save, save_safely, copy_out])
def test_what_was_not_computed_is_not_given_away(gives_away, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with dry_run(), pytest.raises(NeedsValues):
        gives_away(nn.Linear(512, 512).weight.detach(), path)


def test_sparse_tensors_are_refused_with_their_line() -> None:
    table = nn.Embedding(5000, 64, sparse=True)
    with dry_run(), pytest.raises(NeedsValues, match="test_dry_run.py"):
        table(torch.randint(0, 5000, (64, 64))).square().sum().backward()


def test_imitations_of_others_are_left_alone() -> None:
    with dry_run():
        weight = torch.empty(300, 300, device="meta")
        assert (weight @ weight).device.type == "meta"
        assert torch.arange(5, device="meta").is_meta
        with FakeTensorMode():
            a = torch.empty(300, 300)
            assert isinstance(a @ a, FakeTensor)


def test_deterministic_algorithms_fill_nothing() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.use_deterministic_algorithms(True)
    try:
        with dry_run():
            x = torch.randn(8192, 8192)
            torch.empty_like(x).copy_(x @ x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024


def test_one_thread_at_a_time() -> None:
    told: list[Exception] = []

    def other() -> None:
        try:
            with dry_run():
                pass
        except UsageError as error:
            told.append(error)

    with dry_run():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with dry_run():  # within one's own it is as good as one
            torch.randn(512, 512)
    assert len(told) == 1
    assert float(torch.ones(1000, 1000).sum()) == 1e6


def linears() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8))), torch.randn(4096, 8192)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers += [nn.Conv2d(64, 64, 3, groups=4), nn.MaxPool2d(2), nn.ConvTranspose2d(64, 32, 2)]
    layers += [nn.Upsample(scale_factor=2), nn.GroupNorm(4, 32), nn.GELU(), nn.Dropout()]
    return nn.Sequential(*layers), torch.randn(128, 3, 224, 224)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    return nn.TransformerEncoder(layer, 8), torch.randn(32, 1024, 1024)


@pytest.mark.parametrize("build", [linears, convolutions, transformer])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_memory_is_touched(build, autocast: bool) -> None:
    """Some GiB of tensors in a few MiB, weights, gradients and optimizer included."""
    cpu_pool.install()
    cpu_pool.reset_peak()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with dry_run():
        model, x = build()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert cpu_pool.peak_bytes() > 2 << 30
    assert after_kib - before_kib < 300 * 1024


def test_an_initializer_that_draws_until_it_fits_is_dry_too() -> None:
    with dry_run():
        weight = torch.empty(512, 512)
        assert nn.init.trunc_normal_(weight) is weight
    weight = nn.init.trunc_normal_(torch.empty(512, 512), std=1.0, a=-1.0, b=1.0)
    assert 0 < weight.abs().max() <= 1
