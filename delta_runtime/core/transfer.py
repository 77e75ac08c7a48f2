"""What is known of the lanes between the device and the nearest tier below it.

Covers the speed and the queues of both lanes at one moment. Does not cover the copies themselves, nor
when a planner lays them (planners/transfer_schedule.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_runtime.core.events import FloatColumn, IntColumn


@dataclass(frozen=True, slots=True)
class Links:
    """What is known of the lanes to the nearest tier at one moment.

    Args:
        out_bytes_per_s, in_bytes_per_s: speed from the device and to it; 0 where nothing is known.
        out_queued_bytes, in_queued_bytes: bytes that wait in each lane.
        tick_s: mean seconds of an op; 0 where nothing is known.
        store_bytes: most bytes that the tier takes.
    """

    out_bytes_per_s: float = 0.0
    in_bytes_per_s: float = 0.0
    out_queued_bytes: int = 0
    in_queued_bytes: int = 0
    tick_s: float = 0.0
    store_bytes: int = 1 << 62

    def out_s(self, bytes_: FloatColumn | IntColumn) -> FloatColumn:
        """Seconds in the lane from the device, for each size in bytes."""
        return _seconds(bytes_, self.out_bytes_per_s)

    def in_s(self, bytes_: FloatColumn | IntColumn) -> FloatColumn:
        """Seconds in the lane to the device, for each size in bytes."""
        return _seconds(bytes_, self.in_bytes_per_s)


def _seconds(bytes_: FloatColumn | IntColumn, bytes_per_s: float) -> FloatColumn:
    return np.asarray(bytes_, np.float64) / bytes_per_s if bytes_per_s else np.zeros(len(bytes_))
