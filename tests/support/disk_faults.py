"""What goes wrong with a spill file, done for real: another file in its place, cut short, written to by somebody."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import delta_runtime as delta

MIB = 1 << 20


def disk(runtime: delta.Runtime) -> dict:
    """What the extension says of the tier on disk."""
    return next(tier for tier in runtime.session.tiers() if tier["tier"] == "disk")


def descriptor(runtime: delta.Runtime) -> int:
    """The extension's own."""
    return disk(runtime)["descriptor"]


@contextlib.contextmanager
def replaced(fd: int, path: str, flags: int) -> Iterator[None]:
    """Another file in the place of an open one."""
    kept = os.dup(fd)
    other = os.open(path, flags)
    os.dup2(other, fd)
    os.close(other)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        os.close(kept)


def cut_and_grown(fd: int) -> None:
    """It reads zeros from here on."""
    size = os.fstat(fd).st_size
    os.truncate(fd, 0)
    os.truncate(fd, size)


def shifted(fd: int) -> None:
    """Something else has written a page of the file, every half MiB."""
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:  # without O_DIRECT
        for at in range(0, os.fstat(fd).st_size, MIB // 2):
            os.pwrite(file.fileno(), bytes(range(256)) * 16, at)
