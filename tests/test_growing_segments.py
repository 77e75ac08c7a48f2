"""Whose word counts on CUDA's allocator, with the settings of the torch that is installed.

These settings are read and written by builds without CUDA too. Does not cover that segments then grow: on a card
tests/accelerator/test_fragments.py does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import delta_runtime as delta
from delta_runtime import growing_segments, runtime
from delta_runtime.growing_segments import let_segments_grow, segments_expand

CARD = torch.device("cuda:0")


def told() -> str:
    return torch._C._accelerator_getAllocatorSettings() or ""


def tell(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)


def works(device: torch.device) -> None:
    assert device == CARD


@pytest.fixture(autouse=True)
def untold(monkeypatch) -> Iterator[None]:
    """The user has said nothing."""
    before = told()
    monkeypatch.setattr(growing_segments.platform, "release", lambda: "6.8.0-generic")
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    tell("")
    yield
    tell("expandable_segments:False")  # the others do not go back by themselves
    tell(before)


def test_a_card_whose_user_said_nothing_gets_segments_that_grow():
    assert not segments_expand()
    assert let_segments_grow(CARD, works)
    assert segments_expand()
    assert not let_segments_grow(CARD, works), "it was set already"
    assert told() == "expandable_segments:True"


@pytest.mark.parametrize("settings", ["max_split_size_mb:300", "max_split_size_mb:300,"])
def test_what_else_the_user_has_set_stays(settings):
    tell(settings)
    assert let_segments_grow(CARD, works)
    assert told() == "max_split_size_mb:300,expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("word", ["False", "True"])
def test_the_environment_has_its_way(name, word, monkeypatch):
    monkeypatch.setenv(name, f"max_split_size_mb:300, expandable_segments:{word}")
    assert not let_segments_grow(CARD, works)
    assert told() == ""
    assert segments_expand() is (word == "True")


def test_a_call_of_the_program_has_its_way():
    tell("expandable_segments:False")
    assert not let_segments_grow(CARD, works)
    assert told() == "expandable_segments:False"


def test_settings_of_another_allocator_are_left_alone(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    assert not let_segments_grow(CARD, works)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert let_segments_grow(CARD, works)


def test_cards_of_another_maker_are_left_alone(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not let_segments_grow(CARD, works)
    assert told() == ""


def test_other_allocators_are_left_alone(monkeypatch):
    monkeypatch.setattr(
        torch._C, "_cuda_getAllocatorBackend", lambda: "cudaMallocAsync", raising=False
    )
    assert not let_segments_grow(CARD, works)
    assert told() == ""


def test_systems_whose_driver_cannot_are_left_alone(monkeypatch):
    release = "5.15.153.1-microsoft-standard-WSL2"
    monkeypatch.setattr(growing_segments.platform, "release", lambda: release)
    assert not let_segments_grow(CARD, works)
    assert told() == ""


def test_a_card_that_cannot_is_found_out_at_once():
    def fails(device: torch.device) -> None:
        assert segments_expand(), "else nothing was tried"
        raise RuntimeError("CUDA driver error: operation not supported")

    tell("max_split_size_mb:300")
    with pytest.warns(RuntimeWarning, match="operation not supported"):
        assert not let_segments_grow(CARD, fails)
    assert told() == "max_split_size_mb:300,expandable_segments:False"
    assert not segments_expand()


def test_a_full_card_says_nothing_about_its_driver():
    def is_full(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert let_segments_grow(CARD, is_full)
    assert segments_expand()


def test_a_device_that_is_no_card_changes_nothing():
    with delta.Runtime("1 GiB", device="cpu").step():
        pass
    assert told() == ""


@pytest.mark.parametrize(("policy", "asks"), [("auto", True), ("off", False)])
def test_a_runtime_asks_for_its_own_device_if_it_evicts(policy, asks, monkeypatch):
    asked: list[torch.device] = []
    monkeypatch.setattr(runtime, "let_segments_grow", asked.append)
    delta.Runtime("1 GiB", device="cpu", policy=policy).close()
    assert asked == ([torch.device("cpu")] if asks else [])
