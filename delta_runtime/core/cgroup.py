"""How much memory and how many cores the control groups of this process leave it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def cgroup_limit_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the smallest memory limit of this process's control groups (v1 or v2) and their parents."""
    limits = []
    for version, group in _groups("memory", root, membership):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        try:
            limits.append(int((group / name).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    real = [limit for limit in limits if limit < 2**60]  # v1 writes "none" as a huge number
    return min(real, default=None)


def cgroup_cores(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the smallest share of time that they have on all cores together, in cores; None without a limit."""
    limits = []
    for version, group in _groups("cpu", root, membership):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            limits.append(int(quota) / int(period))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min((limit for limit in limits if limit > 0), default=None)  # v1 writes "none" as -1


def _groups(controller: str, root: Path, membership: Path) -> Iterator[tuple[int, Path]]:
    """Yield the version and the folder of each control group with a controller, the innermost of a hierarchy first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _hierarchy, controllers, path = line.split(":", 2)
        if controllers == "":
            version, top = 2, root
        elif controller in controllers.split(","):
            version, top = 1, root / controller
        else:
            continue
        # In a container the path may be the host's; what is mounted at the top is then our own.
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(top):
                break
            yield version, folder
