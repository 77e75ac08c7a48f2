"""The spill file: where a runtime swaps to on disk. Opt-in, for it wears disks out.

One file for each runtime, with its space taken at once, and without a name: it is gone when the
process is, however it ends. Where the file system cannot make files without names, one with a name
loses it at once; what a process leaves behind that is killed in between, the next one removes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from delta_runtime.core.errors import UsageError
from delta_runtime.core.units import format_bytes
from delta_runtime.core.warn import warn
from delta_runtime.extension import _C

_SHARE_OF_FREE = 0.5
_BLOCK_BYTES = 4096  # what O_DIRECT wants addresses, offsets and sizes to be multiples of
_STALE_S = 3600.0
_NAME = re.compile(r"delta_runtime-(?P<boot>[0-9a-f]{8})-(?P<pid>\d{1,9})-[0-9a-f]{8}\.spill")
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True, slots=True)
class SpillFile:
    """An open spill file. Whoever opens it closes it, once the extension has its own descriptor.

    Args:
        descriptor: of the file, open for reading and writing.
        budget_bytes: most bytes that are written to it; that much of the disk is taken.
        direct: whether it is open with O_DIRECT; else the page cache takes what is written, and
            speeds are those of memory as long as there is some.
        directory: where it lies.
    """

    descriptor: int
    budget_bytes: int
    direct: bool
    directory: str


def open_spill_file(directory: str | None, budget_bytes: int | None) -> SpillFile:
    """Open a spill file and take its space.

    Args:
        directory: where; None for the system's directory for temporary files.
        budget_bytes: how much; None for half of what is free there.

    Raises:
        UsageError: there is no such directory, nothing can be written to it, or it has less room.
            Nothing is left behind.
    """
    where = directory or tempfile.gettempdir()
    name = "spill_dir" if directory else "disk_budget"
    if not os.path.isdir(where):
        raise UsageError(
            f"{name}: no such directory.", asked=where, change="Make it, or name another one."
        )
    _remove_stale(where)
    if file_system(where) in _MEMORY_FILE_SYSTEMS:
        warn(
            f"delta_runtime: {where} lies in memory, not on a disk: what is swapped there takes RAM "
            "that no budget counts. Name another spill_dir."
        )
    try:
        descriptor = _open_without_name(where)
    except OSError as error:
        raise UsageError(
            f"{name}: no file can be made there.",
            asked=where,
            found=os.strerror(error.errno or 0),
            change="Name a directory that this process may write to.",
        ) from error
    try:
        free_bytes = _free_bytes(descriptor)
        if budget_bytes is None:
            budget_bytes = int(free_bytes * _SHARE_OF_FREE)
        budget_bytes = budget_bytes // _BLOCK_BYTES * _BLOCK_BYTES
        _take_space(descriptor, budget_bytes, free_bytes, where)
        return SpillFile(descriptor, budget_bytes, _use_direct(descriptor), where)
    except BaseException:
        os.close(descriptor)
        raise


def measure_disk(directory: str, total_bytes: int, *, direct: bool) -> tuple[float, float]:
    """Bytes per second written to and read from a new file there, in blocks of 1 MiB.

    Args:
        directory: where; nothing stays behind.
        total_bytes: how much is written, a multiple of 1 MiB.
        direct: with O_DIRECT; else through the page cache, which answers before the disk has it.

    Raises:
        OSError: no file can be made there, or it cannot be written to, or not with O_DIRECT.
    """
    chunk_bytes = 1 << 20
    descriptor = _open_without_name(directory)
    try:
        if error := _preallocate(descriptor, total_bytes):
            raise OSError(error, os.strerror(error))
        if _use_direct(descriptor) != direct:
            if direct:
                raise OSError(errno.EINVAL, "no O_DIRECT")
            _set_direct(descriptor, on=False)
        with mmap.mmap(-1, chunk_bytes) as chunk:
            chunk.write(os.urandom(chunk_bytes))  # some disks are quick with zeros
            speeds = []
            for move in (
                lambda at: os.pwrite(descriptor, chunk, at),
                lambda at: os.preadv(descriptor, [chunk], at),
            ):
                begin = time.perf_counter()
                moved = sum(move(at) for at in range(0, total_bytes, chunk_bytes))
                speeds.append(moved / (time.perf_counter() - begin))
        return speeds[0], speeds[1]
    finally:
        os.close(descriptor)


def file_system(directory: str) -> str:
    """Return the type of the file system that a directory lies on, such as "ext4"; "" if it is unknown."""
    real = Path(os.path.realpath(directory))
    mounts = [m for m in psutil.disk_partitions(all=True) if real.is_relative_to(m.mountpoint)]
    return str(max(mounts, key=lambda each: len(each.mountpoint)).fstype) if mounts else ""


def _free_bytes(descriptor: int) -> int:
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize


def _open_without_name(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    return _open_and_unlink(directory)


def _open_and_unlink(directory: str) -> int:
    name = f"delta_runtime-{_boot()}-{os.getpid()}-{secrets.token_hex(4)}.spill"
    path = os.path.join(directory, name)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # somebody has removed it for us
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_stale(directory: str) -> None:
    """Remove what processes left behind that were killed before they could take the name away."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return  # not readable; opening a file tells more
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        try:
            here = match["boot"] == _boot()
            old = time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_S
            if old or (here and not psutil.pid_exists(int(match["pid"]))):
                os.unlink(entry.path)
        except OSError:
            continue  # somebody else's, or gone by now


def _boot() -> str:
    """Eight hexadecimal digits that change when the machine starts again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return "00000000"


def _preallocate(descriptor: int, total_bytes: int) -> int:
    while (error := int(_C.preallocate(descriptor, total_bytes))) == errno.EINTR:
        pass  # a signal; its handler has run by now, and may have raised
    return error


def _take_space(descriptor: int, budget_bytes: int, free_bytes: int, directory: str) -> None:
    error = _preallocate(descriptor, budget_bytes) if budget_bytes else errno.ENOSPC
    if error == errno.EOPNOTSUPP:  # no promise to be had there; what does not fit later is refused
        error = errno.ENOSPC if budget_bytes > free_bytes else 0
        os.ftruncate(descriptor, budget_bytes)
    if error:
        raise UsageError(
            f"disk_budget: {directory} does not have the room.",
            asked=format_bytes(budget_bytes),
            found=f"{os.strerror(error)}; {format_bytes(free_bytes)} free",
            change="Give less, or name another spill_dir.",
        )


def _use_direct(descriptor: int) -> bool:
    """Turn O_DIRECT on where the file system bears it; whether it is on."""
    try:
        _set_direct(descriptor, on=True)
    except OSError:
        return False
    with mmap.mmap(-1, _BLOCK_BYTES) as block:  # memory that begins at a page
        try:
            if os.pwrite(descriptor, block, 0) == _BLOCK_BYTES == os.preadv(descriptor, [block], 0):
                return True
        except OSError:
            pass
    _set_direct(descriptor, on=False)
    return False


def _set_direct(descriptor: int, *, on: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
