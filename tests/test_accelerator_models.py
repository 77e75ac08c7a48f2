"""Runs the sweeps over models of tests/accelerator on the simulated accelerator, in a process of its own."""

from __future__ import annotations

import pytest

from tests.test_accelerator import MODELS, run_on_the_simulated_one


@pytest.mark.timeout(2400)
def test_models_pass_on_the_simulated_accelerator():
    run_on_the_simulated_one(*(f"tests/accelerator/{name}" for name in MODELS))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_others_pass_on_the_simulated_accelerator():
    """What is marked slow there: more models, and modes that take a minute each."""
    run_on_the_simulated_one("tests/accelerator", marked="slow")
