"""Settings from code and from the environment: what is accepted, what is refused, and how."""

import dataclasses
import os
from pathlib import Path

import pytest

from delta_runtime.config import (
    VARIABLES,
    Config,
    check_requested,
    limit_requested,
    unknown_variables,
)
from delta_runtime.core.errors import UsageError


def test_defaults_are_those_of_the_runtime():
    config = Config()
    assert (config.budget, config.policy, config.verify) == ("auto", "auto", "first")
    assert (config.min_bytes, config.strict, config.report, config.check) == (4096, False, "off", 0)
    optional = ("device", "host_budget", "disk_budget", "spill_dir", "link_bytes_per_s", "trace")
    assert all(getattr(config, name) is None for name in optional)


def test_config_is_frozen_and_holds_no_other_fields():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().budget = 1
    with pytest.raises(TypeError):
        Config(bugdet=1)


def test_texts_are_brought_to_their_types():
    config = Config(
        budget=" 50% ",
        host_budget="1GiB",
        disk_budget=10,
        spill_dir=Path("spill"),
        link_bytes_per_s="16GB/s",
        min_bytes="64KiB",
        strict="yes",
        verify="ALWAYS",
    )
    assert (config.budget, config.min_bytes, config.strict) == ("50%", 65536, True)
    assert (config.host_budget_bytes, config.disk_budget_bytes) == (1024**3, 10)
    assert (config.spill_dir, config.verify) == ("spill", "always")
    assert config.link_bytes_per_s == 16e9
    assert Config(link_bytes_per_s="pcie4-a100").link_bytes_per_s == "pcie4-a100"


def test_budget_is_resolved_against_a_capacity():
    assert Config(budget=0.5).budget_bytes(1000) == 500
    assert Config().budget_bytes(1000) is None
    with pytest.raises(UsageError, match="more than the device has"):
        Config(budget="2KiB").budget_bytes(1000)


BAD = [
    ("budget", 0),
    ("budget", -1),
    ("budget", "10 parsecs"),
    ("budget", "101%"),
    ("budget", 1.5),
    ("budget", None),
    ("policy", ""),
    ("device", ""),
    ("host_budget", 0),
    ("disk_budget", "-1GiB"),
    ("spill_dir", ""),
    ("spill_dir", 3),
    ("link_bytes_per_s", 0),
    ("link_bytes_per_s", float("nan")),
    ("link_bytes_per_s", float("inf")),
    ("link_bytes_per_s", True),
    ("verify", "sometimes"),
    ("verify", True),
    ("min_bytes", -1),
    ("min_bytes", "4 parsecs"),
    ("strict", "maybe"),
    ("strict", 1),
    ("trace", b"trace"),
    ("report", "loud"),
    ("check", "2"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_setting_is_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"^{name}: ") as caught:
        Config(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "  ", "off", "OFF"])
def test_without_a_budget_the_environment_asks_for_nothing(text):
    environ = {"DELTA_POLICY": "recompute"} | ({} if text is None else {"DELTA_BUDGET": text})
    assert Config.from_environment(environ) is None


def test_every_variable_reaches_its_field():
    texts = {
        "DELTA_BUDGET": "10GiB",
        "DELTA_POLICY": "recompute",
        "DELTA_DEVICE": "cpu",
        "DELTA_HOST_BUDGET": "2GiB",
        "DELTA_DISK_BUDGET": "3GiB",
        "DELTA_SPILL_DIR": "spill",
        "DELTA_VERIFY": "off",
        "DELTA_MIN_BYTES": "1KiB",
        "DELTA_STRICT": "1",
        "DELTA_TRACE": "trace.json",
        "DELTA_REPORT": "step",
        "DELTA_PLANNING": "between",
        "DELTA_CHECK": "on",
        "DELTA_LIMIT_RESERVED": "no",
    }
    assert set(texts) == set(VARIABLES.values())
    assert Config.from_environment(texts) == Config(
        budget="10GiB",
        policy="recompute",
        device="cpu",
        host_budget="2GiB",
        disk_budget="3GiB",
        spill_dir="spill",
        verify="off",
        min_bytes=1024,
        strict=True,
        trace="trace.json",
        report="step",
        planning="between",
        check=True,
        limit_reserved=False,
    )


def test_empty_variables_count_as_unset_and_the_summary_is_on():
    environ = {"DELTA_BUDGET": "auto", "DELTA_VERIFY": "", "DELTA_STRICT": " "}
    assert Config.from_environment(environ) == Config(report="summary")
    assert Config.from_environment(environ | {"DELTA_REPORT": "off"}) == Config()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("DELTA_BUDGET", "0"),
        ("DELTA_BUDGET", "10 parsecs"),
        ("DELTA_MIN_BYTES", "-1"),
        ("DELTA_STRICT", "perhaps"),
        ("DELTA_VERIFY", "2"),
        ("DELTA_REPORT", "1"),
    ],
)
def test_bad_variable_is_refused_by_its_own_name(variable, text):
    with pytest.raises(UsageError, match=f"^{variable}: "):
        Config.from_environment({"DELTA_BUDGET": "1GiB", variable: text})


def test_process_environment_is_the_default(monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    assert Config.from_environment() is None
    monkeypatch.setitem(os.environ, "DELTA_BUDGET", "75%")
    assert Config.from_environment() == Config(budget="75%", report="summary")


def test_check_and_misspelt_variables():
    assert not check_requested({})
    assert not check_requested({"DELTA_CHECK": "0"})
    assert check_requested({"DELTA_CHECK": "1"})
    with pytest.raises(UsageError, match="^DELTA_CHECK: "):
        check_requested({"DELTA_CHECK": "very"})
    assert unknown_variables({"DELTA_BUDGET": "1", "DELTA_BUGDET": "1"}) == {
        "DELTA_BUGDET": "DELTA_BUDGET"
    }


def test_reserved_bytes_are_limited_unless_somebody_says_no():
    assert limit_requested({})
    assert limit_requested({"DELTA_LIMIT_RESERVED": "1"})
    assert not limit_requested({"DELTA_LIMIT_RESERVED": "0"})
    with pytest.raises(UsageError, match="^DELTA_LIMIT_RESERVED: "):
        limit_requested({"DELTA_LIMIT_RESERVED": "never"})
