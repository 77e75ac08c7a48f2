"""Attacks by what two processes do together: collectives write their arguments, which no schema says."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.programs.attacks.common import USES, Aim, Attacker, making, writing
from scripts.programs.builder import Builder
from scripts.programs.faults import Fault
from scripts.programs.program import Kind

MADE_TOGETHER = (
    "Reduced.apply({0} * 0.5)",
    "Reduced.apply({0} @ {1} * 0.1)",
    "Reduced.apply({0}.clone())",
    "ReducedBack.apply({0})",
    "ReducedSaved.apply({0})",
    "Gathered.apply({0})",
    "exchange({0}.detach()) * {0}",
    "receive({0}.detach()) + {0}",
    "gather_into({0}.detach())[16:48] * {0}",
    "scatter_sum({0}.detach()) * {0}",
    "dist.nn.functional.all_reduce({0} * 0.5)",
    "sum(dist.nn.functional.all_gather({0} * 0.5))",
    "torch.distributed._functional_collectives.all_reduce({0}.detach(), 'sum', dist.group.WORLD) * {0}",
    "torch.distributed._functional_collectives.all_gather_tensor({0}.detach(), 0, dist.group.WORLD)[16:48] * {0}",
)
"""Of a square and a leaf."""

WRITES_TOGETHER = (
    "dist.all_reduce({0})",
    "dist.all_reduce({0}, op=dist.ReduceOp.MAX)",
    "dist.broadcast({0}, 1)",
    "dist.broadcast({0}, 0)",
    "dist.all_reduce({0}, async_op=True).wait()",
    "dist.reduce({0}, 0)",
    "dist.recv({0}, 0) if dist.get_rank() else dist.send({0} * 2.0, 1)",
    "dist.all_gather([{0}, torch.empty(32, 32)], torch.full((32, 32), 0.5 + dist.get_rank()))",
    "dist.all_gather_into_tensor({0}, torch.full((16, 32), 0.5 + dist.get_rank()))",
    "dist.reduce_scatter_tensor({0}, torch.ones(64, 32) * (0.5 + dist.get_rank()))",
    "dist.all_to_all_single({0}, torch.full((32, 32), 0.3 + dist.get_rank()))",
    "dist.scatter({0}, [torch.ones(32, 32), torch.full((32, 32), 0.5)] if dist.get_rank() == 0 else None, 0)",
    "dist.gather(torch.full((32, 32), 0.25), [{0}, torch.zeros(32, 32)] if dist.get_rank() == 0 else None, 0)",
    "dist.all_reduce_coalesced([{0}, torch.ones(3)])",
    "[each.wait() for each in (dist.isend({0} * 3.0, 1 - RANK), dist.irecv({0}, 1 - RANK))]",
    "torch.ops._c10d_functional.wait_tensor("
    "torch.ops._c10d_functional.all_reduce_({0}, 'sum', dist.group.WORLD.group_name))",
)
MEMORY = (
    "torch.zeros(32, 32)",
    "torch.ones(32, 32)",
    "torch.empty(32, 32).fill_(0.3)",
    "torch.zeros_like({0})",
    "{0}.detach() * 0.5",
    "{0}.detach().clone()",
    "{0}.detach().tanh()",
    "torch.rand(32, 32)",
)


def collective(b: Builder, aim: Aim) -> Iterator[None]:
    """A collective that writes a tensor which a recipe made, or which one reads."""
    if b.chance(0.35):
        data_parallel(b)
    if b.chance(0.5):

        def make(leaf: str) -> str:
            y = b.fresh("y")
            code = "{o} = " + b.pick(MADE_TOGETHER)
            x = b.make("{0}.tanh()", leaf, prefix="x")
            b.emit(Kind.MAKE, code, x, leaf, out=(y,), attack=b.moment(aim.fault, y))
            return b.make(b.pick(USES), y)

        yield from making(b, aim, make)
        return

    def strike(m: str) -> None:
        b.strike(Kind.WRITE, b.pick(WRITES_TOGETHER), m, fault=aim.fault, on=(m,))

    def memory() -> str:
        return b.make(b.pick(MEMORY), b.any_square(), prefix="m")

    # No collective moves a version counter.
    yield from writing(b, aim, memory, strike, visible=False)


def data_parallel(b: Builder) -> None:
    """A part of the model is wrapped for data parallel training."""
    arguments = b.pick(
        (
            "",
            ", gradient_as_bucket_view=True",
            ", static_graph=True",
            ", bucket_cap_mb=0.001",
            ", broadcast_buffers=False",
        )
    )
    dropout = b.pick(("0.0", "0.2"))
    net = b.prepared(f"nn.parallel.DistributedDataParallel(TinyNet({dropout}){arguments})", "net")
    h = b.make("{0}({1})", net, b.any_square())
    b.sink(h)
    b.join(h)


ATTACKS: dict[Fault, Attacker] = {Fault.COLLECTIVE: collective}
