"""`delta_runtime._cuda`, where torch is a build for CUDA: it needs no card to be put in front of PyTorch's allocator.

What it then does is tested on a card, by tests/accelerator/test_reserved_limit.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import delta_runtime

PROGRAM = """
import torch
from delta_runtime import _C, _cuda

before = torch._C._cuda_getAllocatorBackend()
first, second = _cuda.limited_allocator(0), _cuda.limited_allocator(0)
assert torch._C._cuda_getAllocatorBackend() == before == "native", "it hands its name on"
_C.set_limited_allocator("cuda:0", first)
assert _C.has_limited_allocator("cuda:0") and not _C.has_limited_allocator("cuda:1")
assert "segments" in torch._C._cuda_memorySnapshot((0, 0)), "it hands on what it does not know of"
try:
    _cuda.limited_allocator(-1)
except RuntimeError as error:
    assert "no card -1" in str(error)
else:
    raise AssertionError
if not torch.cuda.is_available():
    try:
        torch.empty(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        assert not isinstance(error, torch.OutOfMemoryError)
    else:
        raise AssertionError
print("done")
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is no build for CUDA")
def test_it_is_put_in_front_of_pytorchs_allocator():
    """In a process of its own: it stays there."""
    if not list(Path(delta_runtime.__file__).parent.glob("_cuda.*.so")):
        pytest.skip("CUDA's headers were not there when it was built")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
