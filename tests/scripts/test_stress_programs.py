"""Random training programs, run ordinarily and managed, have the same bits; and what makes and judges them can fail.

Covers: a few hundred programs of scripts/stress_programs.py; that a program is the same each time and repeats; that
every fault is aimed at in every phase; names that are let go of; the minimiser; the coverage table, by hand-made
programs; verdicts, crashes and hangs; scripts that stand by themselves; going on with a file.
Does not cover: two processes and compiled parts, which take minutes to start; the script has them as families.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.programs.coverage import Cell, Place, Table, endangered, impossible
from scripts.programs.faults import TERMS, Family, Fault
from scripts.programs.generator import ONLY_IN, aims, make_case
from scripts.programs.minimise import Minimiser, remove, with_steps
from scripts.programs.program import (
    ATTACK_PHASES,
    Attack,
    Instruction,
    Kind,
    Phase,
    Program,
    from_json,
    to_json,
)
from scripts.programs.render import render, standalone
from scripts.programs.runner import Prepared, Result, Verdict, judge
from scripts.programs.settings import Settings
from tests.support.fixtures import one_thread  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "stress_programs.py"
PROGRAMS = 300
SEED = 5


def _run(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DELTA_")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=ROOT,
    )


def _make(code: str, *args: str, out: str, **rest: object) -> Instruction:
    return Instruction(Kind.MAKE, "{o} = " + code, (out,), args, **rest)  # type: ignore[arg-type]


def _call(code: str, *args: str, **rest: object) -> Instruction:
    return Instruction(Kind.CALL, code, (), args, **rest)  # type: ignore[arg-type]


def _chain(*extra: Instruction, backward: tuple[Instruction, ...] = (), steps: int = 2) -> Program:
    """y = m * w, h = sin(y), with y let go of; `extra` comes behind it."""
    return Program(
        seed=11,
        steps=steps,
        phases={
            Phase.PREPARE: (_make("torch.randn(32, 32).requires_grad_()", out="w"),),
            Phase.FORWARD: (
                _make("torch.ones(32, 32)", out="m"),
                _make("{0} * {1}", "m", "w", out="y"),
                _make("{0}.sin()", "y", out="h"),
                *extra,
                _make("({0} + {1}).mean()", "h", "w", out="loss"),
            ),
            Phase.BACKWARD: (*backward, _call("{0}.backward()", "loss")),
        },
    )


# ------------------------------------------------------------------------------------ the run


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What came of a few hundred programs, one dict each."""
    out = tmp_path_factory.mktemp("programs") / "programs.jsonl"
    run = _run("--programs", str(PROGRAMS), "--seed", str(SEED), "--out", str(out))
    assert out.exists(), run.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_managed_programs_have_the_bits_of_ordinary_ones(lines: list[dict]) -> None:
    assert len(lines) == PROGRAMS
    found = [
        f"{line['number']}: {line['verdict']} ({', '.join(line['culprits'])}): {line['detail']}"
        for line in lines
        if Verdict[line["verdict"]].is_finding
    ]
    shown = "\n".join(found[:10])
    assert not found, (
        f"{len(found)} of {PROGRAMS} programs went wrong; one as a script: "
        f"scripts/stress_programs.py --seed {SEED} --start N --programs 1\n{shown}"
    )


def test_the_programs_try_what_they_are_made_for(lines: list[dict]) -> None:
    assert sum(line["evictions"] > 0 for line in lines) > 0.8 * PROGRAMS
    assert sum(line["raised"] for line in lines) < 0.25 * PROGRAMS
    assert sum(line["verdict"] == "NOT_REPEATABLE" for line in lines) <= 0.02 * PROGRAMS
    places = {place for line in lines for _, place, _ in line["cells"]}
    assert places == {place.name for place in Place}
    faults = {fault for line in lines for fault, _, _ in line["cells"]}
    assert faults >= {
        fault.name for fault in Fault if fault not in ONLY_IN and fault is not Fault.INTERRUPT
    }


# ------------------------------------------------------------------------------------ programs


def test_a_program_is_the_same_each_time_and_as_json() -> None:
    for number in range(40):
        case, again = make_case(3, number), make_case(3, number)
        assert case == again
        assert render(case.program) == render(again.program)
        assert from_json(to_json(case.program)) == case.program
    assert make_case(3, 0).program != make_case(4, 0).program


@pytest.mark.parametrize("family", Family)
def test_every_fault_is_aimed_at_in_every_phase(family: Family) -> None:
    tried = {
        (each.attack.fault, each.attack.phase)
        for number in range(len(aims(family)) * 5)
        for each in make_case(1, number, family).program.instructions()
        if each.attack is not None
    }
    wanted = {(aim.fault, aim.phase) for aim in aims(family)} - {(Fault.INTERRUPT, Phase.FORWARD)}
    if family is not Family.EAGER:  # the others come along now and then
        wanted = {(fault, phase) for fault, phase in wanted if ONLY_IN.get(fault) is family}
    assert not wanted - tried


def test_ordinary_runs_of_a_program_repeat_and_name_nothing_that_is_gone() -> None:
    for number in range(60):
        case = make_case(2, number)
        if Fault.LIST_OP in case.program.faults():
            continue  # long
        prepared = Prepared(case.program)
        seen = prepared.run()
        assert seen == prepared.run(), f"program {number}"
        errors = [payload for _, payload in seen if isinstance(payload, tuple)]
        assert not [
            e for e in errors if e[0][0] in ("NameError", "UnboundLocalError", "SyntaxError")
        ]


def test_names_are_let_go_of_after_their_last_use_and_not_before_what_runs_later() -> None:
    hook = Instruction(
        Kind.HOOK,
        "def hook_{i}(gradient):\n    {body}\n{0}.register_hook(hook_{i})",
        args=("h",),
        body=(_call("note('m', {0})", "m"),),
    )
    source = render(_chain())
    assert source.index("del m") < source.index("h = y.sin()") < source.index("del y")
    with_hook = render(_chain(hook))
    assert "del y" in with_hook
    assert "del m" not in with_hook
    assert "LOCAL = ['h', 'loss', 'm', 'y']" in with_hook


# ------------------------------------------------------------------------------------ verdicts


@pytest.fixture
def broken_replay() -> Iterator[None]:
    from delta_runtime import _C

    _C.set_sabotage(1)  # random numbers are drawn anew
    yield
    _C.set_sabotage(0)


DROPOUT = _chain(
    _make("F.dropout({0}, 0.5)", "w", out="d"),
    _make("{0} * {0}", "d", out="e"),
    _make("{0} + {1}", "h", "e", out="h"),
)


def test_a_program_of_plain_ops_has_the_same_bits() -> None:
    result = judge(DROPOUT, Settings())
    assert result.verdict is Verdict.SAME, result.detail
    assert result.evictions > 0


@pytest.mark.usefixtures("broken_replay")
def test_wrong_bits_are_silent_or_loud_but_never_the_same() -> None:
    assert judge(DROPOUT, Settings(verify="off")).verdict is Verdict.SILENT
    assert judge(DROPOUT, Settings(verify="always")).verdict is Verdict.LOUD


def test_an_error_counts_as_the_same_where_an_ordinary_run_has_it_too() -> None:
    raising = _chain(_call("raise_planned()", when=(0,)))
    result = judge(raising, Settings())
    assert result.verdict is Verdict.SAME, result.detail
    assert result.raised


def test_an_error_is_legal_only_where_the_program_does_what_nobody_can_see() -> None:
    from scripts.programs import runner

    wanted = [("step 0: w", b"1")]
    found = [("step 0: error in backward", (("RecomputeMismatch", "DeltaError"), "differs"))]
    seen = Instruction(Kind.CALL, "pass", attack=Attack(Fault.RAW_FILL, Phase.FORWARD, ()))
    unseen = replace(seen, attack=Attack(Fault.NUMERIC_FLAG, Phase.FORWARD, ()))
    same = Result(Verdict.SAME)
    assert TERMS[Fault.RAW_FILL].loud
    assert not TERMS[Fault.NUMERIC_FLAG].loud
    for instruction, verdict in ((seen, Verdict.LEGALLY_LOUD), (unseen, Verdict.LOUD)):
        result = runner._different(_chain(instruction), same, found, wanted, "it differs")
        assert result.verdict is verdict
    # Bits that were wrong before anybody spoke up were silent.
    late = [("step 0: w", b"2"), *found]
    result = runner._different(_chain(seen), same, late, wanted, "it differs")
    assert result.verdict is Verdict.SILENT


def test_a_program_whose_ordinary_runs_differ_is_set_aside() -> None:
    unsteady = _chain(
        _make(
            "torch.full((32, 32), float(id(object()) % 97 + np.random.default_rng().random()))",
            out="u",
        ),
        _make("{0} + {1}", "h", "u", out="h"),
        _call("note('loss', {0}.sum())", "h"),
    )
    assert judge(unsteady, Settings()).verdict is Verdict.NOT_REPEATABLE


def test_crashes_and_hangs_are_verdicts_and_the_next_program_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from scripts.programs.workers import Bench

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Bench(limit_s=4) as bench:
        assert bench.judge(_chain(), Settings()).verdict is Verdict.SAME
        crash = bench.judge(_chain(_call("ctypes.string_at(0)")), Settings())
        assert crash.verdict is Verdict.CRASHED
        assert "Segmentation fault" in crash.detail
        hang = bench.judge(_chain(_call("threading.Event().wait()")), Settings())
        assert hang.verdict is Verdict.HUNG
        assert "in forward" in hang.detail, "where it hangs is part of the detail"
        assert bench.judge(_chain(), Settings()).verdict is Verdict.SAME


# ------------------------------------------------------------------------------------ coverage


def _attacked(phase: Phase) -> Program:
    strike = Instruction(
        Kind.CALL, "pass", args=("h",), attack=Attack(Fault.NUMERIC_FLAG, phase, ("y",))
    )
    if phase is Phase.BACKWARD:
        return _chain(backward=(strike,))
    more = _make("{0} + {1}", "h", "w", out="k"), _make("{0} * 2", "w", out="z")
    return _chain(*more, strike)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        (Settings(), Place.DROPPED),
        (Settings(policy="stress_swap_all", host_budget="16MiB"), Place.HOST),
        (Settings(policy="stress_swap_all", disk_budget="4MiB"), Place.DISK),
        (Settings(policy="off"), Place.RESIDENT),
    ],
)
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_cells_say_where_an_endangered_value_was(
    settings: Settings, place: Place, phase: Phase
) -> None:
    result = judge(_attacked(phase), settings)
    assert result.verdict is Verdict.SAME, result.detail
    assert Cell(Fault.NUMERIC_FLAG, place, phase) in result.cells
    if place is Place.RESIDENT:
        assert {cell.place for cell in result.cells} == {Place.RESIDENT}


def test_endangered_is_what_is_computed_from_the_target() -> None:
    program = _attacked(Phase.FORWARD)
    numbers = {each.out[0]: n for n, each in enumerate(program.instructions()) if each.out}
    (found,) = endangered(program).values()
    assert {"y", "h", "k", "loss"} <= {name for name, number in numbers.items() if number in found}
    assert numbers["z"] not in found


def test_the_table_names_what_is_empty_and_why_what_is_impossible() -> None:
    table = Table()
    faults = [Fault.RAW_FILL, Fault.PYTHON_RANDOM]
    possible = [
        cell
        for fault in faults
        for place in Place
        for phase in ATTACK_PHASES
        if not impossible(cell := Cell(fault, place, phase))
    ]
    assert table.empty(faults) == sorted(possible, key=table.empty(faults).index)
    assert len(possible) == 20 + 4
    table.add(possible[1:])
    assert table.empty(faults) == possible[:1]
    text = table.render(faults)
    assert "no saved value takes part (16 cells)" in text
    assert f"may be loud, {Fault.RAW_FILL.value}" in text


# ------------------------------------------------------------------------------------ making small


def test_the_minimiser_leaves_only_what_is_needed() -> None:
    def judge_it(program: Program, settings: Settings) -> Result:
        codes = [each.code for each in program.instructions()]
        bad = any("* 1.1" in code for code in codes) and any("backward" in code for code in codes)
        return Result(Verdict.SILENT if bad else Verdict.SAME)

    program = next(
        case.program
        for case in (make_case(1, number) for number in range(400))
        if case.program.size() > 30
        and judge_it(case.program, case.settings).verdict is Verdict.SILENT
    )
    start = Settings(policy="dtr", verify="always", style="both", host_budget="1MiB")
    smallest = Minimiser(judge_it).run(program, start, Result(Verdict.SILENT))
    assert judge_it(smallest.program, smallest.settings).verdict is Verdict.SILENT
    assert smallest.program.size() <= 6
    assert smallest.program.steps == 1
    assert smallest.settings == Settings()
    for number in range(smallest.program.size()):
        rest = remove(smallest.program, {number})
        assert judge_it(rest, smallest.settings).verdict is Verdict.SAME


@pytest.mark.usefixtures("broken_replay")
def test_a_real_difference_is_made_small_and_stays_one() -> None:
    program = replace(DROPOUT, steps=4)
    result = judge(program, Settings(verify="off"))
    smallest = Minimiser(judge).run(program, Settings(verify="off"), result)
    assert smallest.result.verdict is Verdict.SILENT
    assert smallest.program.size() <= 5
    assert any("dropout" in each.code for each in smallest.program.instructions())


def test_what_is_removed_takes_along_what_needs_it_and_steps_what_they_had() -> None:
    program = _chain(_call("note('y', {0})", "y", when=(1,)))
    rest = remove(program, {1})
    assert [each.out for each in rest.instructions() if each.out] == [("w",)]
    assert not rest.phases[Phase.BACKWARD]
    assert "note" not in render(with_steps(program, 1))


def test_a_script_stands_by_itself_and_says_what_differs(tmp_path: Path) -> None:
    wrong = _chain(_call("note('runtime', bool(MANAGEMENT.runtimes))"))
    scripts = {
        0: standalone(DROPOUT, Settings(policy="dtr", share=0.5), ("dropout",)),
        1: standalone(wrong, Settings()),
    }
    for code, text in scripts.items():
        assert "scripts.programs" not in text
        file = tmp_path / f"{code}.py"
        file.write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, str(file)],
            capture_output=True,
            text=True,
            timeout=100,
            env=environment,
        )
        assert run.returncode == code, run.stdout + run.stderr
        assert "ordinary runs: the same bits" in run.stdout
        assert ("runtime: " in run.stdout) == bool(code)


def test_a_run_goes_on_behind_the_last_program_of_its_file(tmp_path: Path) -> None:
    out = tmp_path / "programs.jsonl"
    arguments = ("--jobs", "1", "--minimise", "0", "--out", str(out), "--settled")
    _run("--programs", "3", *arguments)
    run = _run("--programs", "6", *arguments)
    assert "has 3 programs; going on with 3" in run.stdout
    assert [json.loads(line)["number"] for line in out.read_text().splitlines()] == list(range(6))
    assert "6 programs in" in run.stdout
