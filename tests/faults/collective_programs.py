"""Programs that communicate: what each rank's collectives write is seen by no schema. For one process or two."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.faults.harness import N, Program, Step, boundary, check, leaf, sources, taken

HALF = N // 2


@contextmanager
def process_group(rank: int, ranks: int, store: dist.Store) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _training(forward: Callable[[Tensor, Tensor, int], Tensor]) -> Program:
    """A step around `forward`, which gets a leaf, an ordinary intermediate that differs by rank, and the step."""

    def program() -> Step:
        w, v = leaf(N, N), leaf(N, N, seed=1)

        def step(k: int) -> list[Tensor]:
            def whole() -> Tensor:
                h = (v * (1.0 + dist.get_rank() + k)).tanh() @ w
                y = forward(w, h, k)
                del h
                return (y * y.sin()).mean()

            loss = whole()
            loss.backward()
            return [loss.detach(), *taken(w, v)]

        return step

    return program


class Reduce(torch.autograd.Function):
    """The sum of all ranks' parts, as tensor parallel layers take it, where it lies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class MarkedReduce(Reduce):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x


class ReduceBothWays(torch.autograd.Function):
    """Communicates in backward too, on a gradient that a saved value goes into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        dist.all_reduce(out)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad * x.exp() + out * 0.01


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        out = torch.zeros(ranks * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rows = grad.shape[0] // dist.get_world_size()
        return grad[dist.get_rank() * rows :][:rows].clone()


# ------------------------------------------------------------------- these write something with one rank already


def gathered_into_zeros(w: Tensor, h: Tensor, k: int) -> Tensor:
    rows = Gather.apply(h.sin())
    return rows[:N] * w


def gathered_into_a_list(w: Tensor, h: Tensor, k: int) -> Tensor:
    parts = [torch.zeros(N, N) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, h.detach())
    return sum(part.mul(0.5).cos() * w for part in parts) + h


def gathered_into_views(w: Tensor, h: Tensor, k: int) -> Tensor:
    ranks = dist.get_world_size()
    whole = torch.ones(ranks * N, N)
    dist.all_gather(list(whole.chunk(ranks)), h.detach())
    return (whole * 0.5).exp()[-N:] * w + h


def scattered_into_zeros(w: Tensor, h: Tensor, k: int) -> Tensor:
    buffer = torch.zeros(N, N)
    ranks = range(dist.get_world_size())
    dist.scatter(buffer, [h.detach() * (1.0 + r) for r in ranks] if dist.get_rank() == 0 else None)
    return buffer.sin() * w + h


def reduced_and_scattered(w: Tensor, h: Tensor, k: int) -> Tensor:
    buffer = torch.full((N, N), 0.5)
    dist.reduce_scatter_tensor(buffer, torch.cat([h.detach()] * dist.get_world_size()))
    return buffer.sin() * w + h


def all_to_all(w: Tensor, h: Tensor, k: int) -> Tensor:
    buffer = torch.empty(N, N).fill_(0.5)
    dist.all_to_all_single(buffer, h.detach())
    return (buffer * 1.5).tanh() * w + h


def gathered_meanwhile(w: Tensor, h: Tensor, k: int) -> Tensor:
    """Asynchronous: the write comes while other ops run."""
    whole = torch.zeros(dist.get_world_size() * N, N)
    sent = h.detach().contiguous()
    work = dist.all_gather_into_tensor(whole, sent, async_op=True)
    z = (w * 1.5).exp()
    work.wait()
    return whole[-N:].sin() * z + h


def gathered_over_a_source(w: Tensor, h: Tensor, k: int) -> Tensor:
    """What was made of the old content is rebuilt from the old content."""
    table = _tables[k]
    y = w * (table * 1.5).exp()
    boundary()
    dist.all_gather([torch.empty(N, N), table][-1:] * dist.get_world_size(), h.detach())
    return y + w * table.cos() + h


def scattered_over_a_source(w: Tensor, h: Tensor, k: int) -> Tensor:
    table = _tables[k]
    y = w * (table * 1.5).exp()
    boundary()
    dist.scatter(table, [h.detach()] * dist.get_world_size() if dist.get_rank() == 0 else None)
    return y + w * table.cos() + h


def gathered_over_a_value(w: Tensor, h: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        m = w * (1.0 + k)
    y = w * (m * 1.5).exp()
    boundary()
    dist.scatter(m, [h.detach()] * dist.get_world_size() if dist.get_rank() == 0 else None, src=0)
    return y + w * m.cos() + h


def functional(w: Tensor, h: Tensor, k: int) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    with torch.no_grad():
        whole = collectives.all_gather_tensor(h.sin(), 0, dist.group.WORLD)
        reduced = collectives.all_reduce(whole * 0.5, "sum", dist.group.WORLD)
    return (reduced[:N] * 1.5).cos() * w + h


IN_PLACE = [
    gathered_into_zeros,
    gathered_into_a_list,
    gathered_into_views,
    scattered_into_zeros,
    reduced_and_scattered,
    all_to_all,
    gathered_meanwhile,
    gathered_over_a_source,
    scattered_over_a_source,
    gathered_over_a_value,
]


# ------------------------------------------------------------------------------------- these need two ranks


def reduced(w: Tensor, h: Tensor, k: int) -> Tensor:
    return Reduce.apply(h * 1.5).exp()


def reduced_and_marked(w: Tensor, h: Tensor, k: int) -> Tensor:
    return MarkedReduce.apply(h * 1.5).exp()


def reduced_both_ways(w: Tensor, h: Tensor, k: int) -> Tensor:
    return ReduceBothWays.apply(h * 1.5).sin() * w


def reduced_plain(w: Tensor, h: Tensor, k: int) -> Tensor:
    statistics = h.detach().mean(0, keepdim=True).expand(N, N).contiguous()
    dist.all_reduce(statistics)
    return (statistics * 2.0).exp() * w + h


def reduced_view(w: Tensor, h: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        m = (w * 2.0).exp()
        dist.all_reduce(m[HALF:])
    return m * w + h


def reduced_meanwhile(w: Tensor, h: Tensor, k: int) -> Tensor:
    part = h.detach() * 2.0
    work = dist.all_reduce(part, async_op=True)
    z = (w * 1.5).exp()
    work.wait()
    return part.sin() * z + h


def reduced_several(w: Tensor, h: Tensor, k: int) -> Tensor:
    parts = [(h.detach() * i).exp() for i in range(1, 4)]
    dist.all_reduce_coalesced(parts)
    return sum(part.cos() * w for part in parts) + h


def reduced_to_one(w: Tensor, h: Tensor, k: int) -> Tensor:
    part = h.detach() * 2.0
    dist.reduce(part, dst=1)
    return part.sin() * w + h


def received(w: Tensor, h: Tensor, k: int) -> Tensor:
    """A pipeline: activations come from the other rank, into a buffer made for them."""
    if dist.get_rank() == 0:
        dist.send(h.detach(), 1)
        return h
    buffer = torch.zeros(N, N)
    dist.recv(buffer, 0)
    return buffer.sin() * w + h


def received_meanwhile(w: Tensor, h: Tensor, k: int) -> Tensor:
    buffer, other = torch.zeros(N, N), 1 - dist.get_rank()
    sent = h.detach().contiguous()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, buffer, other)]
    )
    z = (w * 1.5).exp()
    for work in works:
        work.wait()
    return buffer.sin() * z + h


def broadcast(w: Tensor, h: Tensor, k: int) -> Tensor:
    buffer = h.detach() * 2.0 if dist.get_rank() == 0 else torch.zeros(N, N)
    dist.broadcast(buffer, 0)
    return buffer.sin() * w + h


def broadcast_over_a_source(w: Tensor, h: Tensor, k: int) -> Tensor:
    table = _tables[k]
    y = w * (table * 1.5).exp()
    boundary()
    dist.broadcast(table, 1)
    return y + w * table.cos() + h


def reduced_over_a_source(w: Tensor, h: Tensor, k: int) -> Tensor:
    table = _tables[k]
    y = w * (table * 1.5).exp()
    boundary()
    dist.all_reduce(table[HALF:])
    return y + w * table.cos() + h


def _backend() -> Any:
    """Its own methods run no op that anybody could see."""
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def reduced_by_the_backend(w: Tensor, h: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        part = h.detach() * 2.0
        _backend().allreduce([part]).wait()
    return part.sin() * w + h


def reduced_by_the_backend_from_the_second_step(w: Tensor, h: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        part = h.detach() * 2.0
        if k > 0:
            _backend().allreduce([part]).wait()
    return part.sin() * w + h


def gathered_by_the_backend(w: Tensor, h: Tensor, k: int) -> Tensor:
    parts = [torch.zeros(N, N) for _ in range(dist.get_world_size())]
    _backend().allgather([parts], [h.detach().contiguous()]).wait()
    return parts[-1].sin() * w + parts[0].cos() * h


def by_the_differentiable_functions(w: Tensor, h: Tensor, k: int) -> Tensor:
    from torch.distributed.nn import functional as differentiable

    return differentiable.all_reduce(h * 1.5).exp() * w


ALONE = [*IN_PLACE, functional, gathered_by_the_backend]
TOGETHER = [
    *IN_PLACE,
    reduced,
    reduced_and_marked,
    reduced_both_ways,
    reduced_plain,
    reduced_view,
    reduced_meanwhile,
    reduced_several,
    reduced_to_one,
    received,
    received_meanwhile,
    broadcast,
    broadcast_over_a_source,
    reduced_over_a_source,
    by_the_differentiable_functions,
    functional,
    reduced_by_the_backend,
    reduced_by_the_backend_from_the_second_step,
    gathered_by_the_backend,
]

_tables: list[Tensor] = []


def complaint(forward: Callable[[Tensor, Tensor, int], Tensor], mode: str) -> str:
    """What is wrong with the managed run of a program, or ""."""

    def program() -> Step:
        _tables[:] = [table * (1.0 + dist.get_rank()) for table in sources(3, N, N)]
        return _training(forward)()

    try:
        check(program, mode)
    except Exception:
        return traceback.format_exc()
    return ""


def run_rank(rank: int, directory: str) -> None:
    """One of two processes: every program, everything dropped; writes what is wrong, by program, to a file."""
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    begin_s = time.monotonic()
    with process_group(rank, 2, dist.FileStore(f"{directory}/store", 2)):
        for forward in TOGETHER:
            found[forward.__name__] = complaint(forward, "drop_all")
            torch.save(found, f"{directory}/found{rank}")  # the next one may not come back
            if time.monotonic() - begin_s > 40:  # one waited for gloo's time limit
                break
            dist.barrier()
