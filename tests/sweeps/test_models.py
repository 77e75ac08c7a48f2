"""Real models train inside a budget with the same numbers, bit for bit: a rotating part of the full product.

Every model is trained for three steps at one budget, with or without autocast, with one of two optimizers; which,
rotates over the models so that each combination occurs. Everything that may leaves in one of two ways, and a random
part does: which way and which part rotates too, and the others are marked slow. scripts/sweep_models.py runs them all.
What is compared: losses, gradients and random state of each step, parameters and buffers at the end.
"""

from __future__ import annotations

import functools

import pytest

from tests.support.bitwise import assert_same_bits
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.training import Recipe, train
from tests.zoo import ZOO

ordinary_run = functools.lru_cache(maxsize=1)(train)
"""Of a model and a recipe: the modes of one model come one after the other."""

SHARES = (0.8, 0.6, 0.4)
OPTIMIZERS = ("adamw", "sgd")


def _one_of(*modes: str) -> list[object]:
    """Each model in each mode; of those of one model all but one are marked slow."""
    return [
        pytest.param(name, mode, marks=[pytest.mark.slow] * ((index + of_mode) % len(modes) > 0))
        for index, name in enumerate(ZOO)
        for of_mode, mode in enumerate(modes)
    ]


def _rotated(index: int) -> tuple[float, Recipe]:
    recipe = Recipe(autocast=(index // 3) % 2 == 1, optimizer=OPTIMIZERS[index % 2])
    return SHARES[index % 3], recipe


# Whether a budget is held is another question, with tests of its own: a model's largest op may need more than this.
@pytest.mark.filterwarnings("ignore:.*the budget of .* was passed:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "share", "recipe"), [(name, *_rotated(i)) for i, name in enumerate(ZOO)]
)
def test_same_bits_inside_a_budget(name: str, share: float, recipe: Recipe) -> None:
    ordinary = train(ZOO[name], recipe)
    budget = ordinary.budget_bytes(share)
    inside = train(ZOO[name], recipe, "budget", budget_bytes=budget)
    assert_same_bits(inside.snapshot, ordinary.snapshot, f"{name} at {share:.0%} of its peak")
    assert inside.probe.rebuilt > 0, f"nothing was rebuilt, so nothing was tested: {inside.probe}"


@pytest.mark.parametrize(("name", "mode"), _one_of("drop_all", "swap_all"))
def test_same_bits_when_everything_leaves(name: str, mode: str) -> None:
    recipe = Recipe(steps=2)
    ordinary = ordinary_run(ZOO[name], recipe)
    inside = train(ZOO[name], recipe, mode)
    assert_same_bits(inside.snapshot, ordinary.snapshot, name)
    assert inside.probe.rebuilt > 0, f"nothing was rebuilt, so nothing was tested: {inside.probe}"


@pytest.mark.parametrize(("name", "mode"), _one_of("mix", "random"))
def test_same_bits_when_a_random_part_leaves(name: str, mode: str) -> None:
    recipe = Recipe(steps=2, autocast=True)
    ordinary = ordinary_run(ZOO[name], recipe)
    seed = sum(map(ord, name))
    inside = train(ZOO[name], recipe, mode, managed_seed=seed)
    assert_same_bits(inside.snapshot, ordinary.snapshot, f"{name}, seed {seed}")
    assert inside.probe.rebuilt > 0, f"nothing was rebuilt, so nothing was tested: {inside.probe}"
