"""Backward on threads that nobody has told how many threads to use. Run as a script, in a process of its own.

Writes what is wrong, by program, as JSON to standard output. It needs OMP_NUM_THREADS=2 or more when it starts.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.harness import N, Program, Step, check, constant, in_thread, leaf, taken


def _openmp() -> Callable[[], int]:
    """How many threads OpenMP would use on the calling thread, by the library that torch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if "libgomp" in path or "libiomp" in path or "libomp" in path:
            return ctypes.CDLL(path).omp_get_max_threads
    return torch.get_num_threads


most_threads = _openmp()


def convolved(w: Tensor) -> Tensor:
    x = w.view(4, -1, 16, 16)
    return F.conv2d(F.conv2d(x * 1.5, _kernel, padding=1).tanh(), _kernel, padding=1).exp()


def convolved_in_one_dimension(w: Tensor) -> Tensor:
    return F.conv1d((w * 1.5).view(4, 16, -1), _kernel[:, :, 0]).tanh()


def product_in_bfloat16(w: Tensor) -> Tensor:
    h = (w * 1.5).bfloat16()
    return (h.repeat(1, 4) @ _wide.bfloat16()).float().tanh()


def reduced(w: Tensor) -> Tensor:
    return (w * (w.detach() * 1.01).norm().exp().log()).exp()


def recurrent(w: Tensor) -> Tensor:
    return _lstm(w.view(8, -1, 16) * 1.5)[0].exp()


_kernel = constant(16, 16, 3, 3, seed=5)
_wide = constant(4 * N, N, seed=6)
torch.manual_seed(3)
_lstm = nn.LSTM(16, 16)

OPS = [convolved, convolved_in_one_dimension, product_in_bfloat16, reduced, recurrent]


def _program(op: Callable[[Tensor], Tensor], how: str) -> Program:
    def program() -> Step:
        torch.set_num_threads(2)
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            told: list[int] = []

            def forward() -> Tensor:
                y = op(w)
                return (y * y).mean()

            def backward() -> None:
                told.append(most_threads())
                if how == "fresh thread that chooses":
                    torch.set_num_threads(2)
                # What an op has made, but not filled, is filled then: an op of its own.
                torch.use_deterministic_algorithms(how == "fresh thread that fills")
                loss.backward()
                torch.use_deterministic_algorithms(False)
                told.append(most_threads())
                told.append(int((torch.ones(3, 3) @ torch.ones(3, 3)).sum()))
                told.append(most_threads())

            torch.set_num_threads(1)
            loss = forward()
            if how == "two threads in forward":
                torch.set_num_threads(2)
                loss = forward()
                torch.set_num_threads(1)
            if how == "same thread":
                backward()
            elif how == "pool":
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(backward).result()
            else:
                in_thread(backward)
            told.append(torch.get_num_threads())
            torch.set_num_threads(2)
            return [loss.detach(), torch.tensor(told), *taken(w)]

        return step

    return program


HOW = [
    "same thread",
    "fresh thread",
    "pool",
    "two threads in forward",
    "fresh thread that chooses",
    "fresh thread that fills",
]
MODES = ["drop_all", "swap_all"]
PROGRAMS = {
    f"{op.__name__}, {how}, {mode}": (_program(op, how), mode)
    for op in OPS
    for how in (HOW if op is convolved else HOW[1:2])
    for mode in (MODES if op is convolved else MODES[:1])
}


def main() -> None:
    found: dict[str, str] = {}
    for name, (program, mode) in PROGRAMS.items():
        found[name] = ""
        try:
            check(program, mode)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
