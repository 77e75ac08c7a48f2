"""What every way of pinning host memory must keep, with drivers that stand for CUDA's; on a card, with CUDA's own."""

from __future__ import annotations

import contextlib
import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from delta_runtime.act import pinning as module
from delta_runtime.act.cupy_driver import CupyDriver, cupy_driver
from delta_runtime.act.pinning import TorchDriver, pinning

BYTES = 64 * 4096
MOST = 3 * BYTES


class Card:
    """A CUDA runtime that pins up to MOST bytes, by address; it remembers its last error."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.last_error = 0

    def register(self, address: int, bytes_: int) -> int:
        if address in self.pinned or sum(self.pinned.values()) + bytes_ > MOST:
            self.last_error = 2
            return 2
        self.pinned[address] = bytes_
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.pinned.pop(address, 0) else 1


class CUDARuntimeError(RuntimeError):
    pass


def through_torch(card: Card, patch: pytest.MonkeyPatch) -> TorchDriver:
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, bytes_, flags: card.register(address, bytes_),
        cudaHostUnregister=card.unregister,
    )
    patch.setattr(torch.cuda, "cudart", lambda: runtime)
    patch.setattr(module, "_forget_last_error", lambda: setattr(card, "last_error", 0))
    return TorchDriver()


def cupy_with(card: Card) -> SimpleNamespace:
    def raising(call):
        def called(*arguments: int) -> None:
            if error := call(*arguments[:2]):
                card.last_error = 0
                raise CUDARuntimeError(error)

        return called

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: 1,
        hostRegister=raising(card.register),
        hostUnregister=raising(card.unregister),
    )
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


def through_cupy(card: Card, patch: pytest.MonkeyPatch) -> CupyDriver:
    patch.setitem(sys.modules, "cupy", cupy_with(card))
    driver = cupy_driver()
    assert driver is not None
    return driver


DRIVERS = {"torch": through_torch, "cupy": through_cupy}
every_driver = pytest.mark.parametrize("through", DRIVERS.values(), ids=DRIVERS)


@every_driver
def test_what_is_pinned_is_let_go_of(through, monkeypatch):
    card = Card()
    driver = through(card, monkeypatch)
    assert driver.register(4096, BYTES) and card.pinned == {4096: BYTES}
    assert driver.unregister(4096) and not card.pinned


@every_driver
def test_what_fails_is_told_and_forgotten(through, monkeypatch):
    """A kernel that is launched next must not be blamed for it."""
    card = Card()
    driver = through(card, monkeypatch)
    assert driver.register(4096, BYTES)
    assert not driver.register(4096, BYTES)
    assert not driver.register(1 << 30, MOST)
    assert card.last_error == 0 and card.pinned == {4096: BYTES}
    assert not driver.unregister(8192)


@every_driver
def test_the_runtime_pins_through_it(through, monkeypatch):
    card = Card()
    through(card, monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    if through is through_torch:
        monkeypatch.setitem(sys.modules, "cupy", None)
    pin, unpin = pinning(torch.device("cuda"))
    assert pin(4096, BYTES) and card.pinned == {4096: BYTES}
    assert unpin(4096, BYTES) and not card.pinned


@pytest.mark.parametrize("cards", [0, None])
def test_without_a_card_cupy_is_not_used(cards, monkeypatch):
    found = cupy_with(Card())
    if cards is None:
        del found.cuda.runtime.getDeviceCount  # as a CuPy that is built for another CUDA
    else:
        found.cuda.runtime.getDeviceCount = lambda: cards
    monkeypatch.setitem(sys.modules, "cupy", found)
    assert cupy_driver() is None


def test_nobody_pins_for_the_cpu():
    assert pinning(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", DRIVERS)
def test_a_card_pins_and_lets_go(name):
    driver = TorchDriver() if name == "torch" else cupy_driver()
    if driver is None:
        pytest.skip("CuPy is not installed")
    memory = mmap.mmap(-1, BYTES)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    torch.cuda.init()
    assert driver.register(tensor.data_ptr(), BYTES)
    assert tensor.is_pinned()
    assert not driver.register(tensor.data_ptr(), BYTES)
    assert torch.ones(8, device="cuda").sum().item() == 8  # no error is left behind
    assert driver.unregister(tensor.data_ptr())
