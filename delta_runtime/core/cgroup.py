"""How much memory the control groups of this process leave it."""

from __future__ import annotations

from pathlib import Path


def cgroup_limit_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the smallest memory limit of this process's control groups (v1 or v2) and their parents."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _hierarchy, controllers, path = line.split(":", 2)
        if controllers == "":
            top, file_name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, file_name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's; what is mounted at the top is then our own.
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(top):
                break
            try:
                limits.append(int((folder / file_name).read_text()))
            except (OSError, ValueError):  # not there, or "max"
                continue
    real = [limit for limit in limits if limit < 2**60]  # v1 writes "none" as a huge number
    return min(real, default=None)
