"""Every model of the zoo repeats bit for bit by itself, so that a difference under the runtime is the runtime's."""

from __future__ import annotations

import pytest
import torch

from tests.support.bitwise import assert_same_bits
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.training import Recipe, train
from tests.zoo import ZOO


def test_at_least_fifteen_models() -> None:
    assert len(ZOO) >= 15


@pytest.mark.parametrize("name", ZOO)
def test_repeats_bit_for_bit(name: str) -> None:
    recipe = Recipe(autocast=len(name) % 2 == 0)
    first = train(ZOO[name], recipe)
    assert_same_bits(train(ZOO[name], recipe).snapshot, first.snapshot, name)
    assert all(torch.isfinite(x.tensor()).all() for k, x in first.snapshot.items() if "loss" in k)
    # The budgets of the sweeps are shares of the peak: a model that is all weights has nothing to evict.
    weights = sum(p.numel() * p.element_size() for p in ZOO[name].build().model.parameters())
    assert first.peak_bytes - first.base_bytes > 10 * weights


@pytest.mark.parametrize("name", ZOO)
def test_dropout_or_noise_is_active(name: str) -> None:
    built = ZOO[name].build()
    if name in {"resnet", "mamba"}:
        pytest.skip("draws no random numbers")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    built.loss(built.batch(0))
    assert not torch.equal(before, torch.get_rng_state())
