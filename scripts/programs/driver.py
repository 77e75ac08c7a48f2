"""Runs the steps of a program, ordinarily or managed, and writes down every bit that must not change.

Everything below the line `# --- the driver ---` is also part of each standalone script; so it imports nothing from
this package and takes a program as what `exec` of its source leaves: a dict of names.

What is written down, in order: what the program notes itself (losses, numbers drawn on threads), gradients after each
step's backward, parameters, buffers, foreign arrays and all generators after each step, errors with their phase.

Note: an interrupted attempt
  1. A signal arrives at no certain place, so the step that it hits is tried first, undone, and then run for good: the
     bits after that must not depend on where it hit.
  2. The handler raises once, and only inside the attempt. Where it ran and the program saw no exception, the signal
     was lost, and that is written down as a difference.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import signal
import sys
import threading
import warnings

import numpy as np
import torch

import delta_runtime as delta
from delta_runtime import cpu_pool

__all__ = ["Interrupted", "Job", "Managed", "Peak", "drive", "first_difference", "freeze"]

# What scripts need, and this module itself does not.
_FOR_SCRIPTS = (sys, delta)

# --- the driver ---


class Interrupted(BaseException):
    """Raised by the handler of the signal."""


class Job(threading.Thread):
    """A thread that a program joins; what it raised is raised there."""

    running = []

    def __init__(self, function, *arguments):
        super().__init__(daemon=True)
        self.function, self.arguments = function, arguments
        self.result = self.error = None
        self.begun = threading.Event()
        Job.running.append(self)
        self.start()

    def run(self):
        self.begun.set()
        try:
            self.result = self.function(*self.arguments)
        except BaseException as error:
            self.error = error

    def wait(self):
        self.join()
        if self in Job.running:
            Job.running.remove(self)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.result

    @staticmethod
    def join_all():
        while Job.running:
            with contextlib.suppress(RuntimeError):  # a signal came before it was started
                Job.running.pop().join()


def freeze(value):
    """The bits of a tensor, an array, a generator, a number or a list of these."""
    if isinstance(value, torch.Tensor):
        inner = getattr(value, "wrapped", None)
        if inner is not None:
            return freeze(inner)
        plain = value.detach()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        head = f"{plain.dtype} {list(plain.shape)} ".encode()
        plain = plain.contiguous()
        # Not through numpy, which makes a storage one that cannot be resized.
        content = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
        if len(content) > 65536:
            content = hashlib.blake2b(content).digest()
        return head + content
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)} ".encode() + value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, (list, tuple)):
        return b"|".join(freeze(each) for each in value)
    return repr(value).encode()


def random_states():
    """The state of the generators of torch, numpy and Python."""
    name, words, position, *rest = np.random.get_state()
    return [
        ("torch's generator", torch.default_generator.get_state().numpy().tobytes()),
        ("numpy's generator", words.tobytes() + f"{position} {rest}".encode()),
        ("Python's generator", str(hash(random.getstate())).encode()),
    ]


def seed_all(seed):
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every kind of device
    np.random.seed(seed % 2**32)
    random.seed(seed)


_FLAGS = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
)


@contextlib.contextmanager
def flags_restored():
    """Puts all flags that change numbers back, whatever a program did to them."""
    torch.set_num_threads(1)
    before = [get() for get, _ in _FLAGS]
    switch_interval_s = sys.getswitchinterval()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        for (get, put), value in zip(_FLAGS, before):
            if get() != value:
                put(value)
        torch.set_flush_denormal(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        if sys.getswitchinterval() != switch_interval_s:
            sys.setswitchinterval(switch_interval_s)


class Managed:
    """How runtimes surround the steps: `style` is entered, step, both or anew (one for each step)."""

    def __init__(self, make, style):
        self.make, self.style = make, style
        self.runtimes = []

    def runtime(self):
        if not self.runtimes or self.style == "anew":
            self.runtimes.append(self.make())
        return self.runtimes[-1]

    def whole(self):
        return self.runtime() if self.style in ("entered", "both") else contextlib.nullcontext()

    def step(self):
        if self.style == "entered":
            return contextlib.nullcontext()
        return self.runtime().step()

    def close(self, reports):
        if reports and self.runtimes:
            str(self.runtimes[-1].report())
        for runtime in self.runtimes:
            runtime.close()


class _Ordinary:
    whole = step = staticmethod(contextlib.nullcontext)
    close = staticmethod(lambda reports: None)
    runtimes = ()


def drive(program, managed_by=None):
    """Runs a program and returns what was seen: a list of (label, bits, or the names of an error's classes).

    `managed_by()` returns a Managed; None is an ordinary run.
    """
    seen = []
    program["note"] = lambda label, value: seen.append((label, freeze(value)))
    program["PROGRAM"] = program
    seed = program["SEED"] + 7919 * program.get("RANK", 0)
    seed_all(seed)
    management = managed_by() if managed_by else _Ordinary()
    program["MANAGEMENT"] = management
    with flags_restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in program["LASTING"]:
                program[name] = None
            program["prepare"]()
            with management.whole():
                for step in range(program["STEPS"]):
                    if step in program["INTERRUPTS"]:
                        _attempt(program, step, seen, management)
                    _run_step(program, step, seen, management)
        finally:
            Job.join_all()
            management.close(program["SEED"] % 16 == 0)
            for name in program["PERSISTENT"] + program["LASTING"] + program["LOCAL"]:
                program.pop(name, None)
    seen += [(f"at the end: {label}", state) for label, state in random_states()]
    return seen


def _run_step(program, step, seen, management):
    where = "enter"
    try:
        with management.step():
            for _ in range(program["MICRO"]):
                for where in ("forward", "between", "backward"):
                    program[where](step)
            where = "leave"
        for name, value in _tensors(program):
            if value.grad is not None:
                seen.append((f"step {step}: gradient of {name}", freeze(value.grad)))
        where = "after"
        program["after"](step)
    except Exception as error:
        names = tuple(each.__name__ for each in type(error).__mro__)
        seen.append((f"step {step}: error in {where}", (names, str(error)[:400])))
        _abandon(program)
        seed_all(program["SEED"] + 7919 * program.get("RANK", 0) + step)
    for name in program["LOCAL"]:
        program.pop(name, None)
    seen.extend((f"step {step}: {name}", freeze(value)) for name, value in _tensors(program))
    for name in program["PERSISTENT"]:
        value = program.get(name)
        if isinstance(value, (np.ndarray, torch.Generator, list)):
            seen.append((f"step {step}: {name}", freeze(value)))
    seen.extend((f"step {step}: {label}", state) for label, state in random_states())


def _tensors(program):
    """Names and tensors that live as long as the program, those of modules too."""
    found = []
    for name in program["PERSISTENT"]:
        value = program.get(name)
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif isinstance(value, torch.nn.Module):
            found += [(f"{name}.{inner}", each) for inner, each in value.named_parameters()]
            found += [(f"{name}.{inner}", each) for inner, each in value.named_buffers()]
    return found


def _abandon(program):
    """Forgets a step that raised."""
    Job.join_all()
    for _, value in _tensors(program):
        value.grad = None
    for name in program["LASTING"]:
        program[name] = None


def _attempt(program, step, seen, management):
    """Runs a step until a signal arrives, and undoes all of it; see the Note above."""
    tensors, arrays, generators = [], [], []
    for name in program["PERSISTENT"]:
        value = program.get(name)
        if isinstance(value, torch.Tensor):
            gradient = None if value.grad is None else value.grad.clone()
            tensors.append((value, value.detach().clone(), gradient))
        elif isinstance(value, np.ndarray):
            arrays.append((value, value.copy()))
        elif isinstance(value, torch.Generator):
            generators.append((value, value.get_state()))
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    fired, armed, arrived = [], [True], False

    def handler(number, frame):
        if armed and not fired:
            fired.append(number)
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    length = len(seen)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, program["INTERRUPTS"][step])
            with management.step():
                for where in ("forward", "between", "backward"):
                    program[where](step)
        except Exception:
            pass
        armed.clear()
    except Interrupted:
        arrived = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    del seen[length:]
    if fired and not arrived:
        seen.append((f"step {step}: the signal was lost", b""))
    torch.set_grad_enabled(True)  # a signal inside of `with` may leave half of it behind
    Job.join_all()
    for name in program["LOCAL"]:
        program.pop(name, None)
    for name in program["LASTING"]:
        program[name] = None
    with torch.no_grad():
        for value, content, gradient in tensors:
            value.copy_(content)
            value.grad = gradient
    for value, content in arrays:
        value[...] = content
    for value, content in generators:
        value.set_state(content)
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


class Peak:
    """The highest live bytes of a block; `budget_bytes` lets that run have `share` of them."""

    share = 1.0

    def __enter__(self):
        cpu_pool.reset_peak()
        self.base_bytes = cpu_pool.allocated_bytes()
        return self

    def __exit__(self, *_):
        self.peak_bytes = cpu_pool.peak_bytes()

    @property
    def budget_bytes(self):
        return max(1, self.base_bytes + int(self.share * (self.peak_bytes - self.base_bytes)))


def first_difference(found, expected):
    """What differs first between two runs, in words; "" if every bit is the same."""
    for position, (label, wanted) in enumerate(expected):
        if position >= len(found):
            return f"{label}: missing"
        got_label, got = found[position]
        if got_label != label:
            message = f" ({': '.join((got[0][0], got[1]))})" if isinstance(got, tuple) else ""
            return f"{got_label}{message} where an ordinary run has {label!r}"
        if isinstance(wanted, tuple):
            if wanted[0][0] not in got[0]:
                return f"{label}: {got[0][0]}: {got[1]}, where an ordinary run has {wanted[0][0]}: {wanted[1]}"
        elif got != wanted:
            wrong = sum(a != b for a, b in zip(got, wanted)) + abs(len(got) - len(wanted))
            return f"{label}: {wrong} of {len(wanted)} bytes differ"
    if len(found) > len(expected):
        return f"{found[len(expected)][0]}: not in an ordinary run"
    return ""
