"""A simulated accelerator, "fake:0", with the memory and stream semantics of CUDA: `load()` compiles and registers it.

Loading changes the process for good: torch.accelerator.current_accelerator() becomes "fake". Load it in a process of
its own, and before the first backward, because autograd counts the devices then. What it simulates and what it does
not is said at the top of fake_accelerator.cpp.

    fake = load()
    side = torch.Stream(device="fake")
    with side:
        host.copy_(x, non_blocking=True)
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[2] / "build"

_loaded: FakeAccelerator | None = None


class FakeAccelerator:
    """What a test can set and read. Stream ids are those of `torch.Stream.stream_id`; the default stream is 0."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def set_poison(self, on: bool) -> None:
        """Whether freed blocks are overwritten with 0xFF, by a task of the stream they were allocated on."""
        self._native.set_poison(on)

    def set_copy_bytes_per_s(self, bytes_per_s: float, stream_id: int | None = None) -> None:
        """How fast enqueued copies run, on one stream or on all; 0: as fast as they can.

        A copy sleeps for one half of its time, moves the bytes, and sleeps for the other half.
        """
        self._native.set_copy_bytes_per_s(bytes_per_s, -1 if stream_id is None else stream_id)

    def delay(self, stream_id: int, seconds: float) -> None:
        """Enqueues a sleep."""
        self._native.delay(stream_id, seconds)

    def set_lateness(self, seconds: float, stream_id: int = 0) -> None:
        """How much later than it could each task of a stream begins, poison included; 0: none."""
        self._native.set_lateness(seconds, stream_id)

    def set_lost(self, lost: bool) -> None:
        """Whether asking for the state of an event, or waiting for it, fails, as on a card that has crashed."""
        self._native.set_lost(lost)

    def set_capacity(self, capacity: int) -> None:
        """The size of the device's memory in bytes, cached blocks included; 0: no limit."""
        self._native.set_capacity(capacity)

    def set_segments(self, scale: int, expandable: bool = False) -> None:
        """How memory is taken from the system: 0: each block by itself. Else as by CUDA's caching allocator.

        Its segments (2 MiB for what is up to 1 MiB, 20 MiB for what is below 10 MiB, whole multiples of 2 MiB above)
        are cut up and joined again; all these sizes are divided by `scale`. With `expandable` the segments grow and
        shrink by pages of 2 MiB for what is up to 1 MiB, and of 20 MiB for the rest, divided likewise. What is cached
        is given back first.
        """
        self._native.set_segments(scale, expandable)

    def refuse_allocation(self, after: int) -> None:
        """Let the allocation after so many more find no memory, once; negative: let all find what there is."""
        self._native.refuse_allocation(after)

    def limited_allocator(self) -> Any:
        """Its allocator, for `_C.set_limited_allocator`: one that can keep what it reserves to a limit."""
        return self._native.limited_allocator()

    def streams(self) -> int:
        """How many streams there are at the most; their ids are the numbers below."""
        return self._native.streams()

    def allocated_bytes(self) -> int:
        """The bytes of live blocks, each rounded up to 512."""
        return self._native.allocated_bytes()

    def copies(self) -> int:
        """The number of copies that have run without their caller waiting: non_blocking=True, or within the device."""
        return self._native.copies()

    def copied_bytes(self, stream_id: int) -> int:
        """How many bytes the enqueued copies of a stream have moved, so far."""
        return self._native.copied_bytes(stream_id)

    def copy_s(self, stream_id: int) -> float:
        """How many seconds the enqueued copies of a stream have taken, so far."""
        return self._native.copy_s(stream_id)

    def waits(self) -> int:
        """How often the host has waited where a real device would make it: for a stream, an event, a value, a copy."""
        return self._native.waits()

    def blocked_s(self, stream_id: int) -> float:
        """How many seconds a stream has waited for events, so far."""
        return self._native.blocked_s(stream_id)

    def current_stream_id(self) -> int:
        return self._native.current_stream_id()

    def synchronize(self) -> None:
        self._native.synchronize()


def can_compile() -> bool:
    from torch.utils import cpp_extension  # takes a moment to import

    compiler = os.environ.get("CXX", "c++")
    return shutil.which(compiler.split()[0]) is not None and cpp_extension.is_ninja_available()


def load(verbose: bool = False) -> FakeAccelerator:
    """Compiles, once per version of torch and Python, and registers the backend. Later calls return the same object."""
    global _loaded
    if _loaded is not None:
        return _loaded
    from torch.utils import cpp_extension

    folder = BUILD / f"fake-accelerator-{sys.implementation.cache_tag}-torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    native = cpp_extension.load(
        name="fake_accelerator",
        sources=[str(HERE / "fake_accelerator.cpp")],
        extra_cflags=["-O1"],
        extra_include_paths=[str(HERE.parents[2] / "csrc")],
        build_directory=str(folder),
        verbose=verbose,
    )
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", _device_module(native))
    torch.utils.generate_methods_for_privateuse1_backend()
    # Copies that are still under way must not meet host memory that the end of the interpreter frees. A forked child
    # has none: the workers are threads.
    process = os.getpid()
    atexit.register(lambda: native.synchronize() if os.getpid() == process else None)
    _loaded = FakeAccelerator(native)
    return _loaded


def _device_module(native: Any) -> types.ModuleType:
    """The module torch.fake, as far as torch itself asks for it."""
    module = types.ModuleType("torch.fake", "The simulated accelerator of the tests.")
    process = os.getpid()

    def check(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index not in (None, 0, -1):
            raise ValueError(f"there is no device {device}")

    class device:  # noqa: N801, it is torch.fake.device
        def __init__(self, index: Any = 0) -> None:
            check(index)
            self.idx = 0

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    def generator() -> torch.Generator:
        return native.default_generator()

    def manual_seed(seed: int) -> None:
        generator().manual_seed(seed)

    def set_rng_state(state: torch.Tensor, device: Any = "fake") -> None:
        generator().set_state(state)

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: os.getpid() != process,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": check,
        "synchronize": lambda device=None: native.synchronize(),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "initial_seed": lambda: generator().initial_seed(),
        "get_rng_state": lambda device="fake": generator().get_state(),
        "set_rng_state": set_rng_state,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "memory_allocated": lambda device=None: torch.accelerator.memory_allocated(),
        "max_memory_allocated": lambda device=None: torch.accelerator.max_memory_allocated(),
        "empty_cache": lambda: torch.accelerator.empty_cache(),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    module.device = device
    module.Stream = torch.Stream
    module.Event = torch.Event
    return module
