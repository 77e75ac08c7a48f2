"""The verb `doctor`: what this machine offers. It works, and says what is missing, without the extension and torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from delta_runtime.cli import PROGRAM
from delta_runtime.config import BUDGET_VARIABLE, VARIABLES, Config, unknown_variables
from delta_runtime.core.cgroup import cgroup_limit_bytes
from delta_runtime.core.cores import usable_cores
from delta_runtime.core.errors import DeltaError
from delta_runtime.core.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add the verb to the command line."""
    commands.add_parser("doctor", help="show what this machine offers: devices, tiers, limits")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report; `missing` says that the runtime needs what is not there."""

    label: str
    text: str
    missing: bool = False


def doctor() -> int:
    """Print what this machine offers; see the module's docstring.

    Returns:
        0, or 1 if something is missing that the runtime cannot do without.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    torch = _import_or_none("torch")
    sections: dict[str, Callable[[], list[Finding]]] = {
        "Software": lambda: _find_software(torch),
        "Devices": lambda: _find_devices(torch),
        "Memory": _find_memory,
        "Tiers": lambda: _find_tiers(torch),
        "Environment": _find_environment,
    }
    missing = 0
    for title, find in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, min_width=72)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for finding in find():
            missing += finding.missing
            table.add_row(finding.label, finding.text, style="red" if finding.missing else None)
        console.print(table)
    console.print(f"{missing} missing: see above." if missing else "Nothing is missing.")
    return 1 if missing else 0


def _find_software(torch: ModuleType | None) -> list[Finding]:
    findings = [Finding("Python", f"{platform.python_version()} on {platform.platform()}")]
    if torch is None:
        findings.append(Finding("torch", "missing: pip install torch", missing=True))
    else:
        findings.append(Finding("torch", torch.__version__))
    findings.append(_find_extension())
    if torch is not None and torch.version.cuda is not None:
        findings.append(_find_cuda_extension())
    findings.append(_find_entry_point())
    findings += [_find_distribution(name, use) for name, use in _OPTIONAL_PACKAGES.items()]
    return findings


_OPTIONAL_PACKAGES = {
    "cupy-cuda13x": "pinning host memory (extra: cuda)",
    "matplotlib": "plots (extra: plots)",
}


def _find_extension() -> Finding:
    try:
        extension = importlib.import_module("delta_runtime._C")
    except Exception as error:  # whatever a wrongly built library does, doctor goes on
        text = f"missing: {error}. Build it: pip install --no-build-isolation -e ."
        return Finding("extension", text, missing=True)
    return Finding("extension", Path(extension.__file__ or "built in").name)


def _find_cuda_extension() -> Finding:
    label = "extension for CUDA"
    try:
        extension = importlib.import_module("delta_runtime._cuda")
    except ModuleNotFoundError:
        text = (
            "not built: what CUDA's allocator reserves may pass the budget. pip install "
            "nvidia-cuda-crt, and build delta_runtime again"
        )
        return Finding(label, text)
    except Exception as error:
        return Finding(label, f"cannot be loaded: {error}", missing=True)
    return Finding(label, Path(extension.__file__ or "built in").name)


def _find_entry_point() -> Finding:
    points = importlib.metadata.entry_points(group="torch.backends")
    if all(point.name != "delta_runtime" for point in points):
        text = f"not installed: {BUDGET_VARIABLE} has no effect, `{PROGRAM} run` works"
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        text = "switched off by TORCH_DEVICE_BACKEND_AUTOLOAD"
    else:
        text = f"found by `import torch`, acts when {BUDGET_VARIABLE} is set"
    return Finding("entry point", text)


def _find_distribution(name: str, use: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, f"not installed; it is for {use}")


def _find_devices(torch: ModuleType | None) -> list[Finding]:
    threads = "" if torch is None else f", {torch.get_num_threads()} threads in torch"
    findings = [Finding("cpu", f"{usable_cores()} cores{threads}")]
    if not _has_accelerator(torch):
        findings.append(Finding("accelerator", "none: the device is the CPU, its memory is RAM"))
        return findings
    assert torch is not None
    kind = torch.accelerator.current_accelerator().type
    for index in range(torch.accelerator.device_count()):
        name, text = f"{kind}:{index}", "memory unknown"
        backend: Any = getattr(torch, kind, None)
        try:
            free_bytes, total_bytes = backend.mem_get_info(index)
            text = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
            text = f"{backend.get_device_name(index)}, {text}"
        except Exception as error:  # not every backend has these; a broken driver raises anything
            text = f"{text} ({error})"
        findings.append(Finding(name, text))
    return findings


def _find_memory() -> list[Finding]:
    findings = []
    psutil = _import_or_none("psutil")
    if psutil is None:
        findings.append(Finding("RAM", "psutil missing: pip install psutil", missing=True))
    else:
        ram, swap = psutil.virtual_memory(), psutil.swap_memory()
        text = f"{format_bytes(ram.available)} available of {format_bytes(ram.total)}"
        findings.append(Finding("RAM", f"{text}, {format_bytes(swap.total)} swap"))
    limit_bytes = cgroup_limit_bytes()
    findings.append(Finding("cgroup", format_bytes(limit_bytes) if limit_bytes else "no limit"))
    findings.append(Finding("RLIMIT_MEMLOCK", _memlock_text()))
    return findings


def _memlock_text() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return "unknown here"
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def _find_tiers(torch: ModuleType | None) -> list[Finding]:
    findings = []
    if _has_accelerator(torch):
        assert torch is not None
        findings += _measure_link(torch)
    else:
        findings.append(
            Finding("host tier", "needs an accelerator; host_budget makes the CPU stand in for one")
        )
    findings.append(Finding("memory copy", _measure_memory_copy()))
    folder = tempfile.gettempdir()
    disk = shutil.disk_usage(folder)
    text = f"{format_bytes(disk.free)} free of {format_bytes(disk.total)} in {folder}"
    findings.append(Finding("disk tier", text + _file_system_text(folder)))
    findings += _measure_disk(folder)
    return findings


def _measure_disk(folder: str, total_bytes: int = 64 * 1024**2) -> list[Finding]:
    """Bytes written and read per second with O_DIRECT, which is the disk's speed, and without."""
    try:
        from delta_runtime.act.spill import measure_disk
    except Exception as error:  # no extension: told above
        return [Finding("disk speed", f"unknown: {error}")]
    findings = []
    for direct, label in ((True, "disk, O_DIRECT"), (False, "disk, page cache")):
        try:
            out_bytes_per_s, in_bytes_per_s = measure_disk(folder, total_bytes, direct=direct)
        except (OSError, DeltaError) as error:
            findings.append(Finding(label, f"not to be had in {folder}: {error}"))
            continue
        speeds = f"out {format_bytes(out_bytes_per_s)}/s, in {format_bytes(in_bytes_per_s)}/s"
        findings.append(Finding(label, speeds))
    return findings


def _file_system_text(folder: str) -> str:
    """Return the file system of a folder, with a word where it is not a disk at all."""
    psutil = _import_or_none("psutil")
    if psutil is None:
        return ""
    real = Path(os.path.realpath(folder))
    mounts = [m for m in psutil.disk_partitions(all=True) if real.is_relative_to(m.mountpoint)]
    if not mounts:
        return ""
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype
    return f", {kind}" + (": this is RAM, not a disk" if kind in ("tmpfs", "ramfs") else "")


def _measure_memory_copy(block_bytes: int = 64 * 1024**2, repeats: int = 5) -> str:
    """Bytes copied per second by one thread, from memory to memory: the best of a few copies."""
    import numpy as np

    source = np.ones(block_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    best_s = float("inf")
    for _ in range(repeats):
        start_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - start_s)
    return f"{format_bytes(block_bytes / best_s)}/s, one thread"


def _measure_link(torch: ModuleType, block_bytes: int = 256 * 1024**2) -> list[Finding]:
    """Whether memory can be pinned, and the bandwidth of each direction from device events."""
    try:
        device = torch.accelerator.current_accelerator()
        host = torch.empty(block_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(block_bytes, dtype=torch.uint8, device=device)
        findings = [Finding("host tier", f"pinning {format_bytes(block_bytes)} works")]
        for label, target, source in (("to device", there, host), ("to host", host, there)):
            target.copy_(source, non_blocking=True)  # the first one warms up
            start = torch.Event(device, enable_timing=True)
            end = torch.Event(device, enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            copy_s = start.elapsed_time(end) / 1000
            findings.append(Finding(f"link {label}", f"{format_bytes(block_bytes / copy_s)}/s"))
    except (
        Exception
    ) as error:  # no memory, no permission, a driver's own classes: all the same here
        return [Finding("host tier", f"pinned copies do not work: {error}")]
    return findings


def _find_environment() -> list[Finding]:
    findings = [
        Finding(variable, os.environ[variable])
        for variable in VARIABLES.values()
        if variable in os.environ
    ]
    findings += [
        Finding(variable, f"not one of ours: {near}?" if near else "not one of ours")
        for variable, near in unknown_variables().items()
    ]
    try:
        config = Config.from_environment()
    except DeltaError as error:
        return [*findings, Finding("verdict", f"cannot be used: {error}", missing=True)]
    if config is None:
        return [*findings, Finding("verdict", f"{BUDGET_VARIABLE} is not set: the runtime is off")]
    return [*findings, Finding("verdict", f"budget {config.budget}, policy {config.policy}")]


def _has_accelerator(torch: ModuleType | None) -> bool:
    return torch is not None and bool(torch.accelerator.is_available())


def _import_or_none(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception:  # a broken installation counts as none
        return None
