"""What PyTorch keeps of a backward that raised: the nodes that were ready and had not run, with all that they hold.

They stay in a queue of the thread until its next backward. Whoever catches an error to try again, with a smaller batch
say, would have much less room for that.
"""

from __future__ import annotations

import contextlib

import torch

with torch.inference_mode(False):
    _leaf = torch.zeros((), device="cpu", requires_grad=True)
    _one = torch.ones((), device="cpu")


def release_queue() -> None:
    """Let go of it, by a backward of one node and no op. Nothing while a backward runs on this thread."""
    if torch._C._current_graph_task_id() == -1:
        with contextlib.suppress(
            RuntimeError
        ):  # of somebody's anomaly mode or hooks: the queue stays then
            torch.autograd.grad(_leaf, _leaf, _one)
