"""Storages that give their memory back and take other memory: sharded weights, offload by hand, tensors re-pointed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import delta_runtime as delta
from tests.faults.collective_programs import process_group
from tests.faults.harness import (
    N,
    Step,
    boundary,
    by_dropping,
    check,
    constant,
    in_every_way,
    leaf,
    sources,
    taken,
)
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import managed

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]

STEPS = 5

Refill = Callable[[Tensor, Tensor], None]


def by_copy(t: Tensor, content: Tensor) -> None:
    with torch.no_grad():
        t.copy_(content)


def by_copy_of_the_same_version(t: Tensor, content: Tensor) -> None:
    """As FSDP does it, so that autograd sees no change."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(t):
        t.copy_(content)


def by_data(t: Tensor, content: Tensor) -> None:
    t.data.copy_(content)


def by_pointer(t: Tensor, content: Tensor) -> None:
    ctypes.memmove(t.data_ptr(), content.data_ptr(), content.untyped_storage().nbytes())


def by_parts(t: Tensor, content: Tensor) -> None:
    with torch.no_grad():
        for rows, new in zip(t.split(N // 4), content.split(N // 4), strict=True):
            rows.copy_(new)


def by_storage(t: Tensor, content: Tensor) -> None:
    t.untyped_storage().copy_(content.untyped_storage())


REFILLS = [by_copy, by_copy_of_the_same_version, by_data, by_pointer, by_parts, by_storage]
by_every_refill = pytest.mark.parametrize("refill", REFILLS, ids=lambda f: f.__name__)


def let_go(t: Tensor) -> Tensor:
    """Takes the memory away, and returns what was in it."""
    content = t.detach().clone()
    t.untyped_storage().resize_(0)
    return content


def taken_again(t: Tensor, content: Tensor, refill: Refill) -> None:
    blocks = [torch.full(t.shape, 7.0) for _ in range(4)]
    t.untyped_storage().resize_(content.untyped_storage().nbytes())
    del blocks
    refill(t, content)


@by_every_refill
@in_every_way
def test_a_source_that_goes_between_forward_and_backward(mode: str, refill: Refill) -> None:
    """When backward begins it is what it was in forward, at another address perhaps."""

    def program() -> Step:
        w, tables = leaf(N, N), sources(STEPS, N, N)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            table = tables[k]

            def forward() -> Tensor:
                y = (w * (table * 1.5).exp()).tanh()
                boundary()
                return (y * y).mean()

            loss = forward()
            content = let_go(table)
            taken_again(table, content, refill)
            loss.backward()
            return [loss.detach(), table, *taken(w)]

        return step

    check(program, mode, steps=STEPS, may_be_loud=True)


@by_every_refill
@by_dropping
def test_a_source_that_goes_within_forward(mode: str, refill: Refill) -> None:
    """Two layers share it, and it is away between them, and away again until backward needs it."""

    def program() -> Step:
        w, weights = leaf(N, N), sources(STEPS, N, N)  # what is compared once cannot be resized

        def step(k: int) -> list[Tensor]:
            w.grad = None
            weight = weights[k]

            def forward() -> tuple[Tensor, Tensor]:
                y = w * (weight * 1.5).exp()
                boundary()
                content = let_go(weight)
                z = y.sin()
                taken_again(weight, content, refill)
                z = z * (w * (weight * 0.5).cos())
                return z.mean(), let_go(weight)

            loss, content = forward()
            taken_again(weight, content, refill)
            loss.backward()
            return [loss.detach(), weight, *taken(w)]

        return step

    check(program, mode, steps=STEPS, may_be_loud=True)


@by_every_refill
@by_dropping
def test_a_value_that_goes_and_comes_back_as_another(mode: str, refill: Refill) -> None:
    """Made by forward itself. Where ordinary ops refill it, nothing is hidden."""

    def program() -> Step:
        w, x, others = leaf(N, N), constant(N, N), sources(STEPS, N, N)

        def step(k: int) -> list[Tensor]:
            w.grad = None

            def forward() -> Tensor:
                with torch.no_grad():
                    m = x * (1.0 + k)
                y = w * m.exp()
                boundary()
                let_go(m)
                taken_again(m, others[k], refill)
                y = y * (w * (m * 0.5).cos())
                del m
                return y.mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=STEPS, may_be_loud=refill is by_pointer)


@by_dropping
def test_a_flat_buffer_that_all_layers_take_turns_in(mode: str) -> None:
    """Sharded training by hand: one buffer, gathered for each layer in forward, and again in backward."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h: Tensor, shard: Tensor, buffer: Tensor) -> Tensor:
            with torch.no_grad():
                buffer.untyped_storage().resize_(shard.untyped_storage().nbytes())
                buffer.copy_(shard)
                out = h @ buffer
                ctx.save_for_backward(h)
                ctx.shard, ctx.buffer = shard, buffer
                buffer.untyped_storage().resize_(0)
            return out

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            (h,) = ctx.saved_tensors
            ctx.buffer.untyped_storage().resize_(ctx.shard.untyped_storage().nbytes())
            ctx.buffer.copy_(ctx.shard)
            result = grad @ ctx.buffer.t()
            ctx.buffer.untyped_storage().resize_(0)
            return result, h.t() @ grad, None

    def program() -> Step:
        shards = [leaf(N, N, seed=i) for i in range(4)]
        buffer = torch.empty(N, N)
        x = constant(N, N)

        def step(k: int) -> list[Tensor]:
            for shard in shards:
                shard.grad = None

            def forward() -> Tensor:
                h = x * (1.0 + k)
                for shard in shards:
                    h = Layer.apply(h, shard, buffer).tanh()
                return (h * h).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(*shards)]

        return step

    check(program, mode, steps=9, may_be_loud=True)


@pytest.mark.parametrize("how", ["grown", "data_and_back", "set_and_back", "swapped_twice"])
@by_dropping
def test_a_source_that_is_pointed_elsewhere_and_back(mode: str, how: str) -> None:
    """Content and tensor are in the end what they were; only the memory is another, or was for a while."""

    def program() -> Step:
        w, tables = leaf(N, N), sources(STEPS, N, N)
        other = constant(N, N, seed=9)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            table = tables[k]

            def forward() -> Tensor:
                y = (w * (table * 1.5).exp()).tanh()
                boundary()
                return (y * y).mean()

            loss = forward()
            if how == "grown":
                table.untyped_storage().resize_(2 * table.untyped_storage().nbytes())
            elif how == "data_and_back":
                before = table.data
                table.data = other
                boundary()
                table.data = before
            elif how == "set_and_back":
                before = table.detach()
                table.set_(other)
                boundary()
                table.set_(before)
            else:
                for _ in range(2):
                    torch.utils.swap_tensors(table, other)
                    boundary()
            loss.backward()
            return [loss.detach(), table, *taken(w)]

        return step

    check(program, mode, steps=STEPS, may_be_loud=True)


@pytest.mark.parametrize("how", ["data", "swap_tensors"])
@by_dropping
def test_a_source_that_is_another_one_in_the_next_use(mode: str, how: str) -> None:
    """Within one forward: the recipes of the first use read what the tensor was, those of the second what it is."""

    def program() -> Step:
        w, tables, others = leaf(N, N), sources(3, N, N), sources(6, N, N)[3:]

        def step(k: int) -> list[Tensor]:
            table, other = tables[k], others[k]

            def forward() -> Tensor:
                y = w * (table * 1.5).exp()
                boundary()
                if how == "data":
                    table.data = other.clone()
                else:
                    torch.utils.swap_tensors(table, other)
                return (y * (w * (table * 1.5).exp())).tanh().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@pytest.mark.parametrize("mode", ["drop_all", "random", "budget"])
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_sharded_weights_of_torch_itself(sharding: str, mode: str) -> None:
    """Gathered for a layer's forward, let go of, gathered again for its backward; losses and gradients as without."""
    with process_group(0, 1, dist.HashStore()):

        def program() -> Step:
            torch.manual_seed(3)
            model = nn.Sequential(
                *(nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
            )
            sharded: nn.Module = model
            if sharding == "fsdp1":
                from torch.distributed.fsdp import FullyShardedDataParallel
                from torch.distributed.fsdp.wrap import ModuleWrapPolicy

                sharded = FullyShardedDataParallel(
                    model,
                    auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
                    use_orig_params=True,
                    device_id=torch.device("cpu"),
                )
            else:
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard

                mesh = init_device_mesh("cpu", (1,))
                for layer in model:
                    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
                fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

            def step(k: int) -> list[Tensor]:
                optimizer.zero_grad()
                loss = (sharded(constant(N, N, seed=k)) * 3.0).square().mean()
                loss.backward()
                gradients = [p.grad for p in sharded.parameters()]
                plain = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
                plain = [g.clone() for g in plain]
                optimizer.step()
                return [loss.detach(), *plain]

            return step

        check(program, mode, steps=4)


def of_data(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """An input without a gradient: autograd holds the tensor, and finds what it is then."""
    return x, x * w


def of_parameter(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return w, (x * 1.5) @ w


def of_result(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The node of the op that made it holds its memory."""
    y = (x * w).exp()
    return y, y * 1.0


def of_intermediate(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The node of the op that reads it holds the tensor."""
    y = (x * w) * 1.0
    return y, y.sin()


def test_a_tensor_that_is_pointed_elsewhere_lives_as_long_as_backward_needs_it() -> None:
    """Autograd alone would hold it, and find its new memory; the program does not."""
    w, x = leaf(N, N), constant(N, N)
    with managed("drop_all"):
        for _ in range(3):
            w.grad = None
            table = x.clone()
            loss = (table * w).sum()
            table.data = x * 0.5
            gone = weakref.ref(table)
            del table
            loss.backward()
            assert torch.equal(w.grad, x * 0.5)
            del loss
            boundary()
        (w * 1.0).sum().backward()
        boundary()
        assert gone() is None, "it is held for ever"


@pytest.mark.parametrize("use", [of_data, of_parameter, of_result, of_intermediate])
@in_every_way
def test_a_saved_tensor_that_is_pointed_elsewhere_before_backward(
    mode: str, use: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    def program() -> Step:
        w = leaf(N, N)
        contents = [constant(N, N, seed=seed) for seed in range(STEPS)]

        def step(k: int) -> list[Tensor]:
            x = contents[k].clone()
            saved, y = use(w, x)
            loss = (y.tanh() * y.sin()).sum()
            boundary()
            points = k != STEPS - 1  # the last step is past an error
            before = saved.data
            if points:
                saved.data = before * 0.5
            loss.backward()
            saved.data = before
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=STEPS, may_be_loud=use is of_intermediate)


def to_other_half(t: Tensor) -> Tensor:
    return t.as_strided(t.shape, t.stride(), t.numel())


def to_transposed(t: Tensor) -> Tensor:
    return t.t()


@pytest.mark.parametrize("other", [to_other_half, to_transposed], ids=lambda f: f.__name__)
@in_every_way
def test_a_saved_tensor_that_is_pointed_to_another_part_of_its_memory(
    mode: str, other: Callable[[Tensor], Tensor]
) -> None:
    """As flat buffers of parameters do; its storage stays the same."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            flat = constant(2 * N, N, seed=k)
            x = flat[:N]
            loss = ((x * w).tanh() * w.sin()).sum()
            boundary()
            x.data = other(x.data)
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


def detached_after_it_was_saved(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * w).exp()
    loss = (y * 1.0).sum()
    y.detach_()
    return y, loss


class _SavesWhatItMade(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override, no-untyped-def]
        with torch.enable_grad():
            h = (table.requires_grad_() * 1.0).clone()
        ctx.save_for_backward(h)
        ctx.made = h
        return x * 2.0

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        (h,) = ctx.saved_tensors
        return grad * h.detach(), None


def saved_by_another_node_than_its_own(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = _SavesWhatItMade.apply(w * 1.0, x)
    return y.grad_fn.made, y.sum()


@pytest.mark.parametrize(
    "use",
    [detached_after_it_was_saved, saved_by_another_node_than_its_own],
    ids=lambda f: f.__name__,
)
@in_every_way
def test_a_tensor_of_which_nobody_knows_what_autograd_holds(
    mode: str, use: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            saved, loss = use(w, constant(N, N, seed=k))
            loss = loss + (w * 1.5).exp().sin().sum()
            boundary()
            if k < STEPS - 1:
                saved.data = saved.data * 0.5
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=STEPS, may_be_loud=True)


def test_saved_memory_that_grew_is_counted_as_it_is() -> None:
    """What was managed is less by as much when it goes as it had become."""
    w = torch.ones(N, N, requires_grad=True)
    with delta.Runtime("100%", device="cpu", min_bytes=0) as runtime:
        x = w * 2
        loss = (x.sin() * w).sum()
        storage = x.untyped_storage()
        storage.resize_(0)
        storage.resize_(8 * N * N)
        with torch.no_grad():
            x.fill_(1.0)
        with contextlib.suppress(RuntimeError):
            loss.backward()
        del loss, storage, x
        gc.collect()
        assert runtime.session.levels().managed_resident_bytes == 0
    runtime.close()
