"""The record of one step: its ops, the values between them, what was saved and when it was needed.

A `StepGraph` is columns of numbers, so it can be planned for, simulated and stored without torch.
Times are ticks: one per atomic op, counted from the first op of the step. Covers the record and its
JSON form; how it is taken is `record`'s concern, what to do about it is the planners'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_runtime.core.errors import UsageError

FORMAT = "delta_runtime step graph"
VERSION = 3
_READ_TOO = (2,)  # without `work`
"""Of the JSON form. Another number: columns were added, taken away, or mean something else."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RecordedOn:
    """The machine that a step ran on: what the seconds of its record hold for.

    Args:
        device: that held the values, such as "cpu" or "cuda:0".
        threads: of PyTorch within an op.
        torch: its version.
        out_bytes_per_s, in_bytes_per_s: speed of the lanes from the device and to it; 0 where none was measured.
    """

    device: str
    threads: int
    torch: str
    out_bytes_per_s: float = 0.0
    in_bytes_per_s: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class OpWork:
    """What ops have to do, whatever they run on.

    Args:
        flops: floating-point operations of each op that is a product (of matrices, a convolution, attention), a
            multiplication with an addition counting as two; 0 for the others.
        moved_bytes: bytes of the elements that each op reads and writes.
        dtype: of the numbers that each op computes with, such as "float32"; "" where there are none.
    """

    flops: Floats
    moved_bytes: Ints
    dtype: tuple[str, ...]


_MOST = 2.0  # times what an op is expected to take when it runs again
_LITTLE_S = 1e-4


def _middle_ratio(first_s: Floats, again_s: Floats) -> float:
    """Return the ratio between measured seconds that half of `first_s` lies below; 1 where nothing was measured."""
    measured = first_s > 0
    first, ratio = first_s[measured], again_s[measured] / first_s[measured]
    if not len(ratio):
        return 1.0
    order = np.argsort(ratio)
    below = np.cumsum(first[order])
    return float(ratio[order][np.searchsorted(below, below[-1] / 2)])


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
        recorded_on: where it ran; None where nobody said.
        work: what ops have to do; None in records that say nothing of it.
        contracted: whether each op stands for several of a recorded step (`planners/contraction.py`). Values
            are then asked for within ops, which hold them until they end, while `op_ordinary_bytes` are
            live. In a recorded step they are asked for between two ops.
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
    recorded_on: RecordedOn | None = None
    contracted: bool = False
    work: OpWork | None = None

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
        An op is not believed that was measured while something else held the machine up: it
        counts at most twice what its first run and the ratio say, and a tenth of a millisecond.
        """
        known = np.isfinite(self.op_replay_seconds)
        if self.contracted:  # an op stands for several
            return np.where(known, self.op_replay_seconds, self.op_seconds)
        usual = max(_middle_ratio(self.op_seconds[known], self.op_replay_seconds[known]), 1.0)
        of_name: dict[str, list[int]] = {}
        for op in np.flatnonzero(known).tolist():
            of_name.setdefault(self.op_name[op], []).append(op)
        ratios = {
            name: min(
                _middle_ratio(self.op_seconds[ops], self.op_replay_seconds[ops]), _MOST * usual
            )
            for name, ops in of_name.items()
        }
        ratio = np.array([ratios.get(name, 1.0) for name in self.op_name], np.float64)
        most = _MOST * np.maximum(ratio, 1.0) * self.op_seconds + _LITTLE_S
        return np.where(known, np.minimum(self.op_replay_seconds, most), self.op_seconds * ratio)

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
        plain: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for field in fields(self):
            content = getattr(self, field.name)
            if isinstance(content, np.ndarray):
                listed = content.tolist()
                content = [None if x != x else x for x in listed]  # nan is not JSON
            if isinstance(content, OpWork):
                content = {
                    "flops": content.flops.tolist(),
                    "moved_bytes": content.moved_bytes.tolist(),
                    "dtype": list(content.dtype),
                }
            plain[field.name] = asdict(content) if isinstance(content, RecordedOn) else content
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> StepGraph:
        """Read what `to_json` wrote.

        Raises:
            UsageError: the text is no step graph, is of another version, or its columns do not fit each other.
        """
        try:
            plain = json.loads(text)
        except ValueError as error:
            raise UsageError("This is no step graph: it is no JSON.", found=str(error)) from error
        if not isinstance(plain, dict) or plain.pop("format", None) != FORMAT:
            raise UsageError("This is no step graph.", change="Make one with `record`.")
        version = plain.pop("version", None)
        if version not in (VERSION, *_READ_TOO):
            raise UsageError(
                "This step graph has another version.",
                asked=f"version {VERSION}",
                found=f"version {version}",
                change="Record the step again with this version of delta_runtime.",
            )
        columns: dict[str, Any] = dict(plain)
        try:
            columns["op_name"] = tuple(plain["op_name"])
            for name, kind in _COLUMN_TYPES.items():
                columns[name] = np.array(plain[name], dtype=kind)
            if plain["recorded_on"] is not None:
                columns["recorded_on"] = RecordedOn(**plain["recorded_on"])
            if plain.get("work") is not None:
                columns["work"] = _work_of(plain["work"])
            graph = cls(**columns)
            graph._check()
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                "This step graph is damaged.", found=f"{type(error).__name__}: {error}"
            ) from error
        return graph

    def _check(self) -> None:
        """Raise ValueError where columns do not fit each other, or name what is not there."""
        ops, values, saved = len(self.op_tick), len(self.value_op), len(self.saved)
        lengths = {
            **{name: ops for name in _COLUMN_TYPES if name.startswith("op_")},
            **{name: values for name in _COLUMN_TYPES if name.startswith("value_")},
            **dict.fromkeys(("saved", "saved_at", "alone_at", "released_at"), saved),
            **{"op_name": ops, "input_offsets": ops + 1, "use_offsets": saved + 1},
        }
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, not {length}")
        for offsets, of in (("input_offsets", self.inputs), ("use_offsets", self.uses)):
            column = getattr(self, offsets)
            if column[0] != 0 or column[-1] != len(of) or (np.diff(column) < 0).any():
                raise ValueError(f"{offsets} does not cut its column into pieces")
        for name, most in (("inputs", values), ("saved", values), ("value_op", ops)):
            column = getattr(self, name)
            if ((column < 0) | (column >= most)).any():
                raise ValueError(f"{name} names what is not there")
        # Of equal ticks: a clone that autograd saved of what an op writes is an op within that op.
        if (np.diff(self.op_tick) < 0).any() or len(set(self.saved.tolist())) != saved:
            raise ValueError("ops are out of order, or a value is saved twice")
        if (np.diff(self.value_op) < 0).any():
            raise ValueError("values are out of order")
        made_before = np.repeat(np.arange(ops), np.diff(self.input_offsets))
        if (self.value_op[self.inputs] >= made_before).any():
            raise ValueError("an op reads what is made later")
        for name in ("value_bytes", "op_watermark_bytes", "op_ordinary_bytes", "op_seconds"):
            if not (getattr(self, name) >= 0).all():
                raise ValueError(f"{name} holds something negative, or no number")
        self._check_ticks()
        if (self.op_replay_seconds < 0).any():
            raise ValueError("op_replay_seconds holds something negative")
        if self.work is not None:
            self._check_work(self.work)
        if not isinstance(self.contracted, bool):
            raise ValueError("contracted is neither true nor false")

    def _check_work(self, work: OpWork) -> None:
        n = self.n_ops
        if work.flops.shape != (n,) or work.moved_bytes.shape != (n,) or len(work.dtype) != n:
            raise ValueError("work is not of as many ops")
        if not (np.isfinite(work.flops) & (work.flops >= 0)).all() or (work.moved_bytes < 0).any():
            raise ValueError("work holds something negative, or no number")
        if not all(isinstance(each, str) for each in work.dtype):
            raise ValueError("work has a dtype without a name")

    def _check_ticks(self) -> None:
        if isinstance(self.ticks, bool) or not isinstance(self.ticks, int):
            raise ValueError("ticks is no number of ticks")
        for name in ("op_tick", "uses", "saved_at"):
            column = getattr(self, name)
            if ((column < 0) | (column > self.ticks)).any():
                raise ValueError(f"{name} has a tick outside of the step")
        for name in ("alone_at", "released_at"):
            if (getattr(self, name) < 0).any():
                raise ValueError(f"{name} has a tick before the step")


def _work_of(plain: Mapping[str, Any]) -> OpWork:
    return OpWork(
        flops=np.array(plain["flops"], np.float64),
        moved_bytes=np.array(plain["moved_bytes"], np.int64),
        dtype=tuple(plain["dtype"]),
    )


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
