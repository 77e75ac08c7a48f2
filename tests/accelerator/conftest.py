"""The device that these tests run on: a real accelerator, or the simulated one of tests/support/fake_accelerator.

The tests of this folder are collected only where DELTA_TEST_DEVICE names one ("fake", "cuda"; see
tests/support/device.py). tests/test_accelerator.py runs them on the first, in a process of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

import delta_runtime as delta
from tests.support.device import TYPE, device_under_test

if TYPE == "cpu":
    collect_ignore_glob = ["test_*.py"]
else:
    device_under_test()  # the simulated one is compiled here, where no test's time limit counts it


CYCLES_PER_S = 4e9
"""Of a card's clock, more than any has: a delay is at least as long as it was asked for."""


class Controls:
    """What can be made slow, or fail, on purpose: all of it on the simulated device, delays on a CUDA card too."""

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
        elif TYPE == "cuda":
            with contextlib.nullcontext() if stream is None else stream:
                torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def delay_lane(self, runtime: delta.Runtime, direction: str, seconds: float) -> None:
        """The lane "out" or "in" of the last tier does nothing for a while before what is queued next."""
        tier = runtime.session.tiers()[-1]
        stream_id = tier["streams"][("out", "in").index(direction)]
        if self.fake is not None:
            self.fake.delay(stream_id, seconds)
        else:
            kind = int(torch._C._autograd.DeviceType.CUDA)
            stream = torch.Stream(stream_id=stream_id, device_index=0, device_type=kind)
            self.delay(seconds, stream)

    def copied_bytes(self, runtime: delta.Runtime) -> list[int]:
        """Bytes that the lanes out and in of the host tier have copied; what crosses twice counts twice."""
        return [self.fake.copied_bytes(stream) for stream in runtime.session.tiers()[0]["streams"]]

    def copy_s(self, runtime: delta.Runtime) -> list[float]:
        """Seconds that these copies took."""
        return [self.fake.copy_s(stream) for stream in runtime.session.tiers()[0]["streams"]]

    def lost(self, lost: bool) -> None:
        if self.fake is not None:
            self.fake.set_lost(lost)

    def capacity(self, bytes_: int) -> None:
        """So much may be reserved; 0: all that there is."""
        if self.fake is not None:
            self.fake.set_capacity(bytes_)
        elif TYPE == "cuda":
            whole_bytes = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(bytes_ / whole_bytes, 1.0) or 1.0)


@pytest.fixture(scope="session")
def controls() -> Controls:
    device_under_test()
    if TYPE != "fake":
        return Controls(None)
    from tests.support import fake_accelerator

    return Controls(fake_accelerator.load())


@pytest.fixture
def failing(controls: Controls) -> Iterator[Callable[[bool], None]]:
    """The switch of a device that fails; it is well again after the test."""
    if not controls.simulated:
        pytest.skip("a real card does not fail to order")
    yield controls.lost
    controls.lost(False)


@pytest.fixture
def without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no allocator can keep to a limit: what is reserved may be more than the budget, and ops are rescued."""
    monkeypatch.setenv("DELTA_LIMIT_RESERVED", "0")


@pytest.fixture
def device(controls: Controls) -> Iterator[torch.device]:
    controls.slow_copies(0)
    controls.capacity(0)
    torch.accelerator.synchronize()
    yield device_under_test()
    torch.accelerator.synchronize()
    controls.slow_copies(0)
    controls.capacity(0)
