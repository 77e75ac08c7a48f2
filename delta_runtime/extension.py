"""Loads the extension, or says in one sentence what is missing."""

from __future__ import annotations

import torch  # noqa: F401  the extension links against its libraries, which must be loaded first

from delta_runtime.core.errors import (
    DeltaError,
    InplaceModification,
    RecomputeMismatch,
    SwapFailed,
)

try:
    from delta_runtime import _C
except ImportError as error:  # pragma: no cover - the build is broken
    raise DeltaError(
        "The extension delta_runtime._C cannot be loaded.",
        found=f"{type(error).__name__}: {error}",
        change=(
            "Build it against the torch that is installed: "
            "pip install --no-build-isolation -e . (needs g++ and the Python headers)."
        ),
    ) from error

_C.set_error_types(InplaceModification, RecomputeMismatch, SwapFailed)

__all__ = ["_C"]
