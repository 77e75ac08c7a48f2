"""Whose allocator is kept to a limit, and that all is as before where that does not work.

Does not cover what the limit does: tests/accelerator/test_reserved_limit.py, and tests/native/test_cuda_extension.py
where torch is a build for CUDA.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch

import delta_runtime as delta
from delta_runtime import growing_segments, reserved_limit, runtime
from delta_runtime.extension import _C
from delta_runtime.reserved_limit import keeps_to_limits, let_allocator_keep_to_limits

CARD = torch.device("cuda:5")  # that no other test knows


class Built:
    """As the extension, with whatever it gives."""

    built_for_torch = torch.__version__.partition("+")[0]

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[int] = []

    def limited_allocator(self, card: int) -> Any:
        self.asked.append(card)
        if self.error is not None:
            raise self.error
        return None  # a capsule, on a card


def not_built() -> Any:
    raise ModuleNotFoundError("there is none", name="delta_runtime._cuda")


def broken() -> Any:
    raise ImportError("undefined symbol: cudaMemGetInfo")


@pytest.fixture(autouse=True)
def native(monkeypatch) -> list[tuple[str, object]]:
    """PyTorch's own allocator of CUDA; and what the extension is told of devices."""
    told: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(reserved_limit, "is_native", lambda: True)
    told_to = types.SimpleNamespace(
        has_limited_allocator=lambda device: any(each == device for each, _ in told),
        set_limited_allocator=lambda device, allocator: told.append((device, allocator)),
    )
    monkeypatch.setattr(reserved_limit, "_C", told_to)
    return told


def test_a_card_is_asked_once(native):
    built = Built()
    assert not keeps_to_limits(CARD)
    assert let_allocator_keep_to_limits(CARD, lambda: built)
    assert native == [("cuda:5", None)]
    assert keeps_to_limits(CARD)
    assert let_allocator_keep_to_limits(CARD, lambda: built), "it is there already"
    assert built.asked == [5]


def test_without_the_extension_nothing_happens_and_nothing_is_said(native):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not let_allocator_keep_to_limits(CARD, not_built)
    assert native == []


def test_what_goes_wrong_is_told_and_leaves_all_as_it_was(native):
    built = Built(RuntimeError("no card 5"))
    with pytest.warns(RuntimeWarning, match="kept to no limit .no card 5"):
        assert not let_allocator_keep_to_limits(CARD, lambda: built)
    assert native == []


def test_one_that_cannot_be_loaded_or_is_of_another_torch_is_told(native):
    with pytest.warns(RuntimeWarning, match="undefined symbol"):
        assert not let_allocator_keep_to_limits(CARD, broken)
    built = Built()
    built.built_for_torch = "2.10.0"
    with pytest.warns(RuntimeWarning, match="is built for torch 2.10.0, here is 2"):
        assert not let_allocator_keep_to_limits(CARD, lambda: built)
    assert built.asked == [], "its functions may be others"
    assert native == []


def test_other_allocators_and_devices_are_left_alone(native, monkeypatch):
    assert not let_allocator_keep_to_limits(torch.device("cpu"), Built)
    assert not let_allocator_keep_to_limits(torch.device("xpu:0"), Built)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not let_allocator_keep_to_limits(CARD, Built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(reserved_limit, "is_native", lambda: False)
    assert not let_allocator_keep_to_limits(CARD, Built)
    assert native == []


@pytest.mark.parametrize(("said", "asked"), [("", 1), ("1", 1), ("0", 0)])
def test_a_runtime_asks_for_it_unless_somebody_says_no(said, asked, monkeypatch):
    found: list[torch.device] = []
    monkeypatch.setattr(runtime, "let_allocator_keep_to_limits", found.append)
    monkeypatch.setenv("DELTA_LIMIT_RESERVED", said)
    delta.Runtime("64MiB", device="cpu").close()
    assert len(found) == asked


def test_a_policy_that_evicts_nothing_asks_for_nothing(monkeypatch):
    found: list[torch.device] = []
    monkeypatch.setattr(runtime, "let_allocator_keep_to_limits", found.append)
    delta.Runtime("64MiB", device="cpu", policy="off").close()
    assert found == []


def test_the_allocator_that_the_program_has_put_there_is_not_native(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "pluggable", raising=False)
    assert not growing_segments.is_native()
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native", raising=False)
    assert growing_segments.is_native()


def test_what_is_no_allocator_is_refused():
    with pytest.raises(TypeError):
        _C.set_limited_allocator("cuda:6", 5)
    assert not _C.has_limited_allocator("cuda:6")
