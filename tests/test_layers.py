"""The direction of imports and of calls, and that the pure parts live without torch.

Python's imports are read from the sources, those inside functions and under TYPE_CHECKING included. A
part that does not exist yet passes. What the folders of csrc call of each other is read from the objects
that the extension was linked from, what their files call from objects of their own, and what they include
from the sources.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "delta_runtime"
PURE = ("core", "online", "planners", "simulate", "report", "cli")


@dataclass(frozen=True)
class Layer:
    """What the modules of one part may import, besides themselves and the standard library."""

    parts: frozenset[str] = frozenset()  # of delta_runtime
    packages: frozenset[str] = frozenset()  # of others
    lazy: frozenset[str] = frozenset()  # of others, inside functions only


def _layer(parts: str = "", packages: str = "", lazy: str = "") -> Layer:
    return Layer(*(frozenset(names.split()) for names in (parts, packages, lazy)))


LAYERS = {
    "core": _layer(packages="numpy"),
    "config": _layer("core"),
    "online": _layer("core", "numpy scipy"),
    "planners": _layer("core", "numpy scipy", lazy="ortools"),
    "planning_time": _layer("core"),
    "standing_aside": _layer("affordable_peak known_step"),
    "allocator_margin": _layer(""),
    "idle_steps": _layer("affordable_peak known_step"),
    "affordable_peak": _layer("core planners planning_time", "numpy"),
    "plan_trials": _layer("core"),
    "plans_beside": _layer("core"),
    "known_step": _layer("core affordable_peak plan_trials"),
    "budget_relief": _layer("core planners affordable_peak known_step planning_time"),
    "plan_cache": _layer(
        "core planners budget_relief known_step plan_trials planning_time plans_beside", "numpy"
    ),
    "simulate": _layer("core online planners", "numpy scipy"),
    "report": _layer("core", "numpy scipy rich", lazy="matplotlib"),
    "extension": _layer("core _C", "torch"),
    "record": _layer("core extension _C", "numpy torch"),
    "act": _layer("core config extension _C", "numpy torch psutil", lazy="cupy cupyx"),
    "cpu_pool": _layer("core extension _C", "numpy torch"),
    "device": _layer("core config extension _C", "torch psutil"),
    "growing_segments": _layer(packages="torch"),
    "reserved_limit": _layer("extension growing_segments _C", "torch"),
    "pump": _layer("core act extension online record _C", "numpy"),
    "torch_hooks": _layer("core extension optimizer_hooks raw_access saved_leaves _C", "torch"),
    "failed_backward": _layer(packages="torch"),
    "entered": _layer("core extension raw_access torch_hooks _C", "torch"),
    "steps": _layer(
        "core config act allocator_margin budget_relief device extension known_step online plan_cache "
        "planning_time plans_beside pump raw_access record report idle_steps standing_aside torch_hooks _C",
        "numpy torch",
    ),
}
"""Parts that are not here (runtime, ambient, integrations, the package itself) put the others together."""


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name."""

    name: str
    line: int
    is_lazy: bool


def imports_of(source: str, module: str, is_package: bool = False) -> list[Import]:
    """Every import in a source text, relative ones resolved against the module's own name."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: list[Import] = []

    def visit(node: ast.AST, is_lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from delta_runtime import x`: x may be the part.
            names = [f"{name}.{alias.name}" for alias in node.names]
            is_own_root = name == "delta_runtime"
            found.extend(
                Import(each, node.lineno, is_lazy) for each in (names if is_own_root else [name])
            )
        inside = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def breaches_of(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports although its layer may not."""
    part = (module.split(".") + [""])[1]
    layer = LAYERS.get(part)
    if layer is None:
        return []
    breaches = []
    for each in imports_of(source, module, is_package):
        top, _, rest = each.name.partition(".")
        if top == "delta_runtime":
            allowed = rest.partition(".")[0] in layer.parts | {part}
        else:
            allowed = (
                top in sys.stdlib_module_names
                or top in layer.packages
                or (each.is_lazy and top in layer.lazy)
            )
        if not allowed:
            breaches.append(f"{module}:{each.line} imports {each.name}")
    return breaches


def _module_name(path: Path) -> str:
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def test_imports_follow_the_layers():
    breaches = [
        breach
        for path in _sources(PACKAGE)
        for breach in breaches_of(
            path.read_text(encoding="utf-8"), _module_name(path), path.name == "__init__.py"
        )
    ]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("delta_runtime.core.units", "import torch"),
        ("delta_runtime.core.units", "def f():\n    import torch.nn as nn"),
        ("delta_runtime.core.units", "from ..online import ledger"),
        ("delta_runtime.core.units", "from delta_runtime import config"),
        ("delta_runtime.core.units", "import scipy.optimize"),
        ("delta_runtime.config", "from delta_runtime.runtime import Runtime"),
        ("delta_runtime.online.ledger", "from delta_runtime.act import executor"),
        ("delta_runtime.online.ledger", "if True:\n    from .. import _C"),
        ("delta_runtime.planners.rotor", "from delta_runtime.online import ledger"),
        ("delta_runtime.report.plots", "import matplotlib.pyplot"),
        ("delta_runtime.record.recorder", "import delta_runtime.online.ledger"),
        ("delta_runtime.act.host", "import cupy"),
        ("delta_runtime.act.host", "from ..record import recorder"),
    ],
)
def test_a_breach_is_found(module, source):
    assert len(breaches_of(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("delta_runtime.core.units", "import os.path, numpy as np\nfrom . import errors"),
        ("delta_runtime.online.ledger", "from ..core.events import Place\nimport numpy"),
        ("delta_runtime.simulate.run", "from delta_runtime.online.ledger import Ledger"),
        ("delta_runtime.report.plots", "import rich\ndef f():\n    import matplotlib.pyplot"),
        ("delta_runtime.record.recorder", "import torch\nfrom .. import _C"),
        ("delta_runtime.runtime", "import torch\nfrom .act import executor"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert breaches_of(source, module) == []


def test_relative_imports_of_a_package_are_its_own():
    assert breaches_of("from .ledger import Ledger", "delta_runtime.online", is_package=True) == []
    assert breaches_of("from ..act import x", "delta_runtime.online", is_package=True) != []


def test_only_config_names_the_variables():
    """No other module holds the name of a DELTA_* variable as a text."""
    culprits = [
        f"{_module_name(path)}:{node.lineno} {node.value}"
        for path in _sources(PACKAGE)
        if path.name != "config.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith("DELTA_") and node.value.replace("_", "").isalpha()
    ]
    assert not culprits, "\n".join(culprits)


def test_pure_parts_import_without_torch():
    modules = ["delta_runtime", "delta_runtime.config", "delta_runtime_autoload"]
    modules += [_module_name(path) for part in PURE for path in _sources(PACKAGE / part)]
    program = (
        "import importlib, sys\n"
        "for name in ('torch', 'delta_runtime._C'):\n"
        "    sys.modules[name] = None\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "assert 'matplotlib' not in sys.modules, 'matplotlib is imported lazily'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_autoload_imports_nothing_but_os_until_it_is_called():
    source = (ROOT / "delta_runtime_autoload.py").read_text(encoding="utf-8")
    at_import = [each.name for each in imports_of(source, "delta_runtime_autoload")]
    eager = [e.name for e in imports_of(source, "delta_runtime_autoload") if not e.is_lazy]
    assert eager == ["os"]
    assert "delta_runtime.ambient" in at_import


# ---------------------------------------------------------------- csrc

CSRC = ROOT / "csrc"
CUDA_FOLDER = "cuda"
"""Of an extension of its own, which needs CUDA's headers."""
LOWEST_FIRST = ("util", "pool", "tiers")
"""Folders of csrc that know nothing of sessions, each of nothing behind it."""


def cycle_in(uses: Mapping[str, Iterable[str]]) -> list[str]:
    """The files of one cycle, first and last the same; empty where there is none."""
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _file(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").as_posix()


def _includes() -> dict[str, set[str]]:
    """For each header of csrc the headers that it includes."""
    return {
        _file(path, CSRC): {
            name.removesuffix(".h")
            for name in re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.M)
        }
        for path in CSRC.rglob("*.h")
    }


def _calls_of(objects: Mapping[str, Path]) -> dict[str, set[str]]:
    """For each object those that define what it calls, or whose data it uses."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    defined: dict[str, str] = {}
    wanted: dict[str, list[str]] = {}
    for name, path in objects.items():
        done = subprocess.run(
            ["nm", "--format=posix", str(path)], capture_output=True, text=True, check=True
        )
        for symbol, kind, *_ in (line.split() for line in done.stdout.splitlines()):
            if kind == "U":
                wanted.setdefault(symbol, []).append(name)
            elif kind in "TDBR":
                defined[symbol] = name
    calls: dict[str, set[str]] = {name: set() for name in defined.values()}
    for symbol, names in wanted.items():
        for name in names:
            if symbol in defined:
                calls.setdefault(name, set()).add(defined[symbol])
    return calls


def _calls() -> dict[str, set[str]]:
    """The same of the folders of csrc, each of which is compiled as one."""
    built = ROOT.glob(f"build/{sysconfig.get_config_var('SOABI')}-torch-*/build/joined")
    joined = max(built, key=lambda each: each.stat().st_mtime, default=None)
    if joined is None and not list(PACKAGE.glob("_C*.so")):
        pytest.skip("the extension was not built here")
    assert joined is not None, "the extension was built here, and where are its objects?"
    folders = {path.parent.name for path in CSRC.glob("*/*.cpp")} - {CUDA_FOLDER}
    calls = _calls_of({folder: joined / f"{folder}.o" for folder in folders})
    assert "rebuild" in calls["observe"], "the objects were not read"
    return calls


def test_no_files_of_csrc_include_each_other_in_a_circle():
    assert cycle_in(_includes()) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_files_of_csrc_call_each_other_in_a_circle(tmp_path):
    """Each is compiled by itself, which also shows that it includes what it uses."""
    sources = {
        _file(path, CSRC): path
        for path in sorted(CSRC.rglob("*.cpp"))
        if path.parent.name != CUDA_FOLDER
    }
    objects = {name: tmp_path / f"{name.replace('/', '.')}.o" for name in sources}
    folders = [str(CSRC), sysconfig.get_path("include"), *cpp_extension.include_paths()]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-c", "-fPIC", "-DNDEBUG"]
    command += ["-DTORCH_EXTENSION_NAME=_C", *(f"-I{each}" for each in folders)]

    def compiled(name: str) -> None:
        done = subprocess.run(
            [*command, str(sources[name]), "-o", str(objects[name])], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[:3000]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, sources))
    calls = _calls_of(objects)
    assert "rebuild/replay" in calls["observe/saved_tensors"], "the objects were not read"
    assert cycle_in(calls) == []


def test_the_lowest_folders_of_csrc_know_nothing_of_those_above():
    for uses in (_includes(), _calls()):
        for name, others in uses.items():
            folder = name.split("/")[0]
            if folder in LOWEST_FIRST:
                allowed = LOWEST_FIRST[: LOWEST_FIRST.index(folder) + 1]
                assert {other.split("/")[0] for other in others} <= set(allowed), (name, others)


@pytest.mark.parametrize(
    ("folder", "below"), [("planners", set()), ("walk", set()), ("simulate", {"walk", "util"})]
)
def test_some_folders_of_csrc_know_nothing_but_plain_numbers(folder, below):
    for uses in (_includes(), _calls()):
        for name, others in uses.items():
            if name.split("/")[0] == folder:
                used = {other.split("/")[0] for other in others}
                assert used <= {folder} | below, (name, others)
    for path in (CSRC / folder).iterdir():
        assert not re.search(
            r"include <(torch|ATen|c10|Python|pybind)", path.read_text(encoding="utf-8")
        ), path


def test_a_circle_is_found():
    assert set(cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert cycle_in({"a": {"b"}, "b": {"c"}, "d": {"a", "c"}}) == []
