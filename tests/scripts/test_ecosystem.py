"""Users' programs with and without DELTA_BUDGET, and that the check which compares them can fail.

Covers: the programs of scripts/ecosystem/ that need no package beside torch, as child processes; how
scripts/check_ecosystem.py reads a printed report and what it calls a fault.
Does not cover: the programs that need other packages; scripts/check_ecosystem.py runs them all.
"""

from __future__ import annotations

import ast
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from delta_runtime.core.events import Bounds
from delta_runtime.report.step_report import StepReport, StepTotals
from scripts import check_ecosystem
from scripts.check_ecosystem import PROGRAMS, Program, Row, Run, cells, check, reports_in

INDUCTOR = "compiled blocks in an eager net"  # twenty seconds of compiling; the same program is run by aot_eager
PLAIN = [each for each in PROGRAMS if not each.packages and each.title != INDUCTOR]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "ecosystem.md"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """Each program once with the pool below it, once inside a budget; two programs at a time."""
    with ThreadPoolExecutor(2) as pool:
        return {
            row.program.shown: row for row in pool.map(lambda each: check(each, rounds=0), PLAIN)
        }


@pytest.mark.parametrize("program", PLAIN, ids=lambda program: program.file)
def test_a_program_keeps_its_numbers_and_its_budget(rows: dict[str, Row], program: Program) -> None:
    row = rows[program.shown]
    assert row.faults == []
    assert row.equal == row.lines >= 7
    assert row.held
    assert len(row.told) == program.processes
    assert all(told.dropped_bytes > 0 for told in row.told)  # else nothing was at stake
    assert row.budget_bytes < 0.9 * row.peak_bytes


def test_programs_know_nothing_of_the_runtime() -> None:
    files = {path.stem: path for path in check_ecosystem.FOLDER.glob("*.py")}
    assert files.keys() == {program.file for program in PROGRAMS}
    for path in files.values():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [
                name for name in names if name.split(".")[0] in ("delta_runtime", "scripts")
            ]
        assert "DELTA_" not in path.read_text()


def test_the_table_is_of_these_programs() -> None:
    shown = re.findall(r"^\| .*? \(`(.*?)`\) \|", DOCS.read_text(), re.MULTILINE)
    assert shown == [program.shown for program in PROGRAMS]


# ------------------------------------------------------------------------- that the check can fail


def report_of(peak_bytes: int, least_bytes: int = 0, **last: int) -> str:
    counts = StepTotals(steps=1234, peak_bytes=peak_bytes, **last)
    report = StepReport(
        3 << 20,
        "auto",
        "cpu",
        last=counts,
        totals=counts,
        ordinary_peak_bytes=9,
        bounds=Bounds(least_bytes // 2, "aten::mm", least_bytes),
    )
    return f"{report}\n"


def test_a_printed_report_is_read() -> None:
    held = report_of(2 << 20, 1 << 20, dropped_bytes=512 << 10, rescues=4321)
    passed = report_of((3 << 20) + 512, 5 << 20)
    first, second = reports_in(f"a line\n{held}\nTraceback or not\n{passed}\n")
    assert first.held and not second.held
    assert (first.steps, first.budget_bytes, first.peak_bytes) == (1234, 3 << 20, 2 << 20)
    assert (first.dropped_bytes, first.rescues) == (512 << 10, 4321)
    assert (second.over_bytes, second.least_bytes) == (512, 5 << 20)


def test_a_missing_package_is_a_row() -> None:
    row = check(Program("imaginary", "gan", packages=("a-package-that-nobody-has",)))
    assert row.missing == ["a-package-that-nobody-has"]
    assert "not installed" in cells(row)[1]
    assert not row.faults


def faults_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """Checks a program that trains nothing, and returns its faults."""
    script = f"""
        import os, sys
        managed = "DELTA_BUDGET" in os.environ
        report = {report_of(1 << 20)!r}
        TRACEBACK = "Traceback (most recent call last):\\n  File x\\nKeyError: 'k'\\n"
        {body}
        """
    (tmp_path / "faulty.py").write_text(textwrap.dedent(script))
    monkeypatch.setattr(check_ecosystem, "FOLDER", tmp_path)
    monkeypatch.setattr(check_ecosystem, "command_of", command_without_torch)
    return "; ".join(check(Program("faulty", "faulty")).faults)


def command_without_torch(program: Program, measured_to: Path | None = None) -> list[str]:
    """As the one it stands for; what it measures is written down beforehand."""
    if measured_to:
        (measured_to / "1.peak").write_text(str(8 << 20))
    return [check_ecosystem.sys.executable, str(program.path)]


GOOD = 'print("loss", (1.5).hex()); print("weights 0x1.0p+0"); managed and sys.stderr.write(report)'


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (GOOD, ""),
        (GOOD.replace("1.5", "1.5 + managed * 2**-50"), r"line 1 is 'loss 0x1\.80.*4p\+0'"),
        (GOOD.replace("1.5", "float('nan') if managed else 1.5"), "line 1 is 'loss nan'"),
        (GOOD.replace('print("loss"', 'managed or print("loss"'), "line 1 is 'weights"),
        (GOOD + '; managed and sys.exit("gone")', "inside the budget: exit status 1: gone"),
        (GOOD + "; managed or sys.exit(3)", "without a budget: exit status 3"),
        (GOOD + "; managed and sys.stderr.write(TRACEBACK)", "1 tracebacks: KeyError: 'k'"),
        (GOOD.replace("write(report)", "write('')"), "0 reports of 1 processes"),
    ],
)
def test_a_fault_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, fault: str
) -> None:
    found = faults_of(tmp_path, monkeypatch, body)
    assert re.search(fault, found) if fault else found == "", found


@pytest.mark.parametrize(
    ("peak_bytes", "least_bytes", "fault"),
    [
        (3 << 20, 2 << 20, ""),
        ((3 << 20) + 1, 2 << 20, "passed by 1 B .* though the report names 2.00 MiB as the least"),
        (12 << 20, 9 << 20, "9.00 MiB, is above or next to the ordinary peak, 8.00 MiB"),
        (12 << 20, 9 << 20, "the peak, 12.00 MiB, is above the ordinary one, 8.00 MiB"),
    ],
)
def test_a_budget_that_is_passed_is_a_fault_only_where_it_could_be_held(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    peak_bytes: int,
    least_bytes: int,
    fault: str,
) -> None:
    report = report_of(peak_bytes, least_bytes)
    found = faults_of(tmp_path, monkeypatch, GOOD.replace("report", repr(report)))
    assert re.search(fault, found) if fault else found == "", found


def test_lines_of_two_processes_that_ran_into_one_another(tmp_path: Path) -> None:
    text = "rank 1 loss 0x1.8p+0rank 0 loss -0x1.0p-3\n\nrank 0 weights 0x1.0p+0 0x1.2p+0\n"
    (tmp_path / "two.py").write_text(f"print({text!r})")
    run: Run = check_ecosystem.run_child(
        [check_ecosystem.sys.executable, str(tmp_path / "two.py")], {}
    )
    assert run.failure == ""
    assert run.lines == [
        "rank 0 loss -0x1.0p-3",
        "rank 0 weights 0x1.0p+0 0x1.2p+0",
        "rank 1 loss 0x1.8p+0",
    ]
