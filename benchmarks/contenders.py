"""What others offer for training in less memory, each as a context manager around a model.

Inside of it the model trains as that peer has it; behind it the model is as it was. Peers that offload write to host
memory through `HostLink`, which is as slow as a card's link is for its compute, and outside of the CPU pool, which is
the device.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.common import checkpointed

_aten = torch.ops.aten
SAVED_OPS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What selective checkpointing keeps the results of: products, as torch's own recipes have it."""


_WAKING_S = 2e-4


class HostLink:
    """Host memory behind a link; whoever copies waits until the copy is over, as `save_on_cpu` does.

    Args:
        bytes_per_s: of each direction.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def pack(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Return a copy on the host, and whether the tensor was a leaf that asks for a gradient."""
        with torch.no_grad():
            begin = time.perf_counter()
            there = np.array(tensor.detach().numpy(), copy=True, order="C")
            self._wait(begin, there.nbytes)
            return torch.from_numpy(there), tensor.is_leaf and tensor.requires_grad

    def unpack(self, packed: tuple[Tensor, bool]) -> Tensor:
        """Return a copy on the device."""
        there, _ = packed
        begin = time.perf_counter()
        here = torch.empty_like(there).copy_(there)
        self._wait(begin, here.nbytes)
        return here

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return hooks that send all that autograd saves over the link."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def _wait(self, begin: float, nbytes: int) -> None:
        # Time counts from when the link was free, as for the runtime's lanes: naps that are too long do not add up.
        self._free_at = max(begin - _WAKING_S, self._free_at) + nbytes / self.bytes_per_s
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


class _Segment(nn.Module):
    """Blocks that follow each other; their inside is run again in backward."""

    def __init__(self, blocks: Sequence[nn.Module], again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.again = again

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.again:
            return self._run(x, *args, **kwargs)
        return checkpoint(self._run, x, *args, use_reentrant=False, **kwargs)

    def _run(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


@contextlib.contextmanager
def segmented(model: nn.Module, classes: Sequence[str]) -> Iterator[int]:
    """Put checkpoints around groups of blocks, as checkpoint_sequential does; yield the number of groups.

    Groups are as long as there are groups, within each list of blocks that follow each other; the last one is not run
    again.
    """
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, (nn.Sequential, nn.ModuleList))
        and len(child) > 1
        and all(type(block).__name__ in classes for block in child)
    ]
    length = math.ceil(math.sqrt(sum(len(blocks) for _, _, blocks in lists) or 1))
    made = []
    for parent, name, blocks in lists:
        inside = list(blocks)
        groups = [
            _Segment(inside[at : at + length], again=True) for at in range(0, len(inside), length)
        ]
        made += groups
        setattr(
            parent,
            name,
            nn.Sequential(*groups) if isinstance(blocks, nn.Sequential) else nn.ModuleList(groups),
        )
    if made:
        made[-1].again = False
    try:
        yield len(made)
    finally:
        for parent, name, blocks in lists:
            setattr(parent, name, blocks)


@contextlib.contextmanager
def _around_blocks(
    model: nn.Module, classes: Sequence[str], around: Callable[[Callable[..., Any]], Any]
) -> Iterator[int]:
    blocks = [module for module in model.modules() if type(module).__name__ in classes]
    for block in blocks:
        block.forward = around(block.forward)
    try:
        yield len(blocks)
    finally:
        for block in blocks:
            del block.forward


@contextlib.contextmanager
def selective(model: nn.Module, classes: Sequence[str]) -> Iterator[int]:
    """Put a checkpoint around each block that keeps the results of `SAVED_OPS`."""
    contexts = functools.partial(create_selective_checkpoint_contexts, SAVED_OPS)

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)

    with _around_blocks(model, classes, around) as n_blocks:
        yield n_blocks


@contextlib.contextmanager
def offloaded(model: nn.Module, classes: Sequence[str], link: HostLink) -> Iterator[int]:
    """Put a checkpoint around each block whose input waits on the host."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with link.hooks():
                # Reentrant: what it saves are the inputs, and its inside saves nothing in forward.
                return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=True)

        return run

    with _around_blocks(model, classes, around) as n_blocks:
        yield n_blocks


@contextlib.contextmanager
def saved_on_host(link: HostLink) -> Iterator[int]:
    """Send all that is saved to the host, as `torch.autograd.graph.save_on_cpu` does; yield 1."""
    with link.hooks():
        yield 1


def contender(
    name: str, model: nn.Module, classes: Sequence[str], link: HostLink
) -> contextlib.AbstractContextManager[int]:
    """Return a peer by its name in `PEERS`; what it yields is 0 where it has nothing to do for this model."""
    if name == "checkpoint":
        return checkpointed(model, classes)
    if name == "checkpoint_sequential":
        return segmented(model, classes)
    if name == "selective":
        return selective(model, classes)
    if name == "offloaded":
        return offloaded(model, classes, link)
    return saved_on_host(link)


PEERS = ("checkpoint", "checkpoint_sequential", "selective", "save_on_cpu", "offloaded")
OFFLOADING = ("save_on_cpu", "offloaded")
