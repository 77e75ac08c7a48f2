"""What this machine's processor can compute at all."""

from __future__ import annotations

import functools

import torch


@functools.cache
def lstm_runs_in_bfloat16() -> bool:
    """Whether `torch.nn.LSTM` runs on the CPU under bfloat16 autocast.

    PyTorch gives it to oneDNN, which has a kernel for processors with AVX-512 only and raises on others.
    """
    layer = torch.nn.LSTM(4, 4)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.zeros(2, 1, 4))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        return False
    return True
