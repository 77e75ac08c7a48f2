"""A file of JSON lines that a stress script adds to, and that a later run of it goes on from. Not run by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.common import machine

Point = TypeVar("Point")


class OtherOptions(SystemExit):
    """The file is of a run with other options: its points cannot stand beside new ones. Ends a script with the text."""


class PointsFile(Generic[Point]):
    """Points of one kind, all measured with the same options.

    Args:
        path: of the file; None keeps points in memory alone.
        make: a point of its fields: the dataclass.
        options: that a point's figures depend on, beside what the point itself says.

    Raises:
        OtherOptions: the file is there, and was made with other options. It is left as it is.
    """

    def __init__(
        self, path: Path | None, make: Callable[..., Point], options: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.points: list[Point] = []
        if path is None:
            return
        if not path.exists():
            path.write_text(json.dumps({"machine": machine(), "options": dict(options)}) + "\n")
            return
        head, *lines = map(json.loads, path.read_text().splitlines())
        if head.get("options") != dict(options):
            raise OtherOptions(f"{path} was made with {head.get('options')}, not {dict(options)}")
        self.points = [make(**line) for line in lines]

    def add(self, point: Point) -> Point:
        """Keep a point."""
        self.points.append(point)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(point)) + "\n")  # type: ignore[call-overload]
        return point
