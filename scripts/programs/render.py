"""A program as Python source: what the runner executes, and what a reader gets to see.

Both are the same text, so that what is printed is what failed. The runner asks for marks in it (`_made`, `_probe`),
which tell the coverage table where values are; a standalone script has none, and brings the parts and the driver that
it needs along.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scripts.programs import driver, parts
from scripts.programs.faults import Family
from scripts.programs.program import Instruction, Kind, Phase, Program
from scripts.programs.settings import Settings

_PLACE = re.compile(r"\{(o|p|q|i|body|\d+)\}")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Marks:
    """Which instructions tell the runner what they do.

    Args:
        made: numbers of the instructions after which the graph of what they assigned is marked.
        probed: numbers of the instructions before which the places of values are taken. They are looked at before each
            backward, too (`_look`).
    """

    made: frozenset[int] = frozenset()
    probed: frozenset[int] = frozenset()


NO_MARKS = Marks()


class _Renderer:
    """Turns the instructions of one program into lines."""

    def __init__(self, program: Program, marks: Marks) -> None:
        self.program = program
        self.marks = marks
        self.numbers = {id(each): number for number, each in enumerate(program.instructions())}

    def source(self) -> str:
        program = self.program
        persistent = program.persistent()
        local = sorted(
            {name for phase in Phase for top in self._tops(phase) for name in top.assigns()}
            - set(persistent)
            - program.lasting
        )
        lines = [
            f"SEED = {program.seed}",
            f"STEPS = {program.steps}",
            f"MICRO = {program.micro}",
            f"PERSISTENT = {persistent!r}",
            f"LASTING = {sorted(program.lasting)!r}",
            f"LOCAL = {local!r}",
            f"INTERRUPTS = {program.interrupts!r}",
        ]
        releases = self._releases()
        for phase in Phase:
            lines += ["", "", f"def {phase.value}({'' if phase is Phase.PREPARE else 'step'}):"]
            body: list[str] = []
            for position, top in enumerate(self._tops(phase)):
                body += self._lines(top)
                body += releases.get((phase, position), [])
            assigned = _assigned_here(self._tops(phase))
            deleted = [line.split("del ")[1] for line in body if "del " in line]
            names = assigned | {name for each in deleted for name in each.split(", ")}
            lines += _indented(_global_line(names) + (_merged(body) or ["pass"]))
        return "\n".join(lines) + "\n"

    def _tops(self, phase: Phase) -> Sequence[Instruction]:
        return self.program.phases.get(phase, ())

    def _releases(self) -> dict[tuple[Phase, int], list[str]]:
        """The `del` lines that come after each instruction: of names that nothing reads any more."""
        program = self.program
        keep = set(program.persistent()) | program.lasting | program.held
        last: dict[str, tuple[Phase, int]] = {}
        made_when: dict[str, tuple[int, ...] | None] = {}
        deferred: set[str] = set()
        for phase in (Phase.FORWARD, Phase.BETWEEN, Phase.BACKWARD, Phase.AFTER):
            for position, top in enumerate(self._tops(phase)):
                for each in top.walk():
                    if each.kind.deferred:
                        deferred |= {n for inner in each.body for n in inner.reads()}
                        deferred |= {n for inner in each.body for n in inner.assigns()}
                for name in top.reads() | top.assigns():
                    last[name] = (phase, position)
                for name in top.assigns():
                    made_when.setdefault(name, top.when)
        found: dict[tuple[Phase, int], dict[tuple[int, ...] | None, list[str]]] = {}
        for name, place in sorted(last.items()):
            if name in keep or name in deferred or name not in made_when:
                continue
            found.setdefault(place, {}).setdefault(made_when[name], []).append(name)
        lines: dict[tuple[Phase, int], list[str]] = {}
        for place, by_when in found.items():
            for when, names in by_when.items():
                line = f"del {', '.join(names)}"
                lines.setdefault(place, []).extend(_only(when, [line]))
        return lines

    def _lines(self, each: Instruction) -> list[str]:
        number = self.numbers[id(each)]
        body: list[str] = []
        for inner in each.body:
            body += self._lines(inner)
        if each.kind in (Kind.HOOK, Kind.THREAD):
            body = _global_line(_assigned_here(each.body)) + body
        body = body or ["pass"]
        lines: list[str] = []
        for line in each.code.split("\n"):
            filled = self._filled(line, each, number)
            if filled.strip() == "{body}":
                lines += _indented(body, (len(line) - len(line.lstrip())) // 4)
            else:
                lines.append(filled)
        if self.marks.probed and ".backward" in each.code and not each.code.startswith(" "):
            lines.insert(0, "_look()")
        if number in self.marks.probed:
            lines.insert(0, f"_probe({number})")
        if number in self.marks.made and each.out and each.kind is not Kind.THREAD:
            lines.append(f"_made({number}, {', '.join(each.out)})")
        return _only(each.when, lines)

    def _filled(self, line: str, each: Instruction, number: int) -> str:
        def place(match: re.Match[str]) -> str:
            what = match.group(1)
            if what == "body":
                return "{body}"
            if what == "i":
                return str(number)
            if what in "opq":
                return each.out["opq".index(what)]
            return each.args[int(what)]

        return _PLACE.sub(place, line)


def _assigned_here(instructions: Iterable[Instruction]) -> set[str]:
    """Names that are assigned in the function itself, not in functions inside of it."""
    names: set[str] = set()
    for each in instructions:
        names |= set(each.out)
        if each.kind is Kind.BLOCK:
            names |= _assigned_here(each.body)
    return names


def _global_line(names: set[str]) -> list[str]:
    return [f"global {', '.join(sorted(names))}"] if names else []


def _indented(lines: list[str], levels: int = 1) -> list[str]:
    return [" " * 4 * levels + line if line else line for line in lines]


def _only(when: tuple[int, ...] | None, lines: list[str]) -> list[str]:
    if when is None:
        return lines
    return [f"if step in {when!r}:", *_indented(lines)]


def _merged(lines: list[str]) -> list[str]:
    """Joins neighbours with the same `if step in ...`."""
    merged: list[str] = []
    open_line = ""
    for line in lines:
        if line.startswith("if step in "):
            if line == open_line:
                continue
            open_line = line
        elif not line.startswith(" "):
            open_line = ""
        merged.append(line)
    return merged


def render(program: Program, marks: Marks = NO_MARKS) -> str:
    """The functions `prepare`, `forward`, `between`, `backward`, `after`, and the constants that the driver reads."""
    return _Renderer(program, marks).source()


# ------------------------------------------------------------------------------------ standalone


def needed_parts(source: str, registry: Mapping[str, object] | None = None) -> list[str]:
    """Names of parts.py that a source uses, and that those use, in the order of their definition."""
    registry = parts.REGISTRY if registry is None else registry
    found: set[str] = set()
    waiting = [word for word in set(_WORD.findall(source)) if word in registry]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        text = parts.source_of(name)
        waiting += [word for word in set(_WORD.findall(text)) if word in registry]
    return [name for name in registry if name in found]


def standalone(program: Program, settings: Settings, remarks: Sequence[str] = ()) -> str:
    """The program as a script that needs nothing but torch, numpy and this package.

    It runs the program ordinarily and managed, prints the first difference, and exits 1 if there is one.
    """
    body = render(program)
    used = "\n\n\n".join(parts.source_of(name) for name in needed_parts(body))
    head = "\n".join(f"# {line}" for line in (*remarks, f"managed: {settings.describe()}"))
    sections = [
        used,
        body.strip(),
        inspect.getsource(driver).split("# --- the driver ---\n", 1)[1].strip(),
        settings.script_lines().strip(),
        _MAIN.strip(),
        (_TOGETHER if program.family is Family.TWO_PROCESS else _ALONE).strip(),
    ]
    imports = _imports_of("\n".join(sections))
    return "\n\n\n".join(each for each in (head, imports, *sections) if each) + "\n"


_IMPORTS = (
    *("contextlib", "ctypes", "dataclasses", "hashlib", "io", "itertools", "mmap", "os", "random"),
    *("signal", "subprocess", "sys", "tempfile", "threading", "warnings"),
)
_IMPORT_LINES = (
    "import numpy as np",
    "import torch",
    "import torch.distributed as dist",
    "import torch.nn.functional as F",
    "from torch import nn",
    "from torch.overrides import TorchFunctionMode",
    "from torch.utils._python_dispatch import TorchDispatchMode",
    "from torch.utils._pytree import tree_map",
    "from torch.utils.checkpoint import checkpoint",
    "",
    "import delta_runtime as delta",
    "from delta_runtime import cpu_pool",
    "from delta_runtime.online.policies import get_policy",
)


def _imports_of(text: str) -> str:
    """The imports of a script: those whose names it uses."""
    words = set(_WORD.findall(text))
    plain = [f"import {name}" for name in _IMPORTS if name in words]
    others = [line for line in _IMPORT_LINES if not line or line.split()[-1] in words]
    return "\n".join([*plain, "", *others])


_MAIN = """
def main():
    cpu_pool.install()
    with Peak() as peak:
        expected = drive(globals())
    again = drive(globals())
    found = drive(globals(), managed_by=lambda: make_runtime(peak.budget_bytes))
    print("ordinary runs:", first_difference(again, expected) or "the same bits")
    difference = first_difference(found, expected)
    print("managed run:", difference or "the same bits")
    sys.exit(1 if difference else 0)
"""

_ALONE = """
if __name__ == "__main__":
    main()
"""

_TOGETHER = """
RANK = int(os.environ.get("PROGRAM_RANK", -1))

if __name__ == "__main__":
    if RANK < 0:
        os.environ["PROGRAM_STORE"] = tempfile.mktemp()
        processes = [
            subprocess.Popen([sys.executable, __file__], env={**os.environ, "PROGRAM_RANK": str(rank)})
            for rank in range(2)
        ]
        sys.exit(max(process.wait() for process in processes))
    store = "file://" + os.environ["PROGRAM_STORE"]
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=2)
    main()
"""
