"""Real steps that were recorded: what is dropped and swapped, and at which ticks, is what it was."""

from __future__ import annotations

import json

import pytest

from tests.support.recorded_steps import WORKLOADS, choices_of, plans_file


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_plans_of_recorded_steps_are_what_they_were(name: str):
    """`scripts/record_step_graphs.py --plans` writes them anew, where they are meant to change."""
    assert json.loads(json.dumps(choices_of(name))) == json.loads(plans_file(name).read_text())
