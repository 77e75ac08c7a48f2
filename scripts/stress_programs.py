"""Does a managed training run have the same bits as an ordinary one, whatever the program does?

A stress run, not a benchmark. Makes random training programs from a seed (ops, views, writes through any alias, foreign
memory, threads, modes, subclasses, flags, custom ops, exceptions, signals, several graphs; scripts/programs has all of
it), runs each ordinarily and managed under random policies, tiers, budgets and levels of `verify`, and compares losses,
gradients, parameters, buffers and the states of all generators bit for bit. Programs run in processes of their own: one
that crashes or hangs is a finding too. What goes wrong is made as small as it gets and printed as a script; at the end
comes a table of what was tried: fault x place of the value x phase. Exits 1 if anything was found.

Takes about 25 milliseconds of one core for an eager program, 20 minutes for 20,000 of them on two quiet cores; about
0.2 s for one with two processes, and 1 s for one with compiled parts once those are compiled. Needs no GPU.

    python scripts/stress_programs.py [--family eager] [--programs 1000] [--seed 0] [--start 0] [--jobs 2]
        [--seconds S] [--out FILE] [--faults NAME ...] [--without NAME ...] [--settled] [--minimise 3]
        [--sabotage NAME] [--until-found] [--strict] [--known FILE]
    python scripts/stress_programs.py --show 17          # program 17 as a script, not run

`--out` writes a line of JSON per program; a run that is given a file that exists goes on behind its last program.
`--known` takes such a file: what went wrong there too does not count, so that with `--sabotage` and `--until-found` the
run says after how many programs a mend that is switched off is missed.
tests/scripts/test_stress_programs.py runs a short version.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.programs.workers import Bench, Request, clean_environment, run_all

clean_environment()

UNKNOWN = "NO_ATTACK"
"""What a finding is put down to that comes up without any of the program's attacks."""
LIMIT_S = {"eager": 30.0, "two_process": 60.0, "compiled": 300.0}
"""Most seconds that one program may take, by family."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=tuple(LIMIT_S), default="eager")
    parser.add_argument("--programs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of all programs (default 0)")
    parser.add_argument("--start", type=int, default=0, help="number of the first one (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--seconds", type=float, help="end after so long")
    parser.add_argument("--limit", type=float, help="most seconds for one program")
    parser.add_argument("--out", type=Path, help="file for a line of JSON per program")
    parser.add_argument(
        "--faults", nargs="+", default=[], help="only programs that try one of these"
    )
    parser.add_argument(
        "--without", nargs="+", default=[], help="no programs that try one of these"
    )
    parser.add_argument("--sabotage", default="", help="break the runtime: a name or a number")
    parser.add_argument("--until-found", action="store_true", help="end at the first finding")
    parser.add_argument("--strict", action="store_true", help="no error is legal")
    parser.add_argument(
        "--known", type=Path, help="file of a run: what went wrong there does not count"
    )
    parser.add_argument("--minimise", type=int, default=3, help="how many findings to make small")
    parser.add_argument(
        "--settled",
        action="store_true",
        help="workers have used a runtime before their first program",
    )
    parser.add_argument("--show", type=int, help="print one program as a script")
    return parser.parse_args(arguments)


def sabotage_number(name: str) -> int:
    """Return the number of a sabotage switch; names come from the extension, where it has them."""
    if not name:
        return 0
    if name.lstrip("-").isdigit():
        return int(name)
    import torch  # noqa: F401  the extension is linked with its libraries

    from delta_runtime import _C

    known = getattr(_C, "sabotage_names", dict)()
    numbers = dict(known) if isinstance(known, dict) else {n: i for i, n in enumerate(known)}
    if name not in numbers:
        raise SystemExit(f"no sabotage {name!r}; there are: {', '.join(numbers) or 'only numbers'}")
    return int(numbers[name])


@dataclass(slots=True)
class Finding:
    """A program that went wrong, and which."""

    number: int
    after: int
    result: Any
    faults: tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """What a run has found."""

    verdicts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    programs: int = 0
    raised: int = 0
    evicting: int = 0
    seconds: float = 0.0


class Stress:
    """One run of many programs."""

    def __init__(self, options: argparse.Namespace) -> None:
        from scripts.programs.coverage import Table
        from scripts.programs.faults import Family

        self.options = options
        self.family = Family(options.family)
        self.limit_s = options.limit or LIMIT_S[options.family]
        self.sabotage = sabotage_number(options.sabotage)
        self.table = Table()
        self.tally = Tally()
        self.start = options.start
        self.known = self._known_findings()
        self.bench: Bench | None = None

    def _known_findings(self) -> set[int]:
        """Numbers of the programs that went wrong in the run that `--known` names, whatever was legal there."""
        if not self.options.known:
            return set()
        lines = map(json.loads, self.options.known.read_text().splitlines())
        return {
            line["number"]
            for line in lines
            if line["family"] == self.options.family
            and line["seed"] == self.options.seed
            and line["verdict"] != "SAME"
        }

    def case(self, number: int) -> Any:
        from scripts.programs.generator import make_case

        return make_case(self.options.seed, number, self.family)

    def run(self) -> int:
        from scripts.programs.progress import Progress

        self._take_in_earlier()
        begin_s = time.monotonic()
        out = self.options.out.open("a") if self.options.out else None
        results = run_all(self._requests(), self.options.jobs, self.limit_s)
        last = self.options.start + self.options.programs - self.start
        try:
            with Progress(last, self.options.seconds) as progress:
                for request, result in results:
                    line = self._take_in(request.number, result)
                    if out:
                        out.write(json.dumps(line) + "\n")
                        out.flush()
                    progress.show(self.tally.programs, len(self.tally.findings))
                    late = (
                        self.options.seconds and time.monotonic() - begin_s > self.options.seconds
                    )
                    if late or (self.options.until_found and self.tally.findings):
                        break
        except KeyboardInterrupt:
            print("interrupted; what there is so far:")
        finally:
            results.close()
            if out:
                out.close()
        self._report(time.monotonic() - begin_s)
        if self.bench:
            self.bench.worker.end()
        return 1 if self.tally.findings else 0

    def _requests(self) -> Iterator[Request]:
        wanted = {name.upper() for name in self.options.faults}
        unwanted = {name.upper() for name in self.options.without}
        end = self.options.start + self.options.programs
        for number in range(self.start, end):
            if wanted or unwanted:
                tried = {fault.name for fault in self.case(number).program.faults()}
                if (wanted and not wanted & tried) or unwanted & tried:
                    continue
            yield Request(
                number,
                self.options.seed,
                self.options.family,
                sabotage=self.sabotage,
                settled=self.options.settled,
            )

    # ------------------------------------------------------------------ results

    def _take_in(self, number: int, result: Any) -> dict[str, Any]:
        from scripts.programs.runner import Verdict

        case = self.case(number)
        found = number not in self.known and (
            result.verdict.is_finding
            or (self.options.strict and result.verdict is Verdict.LEGALLY_LOUD)
        )
        faults = tuple(sorted(fault.name for fault in case.program.faults()))
        if found and "Python's generator" in result.detail:
            faults = ("PYTHON_RANDOM",)  # it happens once in a process, whatever the program does
        elif found:
            again = self._bench().judge(case.program, case.settings)
            if again.verdict is result.verdict:
                faults = self._culprits(case, result)
            else:
                result = replace(
                    result, detail=f"{result.detail} (not again: {again.verdict.value})"
                )
        line = {
            "number": number,
            "family": self.options.family,
            "seed": self.options.seed,
            "verdict": result.verdict.name,
            "detail": result.detail,
            "faults": sorted(fault.name for fault in case.program.faults()),
            "culprits": list(faults) if found else [],
            "settings": case.settings.describe(),
            "raised": result.raised,
            "evictions": result.evictions,
            "seconds": round(result.seconds, 4),
            "cells": sorted([c.fault.name, c.place.name, c.phase.name] for c in result.cells),
        }
        self._count(line, result if found else None)
        return line

    def _count(self, line: dict[str, Any], finding: Any) -> None:
        from scripts.programs.coverage import Cell, Place
        from scripts.programs.faults import Fault
        from scripts.programs.program import Phase

        tally = self.tally
        tally.programs += 1
        tally.verdicts[line["verdict"]] += 1
        tally.raised += line["raised"]
        tally.evicting += line["evictions"] > 0
        tally.seconds += line["seconds"]
        self.table.add(Cell(Fault[f], Place[p], Phase[h]) for f, p, h in line["cells"])
        for name in line["faults"]:
            self.table.programs[Fault[name]] += 1
            if line["verdict"] == "LEGALLY_LOUD":
                self.table.loud[Fault[name]] += 1
        if line["culprits"]:
            for name in line["culprits"]:
                if name != UNKNOWN:
                    self.table.findings[Fault[name]] += 1
            tally.findings.append(
                Finding(line["number"], tally.programs, finding, tuple(line["culprits"]))
            )

    def _take_in_earlier(self) -> None:
        """Goes on behind the last program of a file that exists."""
        if not self.options.out or not self.options.out.exists():
            return
        numbers = []
        for text in self.options.out.read_text().splitlines():
            line = json.loads(text)
            if line["family"] == self.options.family and line["seed"] == self.options.seed:
                numbers.append(line["number"])
                self._count(line, None)
        if numbers:
            self.start = max(self.start, max(numbers) + 1)
            print(f"{self.options.out} has {len(numbers)} programs; going on with {self.start}")

    def _bench(self) -> Bench:
        if self.bench is None:
            self.bench = Bench(self.limit_s, self.sabotage)
        return self.bench

    def _culprits(self, case: Any, result: Any) -> tuple[str, ...]:
        from scripts.programs.runner import culprits

        guilty = culprits(case.program, case.settings, result, self._bench().judge)
        return tuple(sorted(fault.name for fault in guilty)) or (UNKNOWN,)

    # ------------------------------------------------------------------ the end

    def _report(self, wall_s: float) -> None:
        from scripts.programs.generator import aims

        tally = self.tally
        faults = list(dict.fromkeys(aim.fault for aim in aims(self.family)))
        print()
        print(self.table.render(faults))
        empty = self.table.empty(faults)
        print(f"\n{len(empty)} cells are empty that could be full")
        for cell in empty[:40]:
            print(f"  {cell.fault.value}: {cell.place.value}, {cell.phase.value}")
        print(
            f"\n{tally.programs} programs in {wall_s:.0f} s ({tally.programs / max(wall_s, 1e-9):.1f}/s, "
            f"{1000 * tally.seconds / max(1, tally.programs):.0f} ms each in its process); in "
            f"{tally.evicting} something left device memory, in {tally.raised} an ordinary run raised"
        )
        print(", ".join(f"{name}: {count}" for name, count in tally.verdicts.most_common()))
        first: dict[str, Finding] = {}
        for finding in tally.findings:
            for name in finding.faults:
                first.setdefault(name, finding)
        if not first:
            print(f"nothing was found in {tally.programs} programs")
            return
        print("\nfound, with the first of each:")
        for name, finding in sorted(first.items(), key=lambda item: item[1].after):
            what = finding.result.verdict.name if finding.result else "earlier"
            print(f"  {name:20} after {finding.after:6} programs: {what}, program {finding.number}")
        different = {id(finding): finding for finding in first.values()}
        for finding in list(different.values())[: self.options.minimise]:
            self._print_small(finding)

    def _print_small(self, finding: Finding) -> None:
        from scripts.programs.minimise import Minimiser
        from scripts.programs.render import standalone

        if finding.result is None:
            return
        case = self.case(finding.number)
        smallest = Minimiser(self._bench().judge).run(case.program, case.settings, finding.result)
        remarks = (
            f"program {finding.number} of seed {self.options.seed}, family {self.options.family}, "
            f"from {case.program.size()} to {smallest.program.size()} instructions "
            f"({smallest.judged} programs run)",
            f"{smallest.result.verdict.value}: {smallest.result.detail}".replace("\n", "\n# "),
            f"faults: {', '.join(sorted(f.value for f in smallest.program.faults()))}",
        )
        print("\n" + "#" * 100)
        print(standalone(smallest.program, smallest.settings, remarks))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    stress = Stress(options)
    if options.show is not None:
        from scripts.programs.render import standalone

        case = stress.case(options.show)
        print(standalone(case.program, case.settings, (f"program {options.show}",)))
        return 0
    return stress.run()


if __name__ == "__main__":
    sys.exit(main())
