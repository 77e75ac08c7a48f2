"""What the whole suite needs of its process."""

from __future__ import annotations

import gc
import signal

import pytest

import delta_runtime.extension  # noqa: F401 - planners use it where it is loaded: in each file, as in all

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background with SIGINT ignored, and children inherit that: no Ctrl-C would ever arrive
    # in the tests that send one.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = (
    "test_accelerator_models.py",
    "test_accelerator.py",
    "test_leaks.py",
    "test_stress_programs.py",
    "test_ecosystem.py",
)
"""Files with tests of minutes: first, so that no worker ends with one of them while the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers are given whole files in this order (`--no-loadscope-reorder`)."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def freeze_what_is_there() -> None:
    """Have the garbage collector pass over what is there by now: it stays until the process ends.

    Those are 700,000 objects once all tests are imported. Each collection would take half a second, and tests collect
    often. `gc.get_objects` does not name them any more.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    freeze_what_is_there()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Behind each file, what it has imported and cached stays too."""
    if nextitem is not None and nextitem.path != item.path:
        freeze_what_is_there()


@pytest.fixture(autouse=True)
def plans_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a plan there at the step that a test expects it at; tests of planning beside training ask for that."""
    monkeypatch.setenv("DELTA_PLANNING", "between")
