"""Does everything hold on a GPU, and what does it cost there? One command.

Runs these parts, each as a process of its own with a limit of its own, and notes in one JSON file what came of each as
soon as it has ended: the build of the extension against the torch that is installed; tests/accelerator on the card,
with streams that are late on purpose and memory that is filled with NaN; faults of every kind in a training step
(scripts/stress_chaos.py); the gradient sweeps over PyTorch's ops and modules and over real models; some tests under
compute-sanitizer, where it is installed, and under torch's own sanitizer; who trains behind walls; and the benchmarks
of benchmarks/accelerator.py. No part may take more than 9 minutes, nor all of them more than 25 in one call. A part
that has passed with the sources and the card as they are is not run again (`--again`: it is), so the next call goes on
where this one ended; what failed comes after what was never run. Exits 1 if a part failed or had no time left.

    python scripts/gpu_check.py [--json build/gpu_check.json] [--parts build,tests] [--minutes 25] [--again]
    python scripts/gpu_check.py --dry-run

`--dry-run` needs no GPU: the same parts on the simulated accelerator of the tests, with toy models and a few ops. It
shows that the check itself runs; its figures mean nothing. Takes about 4 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_PART_S = 9 * 60
TAIL = 4000
"""Characters of a part's output that are kept."""


@dataclass(frozen=True, slots=True)
class Part:
    """One step of the check.

    Args:
        command: what it runs; {python}, {device} and {out} (a JSON file of its own) are filled in.
        dry: the same for the dry run; () where it is as `command`.
        limit_s: after so many seconds it has failed.
        needs: a program without which it is skipped.
        on_card_only: whether the dry run skips it.
    """

    name: str
    command: tuple[str, ...]
    dry: tuple[str, ...] = ()
    limit_s: float = MOST_PART_S
    needs: str = ""
    on_card_only: bool = False
    environment: tuple[tuple[str, str], ...] = ()


PYTEST = ("{python}", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
ORDERS = "late or swapped_out_whole or host_memory"
CHAOS = ("{python}", "scripts/stress_chaos.py", "--device", "{device}")
BENCH = ("{python}", "-m", "benchmarks.accelerator")
OUT = ("--device", "{device}", "--json", "{out}")


def bench(part: str, model: str, *more: str, limit_s: float = 300) -> Part:
    return Part(f"{part} {model}", (*BENCH, part, "--models", model, *more, *OUT), limit_s=limit_s)


def dry_bench(part: str, models: str, *more: str) -> Part:
    return Part(f"{part} of toys", (*BENCH, part, "--models", models, *more, *OUT))


PARTS: tuple[Part, ...] = (
    Part("build", ("{python}", "setup.py", "build_ext", "--inplace")),
    Part("doctor", ("{python}", "-m", "delta_runtime", "doctor"), limit_s=120),
    Part(
        "tests",
        (*PYTEST, "tests/accelerator/test_lanes.py", "tests/accelerator/test_streams.py"),
    ),
    Part(
        "rescue, waits, idle steps",
        (
            *PYTEST,
            *(f"tests/accelerator/test_{name}.py" for name in ("rescue", "waits", "idle_steps")),
        ),
        dry=(*PYTEST, "tests/accelerator/test_rescue.py", "tests/accelerator/test_idle_steps.py"),
    ),
    Part(
        "fragments",
        (
            *PYTEST,
            *(f"tests/accelerator/test_{name}.py" for name in ("fragments", "reserved_limit")),
        ),
        dry=(
            *PYTEST,
            *(f"tests/accelerator/test_{name}.py" for name in ("fragments", "reserved_limit")),
            *("-k", "grow or reserved_limit", "-m", "not slow"),
        ),
    ),
    Part(
        "faults",
        (*CHAOS, "--seeds", "5"),
        dry=(*CHAOS, "--seeds", "1", "--only", "less memory", "compute late", "other stream"),
        limit_s=240,
    ),
    Part(
        "sweeps",
        (*PYTEST, "tests/accelerator/test_sweeps.py"),
        dry=(*PYTEST, "tests/accelerator/test_sweeps.py", "-k", "module_db or resnet or gpt2"),
    ),
    Part(
        "torch's stream sanitizer",
        (*PYTEST, "tests/accelerator/test_streams.py"),
        limit_s=180,
        on_card_only=True,
        environment=(("TORCH_CUDA_SANITIZER", "1"),),
    ),
    Part(
        "compute-sanitizer",
        ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "7", *PYTEST)
        + ("tests/accelerator/test_lanes.py", "-k", ORDERS),
        limit_s=300,
        needs="compute-sanitizer",
        on_card_only=True,
    ),
    *(bench("speed", model) for model in ("resnet50", "gpt2_medium", "llama_1b", "vit_large")),
    *(bench("walls", model) for model in ("resnet50", "gpt2_medium", "vit_large")),
    bench("walls", "llama_1b", "--walls", "16GiB,24GiB"),
    *(bench("batch", model, "--walls", "8GiB") for model in ("resnet50", "resnet101")),
    bench("batch", "gpt2_large", "--walls", "16GiB"),
)
"""On a card. Weights, gradients and AdamW's state of GPT-2 large take 11.5 GiB, of the Llama 8.2."""
DRY_BENCHES: tuple[Part, ...] = (
    dry_bench("speed", "tiny_resnet,tiny_gpt2", "--shares", "0.7", "--rounds", "2"),
    dry_bench("walls", "tiny_resnet,tiny_gpt2", "--walls", "12MiB,64MiB"),
    dry_bench("batch", "tiny_gpt2", "--walls", "24MiB", "--rounds", "2", "--most", "64"),
)


@dataclass(slots=True)
class Outcome:
    """What came of a part.

    Args:
        state: "passed", "failed", "out of time", "cut short" (the time for all parts was over),
            "skipped" (with the reason in `tail`).
        seconds: that it took.
        tail: the end of what it printed.
        results: what it wrote as JSON, if it did.
        sources: fingerprint of what it ran on.
        about: hardware and versions that it ran on.
    """

    state: str
    seconds: float = 0.0
    tail: str = ""
    results: object = None
    sources: str = ""
    about: object = None


def fingerprint(about: object) -> str:
    """Of all that a part may depend on: what has passed with something else says nothing."""
    kept = ("card", "cuda", "driver", "torch", "python", "error")
    digest = hashlib.sha256()
    if isinstance(about, dict):
        digest.update(json.dumps({name: about.get(name) for name in kept}).encode())
    for name in ("setup.py", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    for folder in ("csrc", "delta_runtime", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def parts_of(dry_run: bool) -> list[Part]:
    """Return what is run, in order."""
    if not dry_run:
        return list(PARTS)
    benches = ("speed", "walls", "batch")
    return [part for part in PARTS if part.name.split()[0] not in benches] + list(DRY_BENCHES)


def run(part: Part, device: str, dry_run: bool, limit_s: float) -> Outcome:
    """Run one part to its end, or to its limit."""
    if dry_run and part.on_card_only:
        return Outcome("skipped", tail="only on a card")
    if part.needs and shutil.which(part.needs) is None:
        return Outcome("skipped", tail=f"{part.needs} is not installed")
    out = ROOT / "build" / f"gpu_check_{part.name.replace(' ', '_')}.json"
    out.parent.mkdir(exist_ok=True)
    out.unlink(missing_ok=True)
    words = {"python": sys.executable, "device": device, "out": str(out)}
    command = [
        word.format(**words) for word in (part.dry if dry_run and part.dry else part.command)
    ]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DELTA_")}
    environment = clean | {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **dict(part.environment),
    }
    if "pytest" in command:
        environment["DELTA_TEST_DEVICE"] = device
    begin = time.monotonic()
    log = out.with_suffix(".txt")
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            state = "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "out of time" if limit_s >= part.limit_s else "cut short"
        finally:  # also where this process is interrupted: nobody else would let go of the card
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begin
    results = None
    with contextlib.suppress(OSError, ValueError):  # none, or half of one
        results = json.loads(out.read_text())
    return Outcome(state, round(seconds, 1), log.read_text(errors="replace")[-TAIL:], results)


def about(device: str) -> object:
    """Versions and hardware, asked in a process of its own: this one never touches the card."""
    program = (
        "import json; from benchmarks.accelerator import Device; "
        f"print(json.dumps(Device({device!r}).about()))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=180,
        )
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": "no answer within 3 minutes"}
    except (ValueError, IndexError):
        return {"error": done.stderr[-TAIL:]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on the simulated accelerator")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts of this call")
    parser.add_argument("--again", action="store_true", help="run what has passed before, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    device = "fake" if arguments.dry_run else arguments.device
    path = arguments.json or ROOT / "build" / f"gpu_check_{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = parts_of(arguments.dry_run)
    names = [part.name for part in parts]
    if unknown := set(arguments.parts or ()) - set(names):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a part must not outlive this
    done: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    end = time.monotonic() + 60 * arguments.minutes
    here = about(device)
    sources = fingerprint(here)

    def state(part: Part) -> str:
        """Return what is known of it, with the sources and on the machine that there are now."""
        before = done.get(part.name, {})
        return str(before["state"]) if before.get("sources") == sources else "not run"

    # What was never run before what failed or hung, so that one bad part does not starve the others.
    # The build always: it does nothing where nothing has changed, and a fresh machine has none.
    wanted = [part for part in parts if not arguments.parts or part.name in arguments.parts]
    wanted.sort(key=lambda part: part.name != "build" and state(part) in ("failed", "out of time"))
    bad = False
    for part in wanted:
        if state(part) == "passed" and part.name != "build" and not arguments.again:
            print(f"{part.name}: passed before", flush=True)
            continue
        left_s = end - time.monotonic()
        if left_s < part.limit_s / 4:
            print(f"{part.name}: no time left; run the same command again", flush=True)
            bad = True
            continue
        print(f"{part.name} ...", flush=True)
        outcome = run(part, device, arguments.dry_run, min(part.limit_s, left_s))
        outcome.sources, outcome.about = sources, here
        done[part.name] = asdict(outcome)
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps(done, indent=1) + "\n")
        whole.replace(path)
        print(f"  {outcome.state}, {outcome.seconds:.0f} s", flush=True)
        if outcome.state not in ("passed", "skipped"):
            bad = True
            print(outcome.tail, flush=True)
            if part.name == "build":
                break
    print(f"written to {path}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
