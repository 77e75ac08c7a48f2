"""PyTorch's own ops and modules, and real models, on an accelerator: same bits when everything or a random part leaves.

The rows of tests/sweeps; on the simulated device each row has one sample, and rows and models run in one mode instead
of all. Of the models about half run there in `make test`, and the others are marked slow. scripts/sweep_op_db.py does
more, with DELTA_TEST_DEVICE set. Rows and models whose ordinary run does not work on the device are left out; the
number of the former is bounded here.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from tests.support.bitwise import difference
from tests.support.device import TYPE
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.training import Recipe, Run, train
from tests.sweeps.rows import Outcome, failures, module_rows, op_rows, run_row
from tests.zoo import ZOO

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MODES = ("drop_all", "swap_all", "mix")
MODES_OF_MODELS = (*MODES, "disk_all")
MODELS = list(ZOO)
DEAR = ("gru", "lstm", "mamba", "swin", "t5", "inplace_resnet")
"""On the simulated device a minute where everything leaves: there, in `make test`, at the most a random part does."""
OTHERS = [name for name in MODELS if name not in DEAR]
AUTOCAST = {name: index // 8 % 2 == 1 for index, name in enumerate(OTHERS)}
AUTOCAST |= {name: index // 2 % 2 == 1 for index, name in enumerate(DEAR)}


def _simulated_runs() -> list[object]:
    """Rows for the simulated device; of each kind every second one runs in `make test`."""
    others = [
        (name, MODES_OF_MODELS[index // 2 % len(MODES_OF_MODELS)])
        for index, name in enumerate(OTHERS)
    ]
    random_part = [(name, "mix") for name in DEAR]
    everything = [
        (name, ("drop_all", "swap_all", "disk_all")[i % 3]) for i, name in enumerate(DEAR)
    ]
    slow = [*others[1::2], *random_part[1::2], *everything]
    return [
        pytest.param(*row, marks=[pytest.mark.slow] * (row in slow))
        for row in (*others, *random_part, *everything)
    ]


RUNS = _simulated_runs() if TYPE == "fake" else list(itertools.product(MODELS, MODES_OF_MODELS))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("database", ["op_db", "module_db"])
def test_same_bits(device, controls, database, mode):
    rows = (op_rows if database == "op_db" else module_rows)(torch.float32)
    if controls.simulated:
        rows = rows[MODES.index(mode) :: len(MODES)]
    results = {row.name: run_row(row, mode, 1 if controls.simulated else 3) for row in rows}
    message = failures(results)
    assert not message, f"{mode}: {message}"
    outcomes = Counter(result.outcome for result in results.values())
    vague = [name for name, each in results.items() if each.outcome is Outcome.NOT_REPEATABLE]
    print(f"{database}, {mode}: {len(vague)} rows do not repeat by themselves: {vague}")
    assert len(vague) <= 0.03 * len(rows), vague
    assert outcomes[Outcome.NO_SAMPLE] <= 0.1 * len(rows), "too many have no ordinary run here"
    if mode != "mix":
        assert outcomes[Outcome.REBUILT] > (0.6 if database == "op_db" else 0.8) * len(rows), (
            outcomes
        )


def ordinary(name: str, recipe: Recipe) -> Run:
    """An ordinary run that repeats bit for bit. On the simulated device that is looked at for one model: all do."""
    first = train(ZOO[name], recipe)
    if TYPE == "fake" and name != MODELS[0]:
        return first
    found = difference(train(ZOO[name], recipe).snapshot, first.snapshot)
    if found:
        assert TYPE != "fake", f"{name} by itself: {found}"
        pytest.skip(f"{name} does not repeat bit for bit by itself here")
    return first


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_same_bits_of_models(device, controls, name, mode):
    recipe = Recipe(steps=2, autocast=AUTOCAST[name])
    inside = train(ZOO[name], recipe, mode, managed_seed=len(name))
    found = difference(inside.snapshot, ordinary(name, recipe).snapshot)
    assert not found, f"{name}: {found}"
    assert inside.probe.rebuilt > 0
