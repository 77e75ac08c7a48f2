"""The faults of stress_chaos.py that only an accelerator has: streams that are late, copies, a device that is lost.

Some can be done to the simulated one only: nobody can tell a card to lose its memory for once. Does not cover the
faults that any device has (chaos_faults.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch

import delta_runtime as delta
from scripts.chaos_strike import LAST_BLOCKS, Fault, Never, Strike
from scripts.chaos_world import (
    BACKWARD,
    BETWEEN,
    CUDA,
    DISK,
    FAKE,
    FORWARD,
    HOST,
    op_fails,
)

ACCELERATORS = (FAKE, CUDA)
_LATE_S = 0.1  # longer than the rest of a step
_DAWDLES_S = 1e-3
_SLOW_BYTES_PER_S = 2e7


# ------------------------------------------------------------------------------------------- memory


def one_refusal(strike: Strike) -> None:
    """Refuse one allocation, whatever room there is."""
    device: Any = strike.device
    strike.takes_if_more(strike.device.refusals)
    device.fake.refuse_allocation(strike.random.randrange(12))
    strike.after.append(lambda: device.fake.refuse_allocation(-1))


def nothing_pinned(strike: Strike) -> Mapping[str, Any]:
    """Let the driver pin no host memory."""

    asked: list[int] = []

    def pin(address: int, bytes_: int) -> bool:  # the session holds it: it must not hold the strike
        asked.append(bytes_)
        return False

    strike.seen.append(lambda: bool(asked))

    patch = mock.patch("delta_runtime.runtime.pinning", return_value=(pin, pin))
    patch.start()
    strike.after.append(patch.stop)
    return {}


def nothing(strike: Strike) -> None:
    """Do nothing: it is so from the beginning."""


# ------------------------------------------------------------------------------------------- streams


def late_compute(strike: Strike) -> None:
    """Let the stream that the net runs on do nothing for a while; on the simulated device it dawdles from then on.

    Ops wait for their stream there: one delay would be over before the next copy begins.
    """
    _late(strike, 0)
    device: Any = strike.device
    if device.fake is not None:
        device.fake.set_lateness(_DAWDLES_S)
        strike.after.append(lambda: device.fake.set_lateness(0.0))


def late_out(strike: Strike) -> None:
    """Let the copies that leave the device begin late."""
    _late(strike, _lanes(strike)[0])


def late_in(strike: Strike) -> None:
    """Let the copies that come back begin late."""
    _late(strike, _lanes(strike)[1])


def _lanes(strike: Strike) -> tuple[int, int]:
    tier = strike.runtime.session.tiers()[-1]
    assert tier["streams"] is not None
    return tier["streams"]


def _late(strike: Strike, stream_id: int) -> None:
    strike.device.delay(_LATE_S, stream_id)
    due_s = time.monotonic() + _LATE_S
    strike.seen.append(lambda: time.monotonic() > due_s)  # else nobody has waited for it
    strike.after.append(torch.accelerator.synchronize)


def slow_copies(strike: Strike) -> None:
    """Let the lanes crawl from now on, until the step is over."""
    device: Any = strike.device
    for stream_id in _lanes(strike):
        device.fake.set_copy_bytes_per_s(_SLOW_BYTES_PER_S, stream_id)
    strike.after.append(torch.accelerator.synchronize)
    strike.after.append(lambda: device.fake.set_copy_bytes_per_s(0.0))
    show_slow_copies(strike, _SLOW_BYTES_PER_S)


def show_slow_copies(strike: Strike, bytes_per_s: float) -> None:
    """Take copies that were as slow as that, from now on, for a sign that the fault was delivered."""
    session = strike.runtime.session

    def moved() -> tuple[int, float]:
        session.take_in_transfers()
        lanes = [each[way] for each in session.tiers() for way in ("out", "in")]
        return sum(lane[1] for lane in lanes), sum(lane[2] for lane in lanes)

    before_bytes, before_s = moved()

    def seen() -> bool:
        moved_bytes, busy_s = moved()
        least_s = (moved_bytes - before_bytes) / bytes_per_s / 2
        return moved_bytes > before_bytes and busy_s - before_s > least_s

    strike.seen.append(seen)


def lost(strike: Strike) -> None:
    """Let the device answer no question about what it has done, until the step is over."""
    device: Any = strike.device
    session = strike.runtime.session
    strike.takes_if_more(lambda: session.counters().failed_writes)
    strike.takes_if_more(lambda: session.counters().failed_reads)
    device.fake.set_lost(True)
    strike.after.append(lambda: device.fake.set_lost(False))


def lost_in_op(strike: Strike) -> None:
    """Lose the device inside of an op, for which memory was given away whose copies out are not over."""
    slow_copies(strike)
    strike.seen.clear()

    def lose() -> None:
        op_fails.clear()
        lost(strike)

    op_fails.append(lose)
    strike.after.append(op_fails.clear)


def without_evidence(strike: Strike) -> Mapping[str, Any]:
    """Return settings without evidence: whoever hashes waits for the stream, and no copy is under way any more."""
    return {"verify": "off"}


def other_stream(strike: Strike) -> None:
    """Run a block, backward, or the whole step, on another stream than the rest; the program waits where it must."""
    other = strike.device.stream()

    @contextlib.contextmanager
    def on_it() -> Iterator[None]:
        outer = torch.accelerator.current_stream()
        other.wait_stream(outer)
        with other:
            strike.took = torch.accelerator.current_stream() == other
            yield
        outer.wait_stream(other)

    if strike.phase == BETWEEN:
        stack = contextlib.ExitStack()
        stack.enter_context(on_it())
        strike.after.append(stack.close)
    elif strike.phase == BACKWARD:
        strike.world.around_backward = on_it
    else:

        def around(number: int) -> contextlib.AbstractContextManager[object]:
            return on_it() if number == strike.block else contextlib.nullcontext()

        strike.world.around_block = around


_BELOW = (HOST, DISK)
_AT_CONSTRUCTION = "host memory for so small a net is pinned when the runtime is made"
NOTHING_LEAVES = "in backward nothing leaves: there is room"

OF_ACCELERATORS: Mapping[str, Fault] = MappingProxyType(
    {
        "one refusal": Fault(one_refusal, devices=(FAKE,)),
        "nothing pinned": Fault(
            nothing,
            devices=ACCELERATORS,
            ways=(HOST,),
            prepare=nothing_pinned,
            never=(Never(_AT_CONSTRUCTION, phases=(FORWARD, BACKWARD)),),
        ),
        "compute late": Fault(late_compute, devices=ACCELERATORS),
        "copies out late": Fault(
            late_out,
            devices=ACCELERATORS,
            ways=_BELOW,
            never=(Never(NOTHING_LEAVES, phases=(BACKWARD,)),),
        ),
        "copies in late": Fault(
            late_in, devices=ACCELERATORS, ways=_BELOW, backward_blocks=LAST_BLOCKS
        ),
        "copies slow": Fault(
            slow_copies, devices=(FAKE,), ways=_BELOW, backward_blocks=LAST_BLOCKS
        ),
        "device lost": Fault(
            lost,
            devices=(FAKE,),
            ways=_BELOW,
            errors=(delta.SwapFailed,),
            backward_blocks=LAST_BLOCKS,
        ),
        "lost in an op": Fault(
            lost_in_op,
            devices=(FAKE,),
            ways=_BELOW,
            phases=(FORWARD,),
            errors=(delta.SwapFailed,),
            prepare=without_evidence,
        ),
        "other stream": Fault(other_stream, devices=ACCELERATORS, arms=True),
    }
)
"""Every fault that only an accelerator has, by name."""
