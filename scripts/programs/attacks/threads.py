"""Attacks by other threads: they draw random numbers while values are made again, or run backward themselves.

Note: threads that repeat
  The main thread draws nothing from a generator that another thread draws from until that one was waited for; what the
  thread drew is noted. So an ordinary run repeats however the two are interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator

from scripts.programs.attacks.common import Aim, Attacker, leaf_for, making_steps
from scripts.programs.builder import Builder
from scripts.programs.faults import Fault
from scripts.programs.program import Kind, Phase

DRAWS = (
    "torch.rand(8, generator={g})",
    "torch.randn(16, generator={g})",
    "torch.rand(1024, generator={g})[:8]",
    "torch.randint(0, 100, (4,), generator={g})",
    "torch.empty(8).normal_(generator={g})",
)
DROPPING = (
    "F.dropout({0}, 0.3)",
    "{0} * torch.rand_like({0})",
    "F.dropout({0}, 0.3).tanh()",
    "{0} + torch.randn_like({0}) * 0.1",
)
OWN_DROPPING = (
    "{0} * torch.rand({0}.shape, generator={1})",
    "{0} * torch.bernoulli(torch.full({0}.shape, 0.7), generator={1})",
    "{0} + torch.empty({0}.shape).normal_(generator={1})",
)


def _victims(b: Builder, leaf: str, own: str | None) -> tuple[str, list[str]]:
    """A chain of random ops; returns its end and the values that would be made again."""
    # Wide values take longer to draw than a thread takes to come in between.
    wide = b.pick(("{0} * 1.0", "{0}.repeat(4, 4)", "{0}.repeat(8, 8)"))
    h, made = b.make(wide, leaf, prefix="y"), []
    for _ in range(b.pick((2, 4, 6))):
        args = (h,) if own is None else (h, own)
        h = b.make(b.pick(DROPPING if own is None else OWN_DROPPING), *args, prefix="y")
        made.append(h)
        h = b.make(b.pick(("{0}.tanh()", "{0}.sin()", "{0} * {0}")), h, prefix="y")
        made.append(h)
    return h, made


def draws_on_threads(b: Builder, aim: Aim) -> Iterator[None]:
    """Threads draw from a generator while backward asks for values that were made with it."""
    own = b.prepared("torch.Generator().manual_seed(SEED + 1)", "g") if b.chance(0.25) else None
    draw = b.pick(DRAWS).replace("{g}", "{0}" if own else "None")
    count = b.pick((60, 150, 400))
    reseed = own is None and b.chance(0.1)
    leaf = leaf_for(b, aim)
    yield
    with making_steps(b, aim):
        h, made = _victims(b, leaf, own)
        if b.chance(0.2) and not own:
            yield from _three_backwards(b, aim, leaf, h, made)
            return
        loss = b.make("({0} * 0.01).sum()", h, prefix="l")
        if aim.phase is not Phase.FORWARD:
            yield

        def strike() -> None:
            drawn = b.fresh("d")
            with b.thread(attack=b.moment(aim.fault, *made)) as job:
                body = f"{{o}} = [{draw} for _ in range({count})]"
                if reseed:
                    body = "torch.manual_seed(step)\n" + body
                b.emit(Kind.MAKE, body, *((own,) if own else ()), out=(drawn,))
            b.call("{0}.begun.wait()", job)
            b.call("{0}.backward()", loss)
            b.call("{0}.wait()", job)
            b.call("note('drawn', {0})", drawn)
            b.call("sys.setswitchinterval(0.005)")

        with b.into(aim.phase):
            b.call(f"sys.setswitchinterval({b.pick(('1e-6', '1e-5', '1e-4'))})")
            strike()
    yield


def _three_backwards(b: Builder, aim: Aim, leaf: str, h: str, made: list[str]) -> Iterator[None]:
    """Three backwards on three threads, which draw nothing."""
    losses = [(b.make("({0} * 0.01).sum()", h, prefix="l"), leaf)]
    for _ in range(2):
        other = b.side_leaf()
        end, more = _victims(b, other, None)
        made += more
        losses.append((b.make("({0} * 0.01).sum()", end, prefix="l"), other))
    with b.into(aim.phase):
        b.call("sys.setswitchinterval(1e-5)")
        jobs = []
        for loss, source in losses:
            # Each takes gradients of its own, since adding them up in `.grad` has no certain order.
            g = b.fresh("g")
            with b.thread(attack=b.moment(aim.fault, *made)) as job:
                b.emit(
                    Kind.MAKE,
                    "{o} = torch.autograd.grad({0}, {1})[0]",
                    loss,
                    source,
                    out=(g,),
                )
            jobs.append((job, g))
        for job, _ in jobs:
            b.call("{0}.wait()", job)
        for _, g in jobs:
            b.call("note('gradient', {0})", g)
        b.call("sys.setswitchinterval(0.005)")
    yield


CONV = "F.conv2d({0}, {1}, padding=1)"


def fresh_thread(b: Builder, aim: Aim) -> Iterator[None]:
    """Backward of convolutions on a thread that torch has not seen before, and that nobody may tell a thread count."""
    yield
    # No optimizer has it, so that its graph outlives a step.
    channels, batch = b.pick(((4, 8), (4, 2), (8, 8)))
    key, shape = f"thread conv {channels}", f"{channels}, {channels}, 3, 3"
    w = b.once(key, f"torch.randn({shape}).mul_(0.1).requires_grad_()", "s")
    with making_steps(b, aim):
        size = batch * channels * 256
        x = b.make(f"torch.linspace(-1, 1, {size}).view({batch}, {channels}, 16, 16)", prefix="x")
        two = b.chance(0.5)  # as many as the thread has that will run backward
        if two:
            b.call("torch.set_num_threads(2)")
        y = b.make(CONV, x, w, prefix="y")
        y = b.make("{0}.tanh()", y, prefix="y")
        y = b.make(CONV, y, w, prefix="y")
        loss = b.make("{0}.square().mean()", y, prefix="l")
        if two:
            b.call("torch.set_num_threads(1)")

        def strike() -> None:
            told = b.fresh("n")
            with b.thread(attack=b.moment(aim.fault, x, y)) as job:
                b.call("{0}.backward()", loss)
                b.emit(Kind.MAKE, "{o} = openmp_threads()", out=(told,))
            b.call("{0}.wait()", job)
            b.call("note('OpenMP threads', {0})", told)

        if aim.phase is Phase.FORWARD:
            yield
        with b.into(aim.phase):
            strike()
    yield


ATTACKS: dict[Fault, Attacker] = {
    Fault.DRAWS_ON_THREADS: draws_on_threads,
    Fault.FRESH_THREAD: fresh_thread,
}
