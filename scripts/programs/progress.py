"""How far a run is: a bar with the time that is left where a terminal watches, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_EVERY_S = 30.0


class Progress:
    """Shows how far a run is.

    Args:
        total: programs to run.
        seconds: after which it ends whatever is left; None: never.
    """

    def __init__(self, total: int, seconds: float | None) -> None:
        self.total = total
        self.seconds = seconds
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Progress:
        self.begin_s = self.said_s = time.monotonic()
        if sys.stdout.isatty():
            from rich import progress

            self.bar = progress.Progress(
                progress.TextColumn("{task.completed} of {task.total} programs"),
                progress.BarColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[found]} findings"),
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, found=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, programs: int, findings: int) -> None:
        """Takes note of how many programs were run, and how many went wrong."""
        if self.bar is not None:
            self.bar.update(self.task, completed=programs, found=findings)
            return
        now_s = time.monotonic()
        if now_s - self.said_s < LINE_EVERY_S:
            return
        self.said_s = now_s
        took_s = now_s - self.begin_s
        left_s = took_s / max(1, programs) * (self.total - programs)
        if self.seconds is not None:
            left_s = min(left_s, self.seconds - took_s)
        print(
            f"{programs} of {self.total} programs, {findings} findings, {took_s:.0f} s, "
            f"{max(0.0, left_s):.0f} s left",
            flush=True,
        )
