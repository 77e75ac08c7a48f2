"""The device that these tests run on: a real accelerator, or the simulated one of tests/support/fake_accelerator.

Loading the simulated one changes the whole process, so the tests of this folder are collected only where
DELTA_TEST_DEVICE says on what: "fake" or "cuda". tests/test_accelerator.py runs them on the first, in a process of
its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

DEVICE = os.environ.get("DELTA_TEST_DEVICE", "")

if not DEVICE:
    collect_ignore_glob = ["test_*.py"]


class Controls:
    """What a real accelerator has no switches for, and the simulated one has."""

    def __init__(self, fake: object | None) -> None:
        self.fake = fake

    @property
    def simulated(self) -> bool:
        return self.fake is not None

    def slow_copies(self, bytes_per_s: float) -> None:
        if self.fake is not None:
            self.fake.set_copy_bytes_per_s(bytes_per_s)

    def delay(self, seconds: float, stream: torch.Stream | None = None) -> None:
        """A stream, by default that which compute runs on, does nothing for a while."""
        if self.fake is not None:
            self.fake.delay(stream.stream_id if stream else 0, seconds)

    def lost(self, lost: bool) -> None:
        if self.fake is not None:
            self.fake.set_lost(lost)

    def capacity(self, bytes_: int) -> None:
        if self.fake is not None:
            self.fake.set_capacity(bytes_)


@pytest.fixture(scope="session")
def controls() -> Controls:
    if DEVICE == "fake":
        from tests.support import fake_accelerator

        return Controls(fake_accelerator.load())
    if not torch.accelerator.is_available():
        pytest.skip(f"there is no {DEVICE} here")
    return Controls(None)


@pytest.fixture
def device(controls: Controls) -> Iterator[torch.device]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    controls.slow_copies(0)
    controls.capacity(0)
    torch.accelerator.synchronize()
    yield torch.device(DEVICE, 0)
    torch.accelerator.synchronize()
    controls.slow_copies(0)
    controls.capacity(0)
