"""Exact comparison of tensors and of whole training runs, with a message that names the first difference.

Equal means the same bits: two NaN of the same payload are equal, 0.0 and -0.0 are not. Conjugate and negative
bits are resolved first, since they are a way to write a value and not part of it. A snapshot holds bytes outside
torch, so that it counts neither as live tensor bytes nor as somebody who holds a storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.support.device import device_module


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """The logical content of a tensor: dtype, sizes and the bytes of its elements in row-major order."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    content: bytes

    def tensor(self) -> Tensor:
        if not self.content:
            return torch.empty(self.sizes, dtype=self.dtype)
        flat = torch.frombuffer(bytearray(self.content), dtype=torch.uint8)
        return flat.view(self.dtype).reshape(self.sizes)


Snapshot = dict[str, FrozenTensor | None]
"""What a run left behind: label -> content, or None where a run has no such tensor (a gradient that is None)."""


def _strided(tensor: Tensor) -> Tensor:
    if tensor.layout == torch.strided:
        return tensor
    return tensor.to_dense()


@torch.no_grad()
def freeze(tensor: Tensor) -> FrozenTensor:
    """Copies the content of a tensor of any layout into plain bytes."""
    tensor = _strided(tensor.detach()).cpu()
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    tensor = tensor.resolve_conj().resolve_neg()
    sizes = tuple(tensor.shape)
    if tensor.numel() == 0:
        return FrozenTensor(tensor.dtype, sizes, b"")
    flat = tensor.contiguous().reshape(-1)
    # A dtype of one byte keeps conj/neg out of the way and exists for every element type.
    return FrozenTensor(tensor.dtype, sizes, flat.view(torch.uint8).numpy().tobytes())


def freeze_all(label: str, tensors: Iterable[Tensor | None]) -> Snapshot:
    """Freezes a sequence; label 0, label 1, ..."""
    return {
        f"{label} {i}": None if tensor is None else freeze(tensor)
        for i, tensor in enumerate(tensors)
    }


def random_state() -> Snapshot:
    """The state of the global generator, and of the accelerator's where the tests run on one."""
    snapshot: Snapshot = {"random state": freeze(torch.get_rng_state())}
    module = device_module()
    if module is not None:
        snapshot["random state of the accelerator"] = freeze(module.get_rng_state())
    return snapshot


def gradients(module: nn.Module) -> Snapshot:
    return {
        f"gradient of {name}": None if p.grad is None else freeze(p.grad)
        for name, p in module.named_parameters()
    }


def parameters(module: nn.Module) -> Snapshot:
    return {f"parameter {name}": freeze(p) for name, p in module.named_parameters()}


def buffers(module: nn.Module) -> Snapshot:
    return {f"buffer {name}": freeze(b) for name, b in module.named_buffers()}


def prefixed(prefix: str, snapshot: Mapping[str, FrozenTensor | None]) -> Snapshot:
    return {f"{prefix}: {label}": content for label, content in snapshot.items()}


def _describe(a: FrozenTensor, b: FrozenTensor) -> str:
    if a.dtype != b.dtype or a.sizes != b.sizes:
        return f"{a.dtype} {list(a.sizes)} against {b.dtype} {list(b.sizes)}"
    width = max(1, len(a.content) // max(1, a.tensor().numel()))
    wrong = [
        i
        for i in range(len(a.content) // width)
        if a.content[i * width : (i + 1) * width] != b.content[i * width : (i + 1) * width]
    ]
    first = wrong[0]
    values = [x.tensor().reshape(-1)[first].item() for x in (a, b)]
    bits = [x.content[first * width : (first + 1) * width][::-1].hex() for x in (a, b)]
    return (
        f"{len(wrong)} of {a.tensor().numel()} elements of a {a.dtype} {list(a.sizes)}; the first is number {first}: "
        f"{values[0]!r} (0x{bits[0]}) against {values[1]!r} (0x{bits[1]})"
    )


def difference(
    actual: Mapping[str, FrozenTensor | None], expected: Mapping[str, FrozenTensor | None]
) -> str:
    """Returns what differs first, in the order of `expected`, or "" if every bit is the same."""
    for label, wanted in expected.items():
        if label not in actual:
            return f"{label}: missing"
        got = actual[label]
        if got is None or wanted is None:
            if got is not wanted:
                return f"{label}: {'None' if got is None else 'a tensor'} where " + (
                    "None was expected" if wanted is None else "a tensor was expected"
                )
        elif got != wanted:
            return f"{label}: {_describe(got, wanted)}"
    for label in actual:
        if label not in expected:
            return f"{label}: not expected"
    return ""


def assert_same_bits(
    actual: Mapping[str, FrozenTensor | None],
    expected: Mapping[str, FrozenTensor | None],
    what: str = "",
) -> None:
    """Raises AssertionError naming the first difference."""
    found = difference(actual, expected)
    assert not found, f"{what}: {found}" if what else found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, sizes and bits."""
    return freeze(a) == freeze(b)
