"""The pages name files that there are, and link to headings that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.fixtures import short_search  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = (
    ROOT,
    *(ROOT / name for name in ("delta_runtime", "csrc", "scripts", "scripts/ecosystem")),
)
"""What a path in a page may begin at."""

_FILE = re.compile(r"`([\w./]+\.(?:py|cpp|h|md|json|toml))`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def missing_files(text: str) -> list[str]:
    named = _FILE.findall(text)
    return [name for name in named if not any((folder / name).exists() for folder in FOLDERS)]


def anchors(text: str) -> set[str]:
    """The headings of a page, as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@every_page
def test_each_file_that_a_page_names_is_there(page):
    missing = missing_files(page.read_text(encoding="utf-8"))
    made = {"train.py", "build/gpu_check_cuda.json"}  # by a user, or by what the page says
    assert set(missing) <= made


@every_page
def test_each_link_of_a_page_leads_somewhere(page):
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        there = (page.parent / target) if target else page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_a_file_that_is_not_there_is_found():
    assert missing_files("see `csrc/nowhere.cpp` and `runtime.py`") == ["csrc/nowhere.cpp"]


@pytest.mark.parametrize(
    ("page", "asserts"), [("planners.md", 11), ("simulator.md", 3), ("estimates.md", 3)]
)
def test_the_calls_of_a_page_hold(request, monkeypatch, page, asserts):
    pytest.importorskip("scipy")
    if page == "estimates.md":  # looks for a least budget by dozens of plans
        request.getfixturevalue("short_search")
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert code.count("assert ") >= asserts
    exec(code, {})


@every_page
def test_no_table_that_a_command_writes_is_empty(page):
    for name, table in re.findall(
        r"<!-- ([\w ]+): begin -->(.*?)<!-- \1: end -->", page.read_text("utf-8"), re.S
    ):
        assert table.count("\n|") > 2, name
