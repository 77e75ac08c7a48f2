"""The record of one step: its ops, the values between them, what was saved and when it was needed.

A `StepGraph` is columns of numbers, so it can be planned for, simulated and stored without torch.
Times are ticks: one per atomic op, counted from the first op of the step. Covers the record and its
JSON form; how it is taken is `record`'s concern, what to do about it is the planners'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class StepGraph:
    """One forward and backward, as it was observed.

    Ops are in order of execution, forward and backward. Values are what ops made, in order; value
    `v` is one version of one storage. Saved values have a page while autograd holds tickets on them.

    Args:
        fingerprint: identifies the step's forward: equal for steps that run the same ops on the
            same shapes, for the same tensors that need a gradient, and save as much.
        op_name: name of each op, with its overload.
        op_tick: tick at which each op began.
        op_seconds: seconds of each op, by the host's clock on the CPU.
        op_replay_seconds: seconds of each op when it ran again for a rebuild; nan where it did not.
        op_watermark_bytes: most bytes that the op held above what was live at its begin.
        op_ordinary_bytes: bytes that would have been live at its begin with nothing dropped.
        op_backward: whether it ran in backward.
        op_managed_input_bytes: bytes of its inputs that are pages.
        input_offsets, inputs: values that each op reads (CSR over ops).
        value_op: op that made each value.
        value_bytes: bytes of the storage of each value.
        value_fingerprint: of the forward up to and with the op that made it.
        value_repeats: whether its op makes it again bit for bit; a workspace, say, it does not.
        saved: values that autograd saved, in order of their first save.
        saved_at: tick of the first save of each of `saved`.
        alone_at: tick from which nobody but the runtime held its storage; past the end where
            somebody always did.
        released_at: tick at which the last ticket on it went; past the end where none did.
        use_offsets, uses: ticks at which each of `saved` was unpacked (CSR over `saved`).
        ticks: number of ticks of the step.
        persistent_bytes: live bytes at the step's first op.
        cloned_bytes: of copies that were made because a recipe reads what was about to be written.
    """

    fingerprint: int
    op_name: tuple[str, ...]
    op_tick: Ints
    op_seconds: Floats
    op_replay_seconds: Floats
    op_watermark_bytes: Ints
    op_ordinary_bytes: Ints
    op_backward: npt.NDArray[np.bool_]
    op_managed_input_bytes: Ints
    input_offsets: Ints
    inputs: Ints
    value_op: Ints
    value_bytes: Ints
    value_fingerprint: Words
    value_repeats: npt.NDArray[np.bool_]
    saved: Ints
    saved_at: Ints
    alone_at: Ints
    released_at: Ints
    use_offsets: Ints
    uses: Ints
    ticks: int
    persistent_bytes: int
    cloned_bytes: int = 0

    @property
    def n_ops(self) -> int:
        """Number of ops, forward and backward."""
        return len(self.op_tick)

    @property
    def n_values(self) -> int:
        """Number of values that ops of the step made."""
        return len(self.value_op)

    @property
    def saved_bytes(self) -> Ints:
        """Bytes of each saved value."""
        return self.value_bytes[self.saved]

    @property
    def activation_bytes(self) -> int:
        """Bytes of all saved values together."""
        return int(self.saved_bytes.sum())

    @cached_property
    def peak_bytes(self) -> int:
        """Highest live bytes of the step with nothing dropped."""
        return int((self.op_ordinary_bytes + self.op_watermark_bytes).max(initial=0))

    @cached_property
    def seconds(self) -> float:
        """Seconds of all ops together."""
        return float(self.op_seconds.sum())

    @cached_property
    def rerun_seconds(self) -> Floats:
        """What it takes to run each op once more.

        As measured, where that was. Else `op_seconds` times the ratio that other ops of its name
        showed (inputs that are not in the cache any more, cheaper ways that replay takes), or 1.
        """
        known = np.isfinite(self.op_replay_seconds)
        names, name = np.unique(np.array(self.op_name, dtype=object), return_inverse=True)
        first = np.bincount(name[known], self.op_seconds[known], len(names))
        again = np.bincount(name[known], self.op_replay_seconds[known], len(names))
        ratio = np.divide(again, first, out=np.ones(len(names)), where=first > 0)
        return np.where(known, self.op_replay_seconds, self.op_seconds * ratio[name])

    @cached_property
    def first_use(self) -> Ints:
        """Tick of the first unpack of each saved value; `ticks` where there was none."""
        starts, ends = self.use_offsets[:-1], self.use_offsets[1:]
        padded = np.append(self.uses, self.ticks)
        return np.where(ends > starts, padded[np.minimum(starts, len(self.uses))], self.ticks)

    def inputs_of(self, op: int) -> Ints:
        """Values that one op reads."""
        return self.inputs[self.input_offsets[op] : self.input_offsets[op + 1]]

    def to_json(self) -> str:
        """Return the graph as JSON text; `from_json` reads it back exactly."""
        plain: dict[str, Any] = {}
        for field in fields(self):
            content = getattr(self, field.name)
            if isinstance(content, np.ndarray):
                listed = content.tolist()
                content = [None if x != x else x for x in listed]  # nan is not JSON
            plain[field.name] = content
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> StepGraph:
        """Read what `to_json` wrote."""
        plain: Mapping[str, Any] = json.loads(text)
        columns: dict[str, Any] = dict(plain)
        columns["op_name"] = tuple(plain["op_name"])
        for name, kind in _COLUMN_TYPES.items():
            columns[name] = np.array(plain[name], dtype=kind)
        return cls(**columns)


_COLUMN_TYPES: Mapping[str, Any] = {
    "op_tick": np.int64,
    "op_seconds": np.float64,
    "op_replay_seconds": np.float64,
    "op_watermark_bytes": np.int64,
    "op_ordinary_bytes": np.int64,
    "op_backward": np.bool_,
    "op_managed_input_bytes": np.int64,
    "input_offsets": np.int64,
    "inputs": np.int64,
    "value_op": np.int64,
    "value_bytes": np.int64,
    "value_fingerprint": np.uint64,
    "value_repeats": np.bool_,
    "saved": np.int64,
    "saved_at": np.int64,
    "alone_at": np.int64,
    "released_at": np.int64,
    "use_offsets": np.int64,
    "uses": np.int64,
}
