"""The extension offers what its stub says, no more and no less."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from delta_runtime.extension import _C
from delta_runtime.report.step_report import COUNTED_BY_THE_SESSION

STUB = ast.parse((Path(_C.__file__).parent / "_C.pyi").read_text(encoding="utf-8"))
TYPES_OF_THE_STUB = {"TierRow", "Column", "Callback"}


def names_in(body: list[ast.stmt]) -> set[str]:
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found


def public(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def test_the_module_has_what_its_stub_says():
    assert names_in(STUB.body) - TYPES_OF_THE_STUB == public(_C)


@pytest.mark.parametrize("name", ["Session", "Plan", "Counters", "Levels"])
def test_a_class_has_what_its_stub_says(name):
    (stub,) = (each for each in STUB.body if isinstance(each, ast.ClassDef) and each.name == name)
    assert {each for each in names_in(stub.body) if not each.startswith("_")} == public(
        getattr(_C, name)
    )


def test_a_tier_s_row_has_what_the_stub_says():
    (row,) = (
        each.value
        for each in STUB.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "TierRow"
    )
    fields = {key.value for key in row.args[1].keys}
    session = _C.Session(swap=True, host_bytes=1 << 20)
    assert fields == set(session.tiers()[0])
    session.stop_lanes()


def test_the_session_takes_the_options_that_the_stub_names():
    (stub,) = (
        each for each in STUB.body if isinstance(each, ast.ClassDef) and each.name == "Session"
    )
    (init,) = (
        each for each in stub.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    )
    options = {each.arg for each in init.args.kwonlyargs}
    told = inspect.getdoc(_C.Session.__init__) or ""
    assert options == {
        part.split(":")[0].strip()
        for part in told[told.index("*,") + 2 :].split("->")[0].split(", ")
        if ":" in part
    }


def test_the_report_takes_over_all_that_the_session_counts():
    assert set(COUNTED_BY_THE_SESSION) == public(_C.Counters)
