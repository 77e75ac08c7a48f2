"""PyTorch's own databases of ops and modules as rows that can be run ordinary and managed, and compared bit by bit.

A row is an op (or a module in training or evaluation mode) and one way to call it. Running a row takes some of its
sample inputs, computes outputs, gradients for random cotangents and the random state in an ordinary run, and again
under a mode of eviction. Leaves are used as they are, and cloned first, so that something recorded lies between the
leaf and the op.

Note: what makes a row mean something
1. The outputs are let go before backward: a value that the test still holds frees nothing when dropped, so it would
   never be rebuilt. Backward starts from gradient edges instead.
2. Some small ops run between forward and backward: evictions happen at op boundaries.
3. A row counts as rebuilt only if the runtime says that it rebuilt something.

Does not cover: ops without autograd, and dtypes an op does not support in backward.
"""

from __future__ import annotations

import enum
import itertools
import random
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.bitwise import Snapshot, difference, freeze_all, prefixed, random_state
from tests.support.device import device_under_test, moved, seed
from tests.support.managed import managed

NOT_REPEATABLE = frozenset({"linalg.lstsq"})
"""Ops whose bits on the CPU differ between two ordinary runs: lstsq's depend on where its blocks happen to lie in
memory, in about one of twenty samples. Such a row is run all the same, and errors count, but differences do not."""


SAMPLES_SEED = 1234


class Outcome(enum.Enum):
    """How a row ended, the worst first."""

    ERROR = "raised under the runtime and not without it"
    MISMATCH = "bits differ"
    NOT_REPEATABLE = "differs from run to run by itself"
    REBUILT = "rebuilt, same bits"
    NOTHING_TO_REBUILD = "nothing to rebuild, same bits"
    NO_SAMPLE = "no sample runs"


@dataclass(slots=True)
class Result:
    """What a row gave under one mode.

    Args:
        outcome: see `Outcome`.
        rebuilt: values rebuilt.
        cases: sample inputs compared, each counted with and without cloning.
        detail: of a failure, in a few lines.
    """

    outcome: Outcome
    rebuilt: int = 0
    cases: int = 0
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in (Outcome.ERROR, Outcome.MISMATCH)


Run = Callable[[], Snapshot]
"""Runs one case and says what it left behind; to be called once."""

Case = Callable[[], Run]
"""Makes fresh leaves for one run. Called outside of the managed region, so that leaves are sources there."""


@dataclass(frozen=True, slots=True)
class Row:
    """An op or module, one way to call it, and a generator of its cases.

    Args:
        name: as failures and tables show it.
        op: the name in the database.
        cases: (most samples wanted) -> an iterator of cases.
    """

    name: str
    op: str
    cases: Callable[[int], Iterator[Case]] = field(compare=False)


def _fresh(tree: Any, leaves: list[Tensor]) -> Any:
    """Copies all tensors of `tree` with their strides; those that require grad are appended to `leaves`."""

    def copy(t: Tensor) -> Tensor:
        fresh = t.detach().clone()
        if t.layout == torch.strided and t.numel() > 0:
            try:
                fresh = torch.empty_strided(
                    t.size(), t.stride(), dtype=t.dtype, device=t.device
                ).copy_(t.detach())
            except RuntimeError:  # overlapping
                fresh = t.detach().clone()
        if t.requires_grad:
            leaves.append(fresh.requires_grad_())
        return fresh

    return tree_map_only(Tensor, copy, tree)


def _cloned(tree: Any) -> Any:
    """Puts a recorded op between each leaf and its user."""
    return tree_map_only(
        Tensor, lambda t: t * 1 if t.requires_grad and t.layout == torch.strided else t, tree
    )


def _op_boundaries() -> None:
    x = torch.zeros(2, device=device_under_test())
    for _ in range(6):
        x = x + 1


def _forward_backward(forward: Callable[[], Any], leaves: list[Tensor]) -> Snapshot:
    """Runs `forward` from a seeded generator, then backward for random cotangents."""
    seed(1234)
    result = forward()
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    snapshot = freeze_all("output", outputs)
    snapshot |= prefixed("after forward", random_state())
    differentiable = [
        t for t in outputs if t.requires_grad and (t.is_floating_point() or t.is_complex())
    ]
    edges = [get_gradient_edge(t) for t in differentiable]
    shapes = [
        (t.shape, t.dtype) if t.layout == torch.strided else torch.ones_like(t.detach())
        for t in differentiable
    ]
    del result, outputs, differentiable
    if not edges or not leaves:
        return snapshot
    generator = torch.Generator().manual_seed(99)
    cotangents = [
        shape
        if isinstance(shape, Tensor)
        else moved(torch.randn(shape[0], dtype=shape[1], generator=generator))
        for shape in shapes
    ]
    _op_boundaries()
    seed(77)
    gradients = torch.autograd.grad(edges, leaves, cotangents, allow_unused=True)
    snapshot |= freeze_all("gradient", gradients)
    snapshot |= prefixed("after backward", random_state())
    return snapshot


def _op_case(function: Callable[..., Any], sample: Any, clone: bool) -> Case:
    def prepare() -> Run:
        leaves: list[Tensor] = []
        tree = _fresh((sample.input, sample.args, sample.kwargs), leaves)

        def forward() -> Any:
            first, rest, keywords = _cloned(tree) if clone else tree
            return function(first, *rest, **keywords)

        return lambda: _forward_backward(forward, leaves)

    return prepare


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The samples of an op that are there with gradients, each made from the same random state.

    `op.sample_inputs` also looks for a unittest by reading the source of all callers, which takes longer than the rest.
    """
    made = iter(op.sample_inputs_func(op, str(device_under_test()), dtype, True))
    while True:
        seed(SAMPLES_SEED)
        random.seed(SAMPLES_SEED)
        np.random.seed(SAMPLES_SEED)
        sample = next(made, None)
        if sample is None:
            return
        yield sample


def op_rows(dtype: torch.dtype) -> list[Row]:
    """All rows of op_db that have a backward in `dtype`: functional variants, and in-place ones where there are any."""
    rows = []
    device = device_under_test()
    for op in op_db:
        if not op.supports_autograd or dtype not in op.supported_backward_dtypes(device.type):
            continue
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name

        def cases(
            samples: int, op: Any = op, function: Any = op.op, inplace: bool = False
        ) -> Iterator[Case]:
            for sample in itertools.islice(_samples(op, dtype), samples):
                if inplace and getattr(sample, "broadcasts_input", False):
                    continue
                for clone in (True,) if inplace else (False, True):
                    yield _op_case(function, sample, clone)

        rows.append(Row(name, op.name, cases))
        if op.inplace_variant is not None and op.supports_inplace_autograd:

            def inplace_cases(samples: int, op: Any = op, cases: Any = cases) -> Iterator[Case]:
                return cases(samples, op, op.inplace_variant, True)

            rows.append(Row(f"{name} in place", op.name, inplace_cases))
    return rows


def module_rows(dtype: torch.dtype) -> list[Row]:
    """All rows of module_db that support `dtype`, each in training and in evaluation mode."""
    rows = []
    for info in module_db:
        if dtype not in info.dtypes:
            continue
        for training in (True, False):

            def cases(samples: int, info: Any = info, training: bool = training) -> Iterator[Case]:
                # One case of a module is its inputs with the leaves cloned; its parameters are sources anyhow.
                for sample in itertools.islice(
                    info.module_inputs_func(
                        info,
                        device=str(device_under_test()),
                        dtype=dtype,
                        requires_grad=True,
                        training=training,
                    ),
                    samples,
                ):
                    if sample.forward_input is not None:
                        yield _module_case(info.module_cls, sample, dtype, training)

            mode = "training" if training else "evaluation"
            rows.append(Row(f"{info.name} in {mode}", info.name, cases))
    return rows


def _module_case(cls: type[nn.Module], sample: Any, dtype: torch.dtype, training: bool) -> Case:
    def prepare() -> Run:
        seed(5)
        made = sample.constructor_input
        module = cls(*made.args, **made.kwargs).to(device_under_test(), dtype).train(training)
        leaves: list[Tensor] = []
        given = sample.forward_input
        tree = _fresh((given.args, given.kwargs), leaves)
        leaves += [p for p in module.parameters() if p.requires_grad]

        def forward() -> Any:
            positional, keywords = _cloned(tree)
            return module(*positional, **keywords)

        def run() -> Snapshot:
            return _forward_backward(forward, leaves) | freeze_all("buffer", module.buffers())

        return run

    return prepare


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _repeats(case: Case) -> bool:
    """Whether ordinary runs give the same bits now. On the CPU all do that are not listed above."""
    if device_under_test().type == "cpu":
        return True
    first = case()()
    return not any(difference(case()(), first) for _ in range(3))


def run_row(row: Row, mode: str, samples: int) -> Result:
    """Runs up to `samples` sample inputs of a row ordinarily and under `mode`, and compares.

    One managed region covers all cases of the row, so that what one leaves behind can harm the next.
    """
    with _quiet():
        cases: list[Case] = []
        expected: list[Snapshot] = []
        for case in row.cases(samples):
            try:
                snapshot = case()()
            except Exception:
                continue  # an ordinary error is the op's own business
            cases.append(case)
            expected.append(snapshot)
        if not cases:
            return Result(Outcome.NO_SAMPLE)
        outcome, detail, suspect = Outcome.NOTHING_TO_REBUILD, "", -1
        runs = [case() for case in cases]
        with managed(mode, seed=zlib.crc32(row.name.encode())) as probe:
            for index, wanted in enumerate(expected):
                try:
                    found = difference(runs[index](), wanted)
                except Exception:
                    outcome = Outcome.ERROR
                    detail = f"case {index}: {traceback.format_exc(limit=-2)}"
                    break
                if found and row.op in NOT_REPEATABLE:
                    outcome = Outcome.NOT_REPEATABLE
                elif found:
                    outcome, detail, suspect = Outcome.MISMATCH, f"case {index}: {found}", index
                    break
        if suspect >= 0 and not _repeats(cases[suspect]):
            outcome = Outcome.NOT_REPEATABLE
        if outcome is Outcome.NOTHING_TO_REBUILD and probe.rebuilt > 0:
            outcome = Outcome.REBUILT
        return Result(outcome, probe.rebuilt, len(cases), detail)


def failures(results: dict[str, Result]) -> str:
    """A message with all failed rows, or "" if there are none."""
    failed = {name: result for name, result in results.items() if result.failed}
    return "\n".join(
        [f"{len(failed)} of {len(results)} rows failed"] * bool(failed)
        + [f"{name}: {r.outcome.value}: {r.detail}" for name, r in failed.items()]
    )
