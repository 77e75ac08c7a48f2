"""Do users' programs give the same numbers inside a budget, and is the budget held?

A check, not a benchmark; it makes the table of docs/ecosystem.md. For each program of scripts/ecosystem/, which know
nothing of delta_runtime:
  1. run it as it is, as a child process, and take the lines that it prints with exact hexadecimal digits;
  2. run it with the CPU pool below it, which measures the ordinary peak (of one process, where there are several);
  3. run it with DELTA_BUDGET at a share of that peak, compare all lines, and read the report that it prints.
Where the report names a least budget above the one given, step 3 is done again a little above that one: there it must
be held. Takes about 20 minutes on two idle cores, of which half are compiling; needs no GPU and no download. Rows whose
packages are missing say so: `pip install --no-build-isolation -e .[ecosystem]` brings them. Exits 1 if a number
differs, if a traceback is printed, or if a budget is passed that could have been held.

    python scripts/check_ecosystem.py [--only gan,ddp] [--share 0.5] [--rounds 3] [--path timm_model=FOLDER]
        [--write docs/ecosystem.md]

`--path` puts a folder in front of PYTHONPATH for one program: for a package that must not be seen by the others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import re
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "ecosystem"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from delta_runtime.core.errors import UsageError
from delta_runtime.core.units import format_bytes, parse_bytes

TIMEOUT_S = 600
SETTLING_SHARE = 1 / 3
"""The first part of a run, which is not timed: warming up, recording, planning."""

ABOVE_LEAST = 1.02
SLACK_SHARE, SLACK_BYTES = 0.01, 2**20
"""How far a managed peak may lie above the ordinary one."""

COMPARED = re.compile(
    r"(?:rank (?P<rank>\d+) )?(?P<kind>loss|evaluation|weights)(?: (?:-?0x[\da-f.]+p[+-]\d+|nan|-?inf))+"
)
"""What a program prints to be compared. Lines of several processes may run into one another."""

TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class Program:
    """One row of the table.

    Args:
        title: what it is, for people.
        file: its name in scripts/ecosystem/, without ".py".
        arguments: its own.
        packages: the distributions that it needs beside torch.
        share: the budget, as a share of the ordinary peak.
        processes: how many; more than one are started by torchrun.
    """

    title: str
    file: str
    arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    share: float = 0.6
    processes: int = 1

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.file}.py"

    @property
    def shown(self) -> str:
        """Its command, as a reader would type it."""
        return " ".join([f"{self.file}.py", *self.arguments])


_HF = ("transformers", "accelerate")

PROGRAMS: tuple[Program, ...] = (
    Program("HF Trainer, GPT-2", "trainer", packages=_HF),
    Program("HF Trainer, accumulation 4", "trainer", ("--accumulation", "4"), _HF),
    Program("HF Trainer, evaluation", "trainer", ("--evaluate",), _HF),
    Program("HF Trainer, bf16", "trainer", ("--bf16",), _HF),
    Program("HF Trainer, padded batches, BERT", "trainer_padded", packages=_HF),
    Program("HF Trainer, masked, accumulation 4, BERT", "trainer_masked", packages=_HF),
    Program("HF Trainer, resumed, Llama", "trainer_resume", packages=_HF),
    Program("accelerate, own loop", "accelerate_loop", packages=("accelerate",)),
    Program("Lightning, batch norm", "lightning_module", packages=("lightning",)),
    Program("peft, LoRA on Llama", "peft_lora", packages=("peft", "transformers")),
    Program("TRL, SFT of Llama", "trl_sft", packages=("trl", "datasets", *_HF)),
    Program("timm, ConvNeXt", "timm_model", packages=("timm", "torchvision")),
    Program("diffusers, U-Net", "diffusers_unet", packages=("diffusers",)),
    Program("torchao, 8-bit AdamW", "torchao_adamw8bit", packages=("torchao", "transformers")),
    Program("DDP, 2 processes", "ddp", share=0.7, processes=2),
    Program("FSDP2, 2 processes", "fsdp2", share=0.7, processes=2),
    Program("compiled blocks in an eager net", "compiled_block"),
    Program("the same, by aot_eager", "compiled_block", ("--backend", "aot_eager")),
    Program("GAN", "gan"),
    Program("sequence lengths 64 to 512", "lengths", share=0.65),
)


# ------------------------------------------------------------------------------ one child process


@dataclass(slots=True)
class Run:
    """What one run of a program left behind.

    Args:
        lines: those that are compared: of each process in its own order, the processes one after another.
        at_s: when the losses of the first process arrived, in seconds of a common clock.
        stderr: all of it.
        failure: why it did not end well; "" if it did.
    """

    lines: list[str] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    stderr: str = ""
    failure: str = ""

    def intervals_s(self) -> list[float]:
        """Seconds from loss to loss, once the run has settled."""
        settled = self.at_s[int(len(self.at_s) * SETTLING_SHARE) :]
        return [after - before for before, after in zip(settled, settled[1:])]


def ordinary_environment(folder: str | None = None) -> dict[str, str]:
    """Return the environment of a child: no budget, no download, one thread.

    Args:
        folder: goes in front of PYTHONPATH.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DELTA_")
    }
    path = [folder] if folder else []
    path += [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return environment | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }


def command_of(program: Program, measured_to: Path | None = None) -> list[str]:
    """Return the command that runs a program.

    Args:
        measured_to: folder that each process writes its peak to; None to run the program as it is.
    """
    launcher = [sys.executable]
    if program.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(program.processes)]
    measuring = (
        [str(Path(__file__).resolve()), "--measure", str(measured_to)] if measured_to else []
    )
    return [*launcher, *measuring, str(program.path), *program.arguments]


def run_child(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> Run:
    """Run a command to its end, in a folder of its own."""
    run = Run()
    by_rank: dict[int, list[str]] = {}
    timed_out = threading.Event()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

        def give_up() -> None:
            timed_out.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            with child:
                assert child.stdout is not None
                for line in child.stdout:
                    for found in COMPARED.finditer(line):
                        rank = int(found["rank"] or 0)
                        by_rank.setdefault(rank, []).append(found[0])
                        if rank == 0 and found["kind"] == "loss":
                            run.at_s.append(time.perf_counter())
            status = child.returncode
        finally:
            timer.cancel()
        errors.seek(0)
        run.stderr = errors.read()
    run.lines = [line for rank in sorted(by_rank) for line in by_rank[rank]]
    if timed_out.is_set():
        run.failure = f"did not end within {timeout_s:.0f} s"
    elif status:
        last = run.stderr.strip().splitlines()[-1:] or [""]
        run.failure = f"exit status {status}: {last[0][:200]}"
    elif not any("weights" in line for line in run.lines):
        run.failure = "printed no result"
    return run


def measure_peak(folder: Path, command: list[str]) -> None:
    """Run a program inside this process, with the CPU pool below it, and write its highest live bytes to a file."""
    import torch  # noqa: F401, before the pool as in a managed run

    from delta_runtime import cpu_pool

    cpu_pool.install()
    cpu_pool.reset_peak()
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        (folder / f"{os.getpid()}.peak").write_text(str(cpu_pool.peak_bytes()))


# --------------------------------------------------------------------- the report that a run prints


@dataclass(frozen=True, slots=True)
class Told:
    """What one process's printed report says, in bytes; of all steps, unless it says last.

    Args:
        steps: how many it counted.
        over_bytes: how far the budget was passed; exact where it was not.
        least_bytes: no budget below this one is expected to be held; 0 where it names none.
        last_dropped_bytes, last_rebuilt_bytes: in the last step.
        kept: saved bytes of the last step that are not managed, by reason.
    """

    steps: int
    budget_bytes: int
    peak_bytes: int
    over_bytes: int
    least_bytes: int
    dropped_bytes: int
    last_dropped_bytes: int
    last_rebuilt_bytes: int
    rescues: int
    kept: Mapping[str, int]

    @property
    def held(self) -> bool:
        return self.over_bytes == 0


def reports_in(stderr: str) -> list[Told]:
    """Read every report in what a run wrote to stderr."""
    found: list[Told] = []
    rows: dict[str, list[str]] = {}
    steps = 0
    for line in stderr.splitlines():
        if line.startswith("┃"):
            heading = line.strip("┃ \n").split("┃")[-1].split()
            steps = int(heading[0].replace(",", "")) if heading[1:] == ["steps"] else 0
            rows = {}
        elif line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│\n").split("│")]
            if len(cells) == 3:
                rows[cells[0]] = cells[1:]
        elif line.startswith("└") and "peak (allocator)" in rows:
            found.append(_told(steps, rows))
            rows = {}
    return found


def _told(steps: int, rows: Mapping[str, Sequence[str]]) -> Told:
    def size(name: str, column: int) -> int:
        text = rows.get(name, ["", ""])[column]
        try:
            return parse_bytes(text) if text else 0
        except UsageError:
            return 0

    # Two numbers are told apart by name: what no budget can go below, and what a plan is expected to hold.
    least = next((name for name in rows if name.startswith("least budget")), "")
    return Told(
        steps=steps,
        budget_bytes=size("budget", 1),
        peak_bytes=size("peak (allocator)", 1),
        over_bytes=size("over the budget", 1),
        least_bytes=size(least, 1) or size(least, 0),
        dropped_bytes=size("dropped", 1),
        last_dropped_bytes=size("dropped", 0),
        last_rebuilt_bytes=size("recomputed", 0),
        rescues=int(rows.get("rescues", ["0", "0"])[1].replace(",", "")),
        kept={name[6:]: size(name, 0) for name in rows if name.startswith("kept: ")},
    )


# ------------------------------------------------------------------------------------ one program


@dataclass(slots=True)
class Row:
    """What was found about one program.

    Args:
        versions: of its packages, by name; None for one that is not installed.
        peak_bytes: the ordinary peak of the process that needs most.
        told: the reports of the run that counts, one a process.
        equal, lines: compared lines that were the same; all of them.
        speed: steps a second with the budget over those without; None where it was not timed.
        faults: what must not be.
        notes: what else a reader should know.
    """

    program: Program
    versions: dict[str, str | None] = field(default_factory=dict)
    peak_bytes: int = 0
    budget_bytes: int = 0
    told: list[Told] = field(default_factory=list)
    equal: int = 0
    lines: int = 0
    speed: float | None = None
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        return [name for name, version in self.versions.items() if version is None]

    @property
    def held(self) -> bool:
        return bool(self.told) and all(told.held for told in self.told)

    @property
    def over_bytes(self) -> int:
        """How far the budget was passed, by the process that passed it most."""
        return max((told.over_bytes for told in self.told), default=0)

    @property
    def least_bytes(self) -> int:
        """What the reports name as the least budget."""
        return max((told.least_bytes for told in self.told), default=0)

    @property
    def managed_peak_bytes(self) -> int:
        return max((told.peak_bytes for told in self.told), default=0)


def version_of(package: str, folder: str | None) -> str | None:
    """Return the version of an installed distribution; None where there is none."""
    path = ([folder] if folder else []) + sys.path
    for found in importlib.metadata.distributions(name=package, path=path):
        return found.version
    return None


def compare(row: Row, ordinary: Run, other: Run, name: str, faults: list[str]) -> bool:
    """Compare what two runs printed; say what differs. The row keeps the least that was equal."""
    equal = sum(a == b for a, b in zip(ordinary.lines, other.lines))
    row.equal = min(row.equal, equal) if row.lines else equal
    row.lines = len(ordinary.lines)
    if ordinary.lines == other.lines:
        return True
    first = next(
        (i for i, (a, b) in enumerate(zip(ordinary.lines, other.lines)) if a != b),
        min(len(ordinary.lines), len(other.lines)),
    )
    pair = [run.lines[first] if first < len(run.lines) else "nothing" for run in (ordinary, other)]
    faults.append(f"{name}: line {first + 1} is {pair[1]!r}, ordinarily {pair[0]!r}")
    return False


def messages_in(stderr: str) -> list[str]:
    """Return what the runtime said beside its report: warnings and errors, each once."""
    said: dict[str, None] = {}
    for line in stderr.splitlines():
        _, mark, text = line.partition("delta_runtime: ")
        # The heading of a report, and what the column of held budgets says already.
        if mark and not text.startswith(("policy", "the budget of")):
            said.setdefault(text.strip())
    return list(said)


def last_of_traceback(stderr: str) -> str:
    """Return the line that ends the first traceback: the error."""
    lines = iter(stderr.splitlines())
    for line in lines:
        if TRACEBACK in line:
            break
    return next((line.strip() for line in lines if line[:1].strip()), "")


def check(program: Program, *, rounds: int = 1, folder: str | None = None) -> Row:
    """Run one program without, beside and inside a budget.

    Args:
        rounds: how often the first and the last are run, in turns, to time them; 0 leaves the first out and compares
            with the measured run.
        folder: goes in front of its PYTHONPATH.
    """
    row = Row(program)
    row.versions = {name: version_of(name, folder) for name in program.packages}
    if row.missing:
        return row
    environment = ordinary_environment(folder)

    with tempfile.TemporaryDirectory() as peaks:
        measured = run_child(command_of(program, Path(peaks)), environment)
        found = [int(path.read_text()) for path in Path(peaks).glob("*.peak")]
    if measured.failure or not found:
        row.faults.append(f"without a budget: {measured.failure or 'no peak was measured'}")
        return row
    row.peak_bytes = max(found)
    row.budget_bytes = int(program.share * row.peak_bytes)

    ordinary = run_child(command_of(program), environment) if rounds else measured
    if ordinary.failure:
        row.faults.append(f"without a budget: {ordinary.failure}")
        return row
    if not compare(row, ordinary, measured, "the ordinary run does not repeat itself", row.faults):
        return row

    managed = _run_managed(row, ordinary, environment)
    named_bytes = 0  # the least budget that the report names, where it is more than what was asked
    if row.told and not row.held and row.least_bytes > row.budget_bytes:
        named_bytes = row.least_bytes
        row.notes.append(
            f"at {format_bytes(row.budget_bytes)}, below the least that the report names, passed by "
            f"{format_bytes(row.over_bytes)}"
        )
        row.budget_bytes = int(ABOVE_LEAST * named_bytes)
        if row.budget_bytes > row.peak_bytes:
            row.faults.append(
                f"the least budget that the report names, {format_bytes(named_bytes)}, is above or next to the "
                f"ordinary peak, {format_bytes(row.peak_bytes)}"
            )
            row.budget_bytes = row.peak_bytes
        row.told = []
        managed = _run_managed(row, ordinary, environment)

    pairs = [(ordinary, managed)]
    for _ in range(rounds - 1):
        again = run_child(command_of(program), environment)
        pairs.append((again, _run_managed(row, ordinary, environment)))
    if row.told and not row.held and row.budget_bytes >= (named_bytes or row.least_bytes):
        row.faults.append(
            f"passed by {format_bytes(row.over_bytes)} at {format_bytes(row.budget_bytes)}, though the report names "
            f"{format_bytes(named_bytes or row.least_bytes)} as the least"
        )
    if row.managed_peak_bytes > row.peak_bytes + max(SLACK_SHARE * row.peak_bytes, SLACK_BYTES):
        row.faults.append(
            f"the peak, {format_bytes(row.managed_peak_bytes)}, is above the ordinary one, "
            f"{format_bytes(row.peak_bytes)}"
        )
    if rounds and not any(run.failure for pair in pairs for run in pair):
        row.speed = _quiet_s([pair[0] for pair in pairs]) / _quiet_s([pair[1] for pair in pairs])
    return row


def _run_managed(row: Row, ordinary: Run, environment: Mapping[str, str]) -> Run:
    """Run the program inside the row's budget, and say what is wrong with it, whatever the budget.

    The reports that it prints become the row's, unless a run before, in the same budget, passed it by more.
    """
    budget = {"DELTA_BUDGET": str(row.budget_bytes)}
    managed = run_child(command_of(row.program), {**environment, **budget})
    told = reports_in(managed.stderr)
    if not row.told or max((each.over_bytes for each in told), default=0) > row.over_bytes:
        row.told = told
    faults: list[str] = []
    if managed.failure:
        faults.append(f"inside the budget: {managed.failure}")
    compare(row, ordinary, managed, "inside the budget", faults)
    if (count := managed.stderr.count(TRACEBACK)) > ordinary.stderr.count(TRACEBACK):
        faults.append(f"{count} tracebacks: {last_of_traceback(managed.stderr)}")
    if len(told) != row.program.processes and not managed.failure:
        faults.append(
            f"{len(told)} reports of {row.program.processes} processes; is delta_runtime installed?"
        )
    row.faults += [fault for fault in faults if fault not in row.faults]
    for message in messages_in(managed.stderr):
        note = f'said: "{message[:120]}{"..." if len(message) > 120 else ""}"'
        if note not in row.notes:
            row.notes.append(note)
    return managed


def _quiet_s(runs: Sequence[Run]) -> float:
    """Seconds of the settled part of a run: the sum of the least that each of its intervals took in any round."""
    intervals = [run.intervals_s() for run in runs]
    length = min(len(each) for each in intervals)
    return sum(min(each[i] for each in intervals) for i in range(length)) or float("nan")


# -------------------------------------------------------------------------------------- the table

HEADINGS = (
    "program",
    "versions",
    "budget / ordinary peak",
    "losses equal",
    "budget held",
    "steps/s ratio",
    "dropped, last step / all",
    "notable",
)


def cells(row: Row) -> list[str]:
    """One line of the table."""
    program = row.program
    name = f"{program.title} (`{program.shown}`)"
    if row.missing:
        return [name, f"not installed: {', '.join(row.missing)}", *[""] * 6]
    versions = ", ".join(f"{package} {version}" for package, version in row.versions.items())
    notes = [*(f"**{fault}**" for fault in row.faults), *row.notes]
    if not row.told:
        return [name, versions, *[""] * 5, _in_cell("; ".join(notes))]
    worst = max(row.told, key=lambda told: told.dropped_bytes)
    if rescues := max(told.rescues for told in row.told):
        notes.append(f"{rescues} rescues in {worst.steps} steps")
    notes += [
        f"kept: {format_bytes(size)}, {reason}"
        for reason, size in worst.kept.items()
        if size > row.peak_bytes / 50 and reason != "inputs, parameters, buffers"
    ]
    held = "yes" if row.held else f"no, passed by {format_bytes(row.over_bytes)}"
    return [
        name,
        versions or "torch alone",
        f"{format_bytes(row.budget_bytes)} / {format_bytes(row.peak_bytes)} = "
        f"{row.budget_bytes / row.peak_bytes:.0%}",
        f"all {row.lines}" if row.equal == row.lines else f"**{row.equal} of {row.lines}**",
        held,
        f"{row.speed:.2f}" if row.speed else "",
        f"{format_bytes(worst.last_dropped_bytes)} / {format_bytes(worst.dropped_bytes)}",
        _in_cell("; ".join(notes)),
    ]


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGE = """\
# Programs that were seen to work

Made by one script; do not edit:

    {command}

Each row is a program as a user would write it, in `scripts/ecosystem/`; none of them knows of delta_runtime. It is run
as it is, and with `DELTA_BUDGET` in the environment. Models are built from their configs, tokenizers are trained on
Python's own sources, nothing is downloaded.

{ran} of {rows} programs ran, {compared} printed numbers were compared, {faulty} programs had a fault (in bold).
torch {torch}, Python {python}, {cores} cores, one thread a process.

- **budget / ordinary peak**: of one process; the peak is the allocator's own, of the same program without a runtime.
  Where the first budget was below the least that the report names, the row is of a second run a little above that.
- **losses equal**: every loss, evaluation and sum of all weights that the program prints, to the last bit.
- **budget held**: in every step, the first included, as the report of each process says.
- **steps/s ratio**: with the budget over without, after the first third of the steps; median of all rows {median}. The
  programs are tiny and the machine is shared: what a budget costs is measured in [benchmarks.md](benchmarks.md).
- **dropped**: what was freed to be recomputed, in the last step and in all of them.
- **notable**: faults in bold, what the runtime said beside its report, and what it had to keep.

{table}
"""


def as_markdown(rows: Sequence[Row], command: str) -> str:
    """Return the whole of docs/ecosystem.md."""
    ratios = [row.speed for row in rows if row.speed]
    table = [HEADINGS, ["---"] * len(HEADINGS), *(cells(row) for row in rows)]
    return PAGE.format(
        command=command,
        ran=sum(not row.missing for row in rows),
        rows=len(rows),
        compared=sum(row.lines for row in rows),
        faulty=sum(bool(row.faults) for row in rows),
        torch=version_of("torch", None),
        python=platform.python_version(),
        cores=os.cpu_count(),
        median=f"{statistics.median(ratios):.2f}" if ratios else "unknown",
        table="\n".join("| " + " | ".join(line) + " |" for line in table),
    )


# ------------------------------------------------------------------------------------ command line


def chosen(names: str | None) -> Iterator[Program]:
    """Return the programs whose file is among the names; all of them without names."""
    wanted = names.split(",") if names else None
    for program in PROGRAMS:
        if wanted is None or program.file in wanted:
            yield program


def main(argv: list[str] | None = None) -> int:
    arguments_given = sys.argv[1:] if argv is None else argv
    if arguments_given[:1] == ["--measure"]:
        measure_peak(Path(arguments_given[1]), arguments_given[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="files of scripts/ecosystem/, without .py, with commas")
    parser.add_argument("--rounds", type=int, default=1, help="runs in turns, for the timing")
    parser.add_argument("--share", type=float, help="another share of the peak, for all of them")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument(
        "--path", action="append", default=[], metavar="PROGRAM=FOLDER", help="see above"
    )
    arguments = parser.parse_args(arguments_given)
    folders = dict(text.split("=", 1) for text in arguments.path)
    files = {program.file for program in PROGRAMS}
    for name in [*(arguments.only.split(",") if arguments.only else ()), *folders]:
        if name not in files:
            parser.error(f"{name!r} is none of {', '.join(sorted(files))}")
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    if arguments.write and (arguments.only or arguments.share):
        parser.error("--write: of all programs as they are, not with --only or --share")

    rows: list[Row] = []
    for program in chosen(arguments.only):
        begin_s = time.perf_counter()
        folder = str(Path(folders[program.file]).resolve()) if program.file in folders else None
        if arguments.share:
            program = replace(program, share=arguments.share)
        row = check(program, rounds=arguments.rounds, folder=folder)
        rows.append(row)
        name, *rest = cells(row)
        print(
            f"{name}: {' | '.join(cell for cell in rest if cell)}  [{time.perf_counter() - begin_s:.0f} s]"
        )
        sys.stdout.flush()
    if arguments.write:
        shown = f"python scripts/check_ecosystem.py --rounds {arguments.rounds} --write docs/ecosystem.md"
        arguments.write.write_text(as_markdown(rows, shown))
    faults = [(row.program.shown, fault) for row in rows for fault in row.faults]
    for name, fault in faults:
        print(f"fault: {name}: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
