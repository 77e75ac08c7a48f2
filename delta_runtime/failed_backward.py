"""What PyTorch keeps of a backward that raised: the nodes that were ready and had not run, with all that they hold.

They stay in a queue of the thread until its next backward. Whoever catches an error to try again, with a smaller batch
say, would have much less room for that.
"""

from __future__ import annotations

import contextlib

import torch

# One node of autograd to run, and the gradient to run it with: made once, so that running it needs no op.
with torch.inference_mode(False):
    _leaf = torch.zeros((), device="cpu", requires_grad=True)
    _one = torch.ones((), device="cpu")


def release_queue() -> None:
    """Free what the queue of this thread keeps, by a backward of one node and no op.

    Does nothing inside of a backward on this thread. Raises nothing: it is called while an error is on its way.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    # What fails here is of somebody's mode or hook; then the queue stays as it is.
    with contextlib.suppress(Exception), torch._C.DisableTorchFunction():
        torch.autograd.Variable._execution_engine.run_backward(
            (_leaf,), (_one,), False, False, (_leaf,), allow_unreachable=True, accumulate_grad=False
        )
