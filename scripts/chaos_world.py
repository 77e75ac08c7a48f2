"""What the faults of stress_chaos.py strike: a device, the net on it, and what that trains to without a fault.

Covers: the devices (`Device`), all questions of memory to them, and what can be made worse on each; where saved tensors
go (`Device.ways`), and when in a step a fault comes (`PHASES`). Does not cover the faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import _C, cpu_pool

BLOCKS = 6
WIDTH = 64
FORWARD, BACKWARD, BETWEEN = "forward", "backward", "between"
PHASES = (FORWARD, BACKWARD, BETWEEN)
"""When a fault comes: at a block of forward or of backward, or between two steps."""
DROPPED, HOST, DISK = "dropped", "host", "disk"
WAYS = (DROPPED, HOST, DISK)
"""Where saved tensors go."""
CPU, FAKE, CUDA = "cpu", "fake", "cuda"
DEVICES = (CPU, FAKE, CUDA)
"""The pool of the CPU, the simulated accelerator of the tests, a card."""
Settings = Mapping[str, Any]


# ------------------------------------------------------------------------------------------- devices


class Device:
    """Where the net trains: the CPU with its pool, here; an accelerator, below.

    Attributes:
        name: one of `DEVICES`.
        torch: as PyTorch calls it.
        rows: of the batch.
        ways: where saved tensors can go, with the runtime's settings for it.
    """

    name = CPU
    torch = torch.device("cpu")
    rows = 512
    ways: Mapping[str, Settings] = MappingProxyType(
        {
            DROPPED: {"policy": "recompute"},
            HOST: {"policy": "swap", "host_budget": "64MiB", "link_bytes_per_s": 2e9},
            DISK: {"policy": "swap", "disk_budget": "64MiB"},
        }
    )

    def __init__(self) -> None:
        cpu_pool.install()

    @property
    def tensor_bytes(self) -> int:
        """Of what one op of the net returns."""
        return 4 * self.rows * WIDTH

    def allocated_bytes(self) -> int:
        """Return how much lives."""
        return cpu_pool.allocated_bytes()

    def peak_bytes(self) -> int:
        """Return the most that lived since `reset_peak`."""
        return cpu_pool.peak_bytes()

    def reset_peak(self) -> None:
        """Begin anew with `peak_bytes`."""
        cpu_pool.reset_peak()

    def shrink(self, bytes_: int) -> None:
        """Let no more than that live, until `widen`."""
        cpu_pool.set_capacity(max(1, bytes_))

    def shrink_around(self, room_bytes: int) -> None:
        """Leave room for no more than that beside what lives, until `widen`."""
        self.shrink(self.allocated_bytes() + room_bytes)

    def widen(self) -> None:
        """Let the device be as large as it is."""
        cpu_pool.set_capacity(None)

    def refusals(self) -> int:
        """Return how many allocations found no room, whether some was made for them then or not."""
        return int(_C.cpu_pool.full_count())

    def seed(self, number: int) -> None:
        """Begin all random numbers anew."""
        torch.default_generator.manual_seed(number)

    def random_states(self) -> list[Tensor]:
        """Return the states of all generators that the net may draw from."""
        return [torch.get_rng_state()]

    def settle(self) -> None:
        """Let go of what PyTorch keeps of a backward that raised."""

    def start(self) -> None:
        """Have all threads started that are started once in a process."""

    # What is slow or fails, on an accelerator only.

    def stream(self) -> torch.Stream:
        """Return a stream beside the one that the net runs on."""
        raise NotImplementedError(self.name)

    def delay(self, seconds: float, stream_id: int = 0) -> None:
        """Let a stream, by default the one that the net runs on, do nothing for a while."""
        raise NotImplementedError(self.name)


class Accelerator(Device):
    """A card, or the simulated one of tests/support/fake_accelerator.

    Args:
        name: `FAKE` or `CUDA`.

    Raises:
        RuntimeError: there is none of that type.
    """

    _CYCLES_PER_S = (
        4e9  # of a card's clock, more than any has: a delay is as long as it was asked for
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.fake: Any = None
        if name == FAKE:
            from tests.support import fake_accelerator

            self.fake = fake_accelerator.load()
        else:
            self.rows = 1 << 16  # the allocator has blocks of their own for tensors of 16 MiB only
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is None or current.type != name:
            raise RuntimeError(f"no {name} here; torch finds {current or 'no accelerator'}")
        self.torch = torch.device(name, 0)
        self.ways = MappingProxyType(
            {
                DROPPED: {"policy": "recompute"},
                HOST: {"policy": "swap", "host_budget": 512 * self.tensor_bytes},
                DISK: {
                    "policy": "swap",
                    "host_budget": 1,
                    "disk_budget": 512 * self.tensor_bytes,
                },
            }
        )
        self._module = torch.get_device_module(self.torch)
        torch.use_deterministic_algorithms(True, warn_only=True)

    def allocated_bytes(self) -> int:
        return int(torch.accelerator.memory_allocated())

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated())

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def shrink(self, bytes_: int) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()  # what the allocator keeps it hands out without asking
        if self.fake is not None:
            self.fake.set_capacity(bytes_)
            return
        whole_bytes = torch.cuda.get_device_properties(self.torch).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, bytes_ / whole_bytes), self.torch)

    def shrink_around(self, room_bytes: int) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        self.shrink(int(torch.accelerator.memory_reserved()) + room_bytes)

    def widen(self) -> None:
        if self.fake is not None:
            self.fake.set_capacity(0)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0, self.torch)

    def refusals(self) -> int:
        return int(torch.accelerator.memory_stats()["num_ooms"])

    def seed(self, number: int) -> None:
        super().seed(number)
        self._module.manual_seed_all(number)

    def random_states(self) -> list[Tensor]:
        return [*super().random_states(), self._module.get_rng_state().clone()]

    def settle(self) -> None:
        torch.ones((), device=self.torch, requires_grad=True).exp().backward()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()

    def start(self) -> None:
        if self.fake is not None:
            for stream_id in range(self.fake.streams()):
                self.fake.delay(stream_id, 0.0)
        _C.set_poison(True)  # host memory that came free is never read again

    def stream(self) -> torch.Stream:
        return torch.Stream(self.torch)

    def delay(self, seconds: float, stream_id: int = 0) -> None:
        if self.fake is not None:
            self.fake.delay(stream_id, seconds)
            return
        kind = int(torch._C._autograd.DeviceType.CUDA)
        stream = torch.Stream(stream_id=stream_id, device_index=0, device_type=kind)
        with stream if stream_id else contextlib.nullcontext():
            torch.cuda._sleep(int(seconds * self._CYCLES_PER_S))


def device_of(name: str) -> Device:
    """Return one of `DEVICES`.

    Raises:
        RuntimeError: there is none of that type here.
    """
    return Device() if name == CPU else Accelerator(name)


# ----------------------------------------------------------------------------------------------- net

op_fails: list[Callable[[], None]] = []
"""Called whenever the program's own op runs."""


@torch.library.custom_op("delta_chaos::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """Multiply by 1.5; an op of a program's own, which can be told to fail."""
    for fail in op_fails:
        fail()
    return x * 1.5


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, grad: grad * 1.5)


class Block(nn.Module):
    """Linear, an op in place, dropout, an op of the program's own, and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.linear(x))
        y = nn.functional.gelu(scaled(nn.functional.dropout(y, 0.1)))
        return x + y.view(-1).view_as(x).tanh()


def _nobody(phase: str, block: int) -> None:
    pass


Around = Callable[..., contextlib.AbstractContextManager[object]]


class World:
    """The net, what it trains to, and where in a step somebody wants to be called.

    Attributes:
        device: that it trains on.
        moment: called with the phase and the number of the block, whenever one is reached.
        around_block: encloses each block of forward.
        around_backward: encloses the call of backward.
        base_bytes: that live while nothing is trained.
        range_bytes: that a step takes beside these.
    """

    moment: Callable[[str, int], None]
    around_block: Around
    around_backward: Around

    def __init__(self, seed: int, device: Device | None = None) -> None:
        self.device = device or device_of(CPU)
        self.seed = seed
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS)).to(self.device.torch)
        self.x = torch.randn(self.device.rows, WIDTH).to(self.device.torch)
        self.rest()
        # MKL chooses its kernels at their first call, which must not be one of two threads: a session sees to that.
        delta.Runtime(1 << 30, device=str(self.device.torch)).close()
        self.wanted = self.step(None)  # and what a library takes once is taken
        self.rest()
        self.base_bytes = self.device.allocated_bytes()
        self.device.reset_peak()
        self.step(None)
        self.range_bytes = self.device.peak_bytes() - self.base_bytes

    def loss(self) -> Tensor:
        """Run forward."""
        x = self.x
        for number, block in enumerate(self.blocks):
            self.moment(FORWARD, number)
            with self.around_block(number):
                x = block(x)
            # Not the block itself: `self` would be held by the graph, and the graph by an error's traceback.
            x.register_hook(lambda _, number=number: self.moment(BACKWARD, number))
        return x.square().mean()

    def step(self, runtime: delta.Runtime | None) -> list[Tensor]:
        """Run one step on fixed numbers; return the loss, all gradients, and the random states behind it."""
        for parameter in self.blocks.parameters():
            parameter.grad = None
        self.device.seed(self.seed)
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = self.loss()
            with self.around_backward():
                loss.backward()
        gradients = [p.grad for p in self.blocks.parameters() if p.grad is not None]
        told = [each.detach().to("cpu", copy=True) for each in (loss, *gradients)]
        return told + self.device.random_states()

    def is_right(self, told: list[Tensor]) -> bool:
        """Whether these are the bits of a step without a runtime."""
        return len(told) == len(self.wanted) and all(map(torch.equal, told, self.wanted))

    def budget_bytes(self, share: float) -> int:
        """Return how much lives when `share` of what the step needs lives beside the weights."""
        return self.base_bytes + int(share * self.range_bytes)

    def runtime(self, share: float = 0.7, **settings: Any) -> delta.Runtime:
        """Return a new runtime that leaves `share` of what the step needs."""
        budget_bytes = self.device.allocated_bytes() + int(share * self.range_bytes)
        return delta.Runtime(budget_bytes, device=str(self.device.torch), min_bytes=0, **settings)

    def rest(self) -> None:
        """Let nobody be called any more, and forget the gradients."""
        self.moment = _nobody
        self.around_block = self.around_backward = contextlib.nullcontext
        for parameter in self.blocks.parameters():
            parameter.grad = None
