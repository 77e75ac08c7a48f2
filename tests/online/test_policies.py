"""The registry of policies, and what a misspelt name is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from delta_runtime.core.errors import UsageError
from delta_runtime.core.events import Place
from delta_runtime.online.filters import FILTERS
from delta_runtime.online.policies import POLICIES, Policy, Stress, get_policy

NO_TIER = frozenset({Place.DROPPED})
HOST_TIER = frozenset({Place.DROPPED, Place.SWAPPED})


def test_what_users_choose():
    assert get_policy("recompute").filter is FILTERS["msps"]
    assert get_policy("recompute").plans
    assert get_policy("auto").plans and get_policy("swap").plans
    assert get_policy(" Delta ") is POLICIES["delta"]


def test_off_evicts_nothing():
    off = get_policy("off")
    assert off.filter is None and off.evicts_to == () and not off.plans


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_can_be_compared(name):
    policy = get_policy(name)
    assert policy.filter is FILTERS[name]
    assert not policy.plans
    assert policy.on(NO_TIER).evicts_to == (Place.DROPPED,)
    assert policy.stress is Stress.NONE


def test_stress_is_for_the_stress_policies_only():
    stressed = {name: each.stress for name, each in POLICIES.items() if each.stress.value != "none"}
    assert stressed == {
        "stress_drop_all": Stress.DROP_ALL,
        "stress_random": Stress.RANDOM,
        "stress_swap_all": Stress.SWAP_ALL,
        "stress_mix": Stress.RANDOM_MIX,
    }


def test_a_policy_goes_where_the_device_has_a_tier():
    for name, each in POLICIES.items():
        if each.evicts_to == (Place.SWAPPED,):
            with pytest.raises(UsageError, match="no tier below"):
                each.on(NO_TIER)
        else:
            assert Place.SWAPPED not in each.on(NO_TIER).evicts_to
        assert each.on(HOST_TIER).evicts_to == each.evicts_to, name
    assert get_policy("recompute").on(HOST_TIER).evicts_to == (Place.DROPPED,)


def test_names_and_descriptions():
    for name, each in POLICIES.items():
        assert name == each.name
        assert each.description and "\n" not in each.description


@pytest.mark.parametrize(
    ("name", "close"),
    [("recompote", "recompute"), ("DTR-local", "dtr_local"), ("larges", "largest"), ("of", "off")],
)
def test_a_misspelt_name_is_told_the_closest(name, close):
    with pytest.raises(UsageError) as caught:
        get_policy(name)
    text = str(caught.value)
    assert repr(name) in text and f"Did you mean {close}" in text
    assert all(each in text for each in POLICIES)


@pytest.mark.parametrize("name", ["xyzzy", "", None, 3, ["recompute"]])
def test_nonsense_is_told_all_names(name):
    with pytest.raises(UsageError) as caught:
        get_policy(name)
    text = str(caught.value)
    assert "Did you mean" not in text
    assert all(each in text for each in POLICIES)


def test_a_filter_without_a_place_to_go_is_refused():
    with pytest.raises(ValueError, match="neither"):
        Policy("half", "", FILTERS["lru"], evicts_to=())
    with pytest.raises(ValueError, match="neither"):
        Policy("half", "", None)


def test_the_decision_layer_does_not_import_torch():
    code = (
        "import sys, importlib, types\n"
        "package = types.ModuleType('delta_runtime')\n"  # the parts without the public façade
        "package.__path__ = [path + '/delta_runtime' for path in sys.path if path]\n"
        "sys.modules['delta_runtime'] = package\n"
        "import delta_runtime.online.ledger\n"
        "assert 'torch' not in sys.modules\n"
    )
    path = [each for each in sys.path if each]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        check=True,
        timeout=120,
    )
