"""Pinning host memory through CuPy, where it is installed."""

from __future__ import annotations

from typing import Any


class CupyDriver:
    """The CUDA runtime that CuPy is linked to; it raises what the runtime reports, and clears it.

    Args:
        runtime: `cupy.cuda.runtime`.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def register(self, address: int, bytes_: int) -> bool:
        """See `delta_runtime.act.pinning.Driver`."""
        try:
            self._runtime.hostRegister(address, bytes_, 0)
        except self._runtime.CUDARuntimeError:
            return False
        return True

    def unregister(self, address: int) -> bool:
        """See `delta_runtime.act.pinning.Driver`."""
        try:
            self._runtime.hostUnregister(address)
        except self._runtime.CUDARuntimeError:
            return False
        return True


def cupy_driver() -> CupyDriver | None:
    """CuPy's CUDA runtime; None where CuPy is not installed, or finds no card."""
    try:
        import cupy

        cards = cupy.cuda.runtime.getDeviceCount()
    except (
        Exception
    ):  # not installed, built for another CUDA, or a driver that is too old: all the same here
        return None
    return CupyDriver(cupy.cuda.runtime) if cards else None
