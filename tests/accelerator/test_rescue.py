"""Steps that begin with too little memory: an op that dies of it runs again, once there is room.

The budget is twice what the device has to give: looking ahead sees no need, and memory gives out again and again.
Allocators that keep to a limit make room before an op dies: test_reserved_limit.py has them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import delta_runtime as delta
from delta_runtime.extension import _C
from tests.accelerator.conftest import Controls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("without_limit"),
]

MIB = 1 << 20


class Net(nn.Module):
    """What draws, and what writes running statistics on the side, among ops of a MiB."""

    def __init__(self, between: Callable[[], object] | None = None, **norm: Any) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(256, 256), nn.BatchNorm1d(256, **norm), nn.GELU(), nn.Dropout(0.2)
            )
            for _ in range(12)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sin()
            if self.between is not None:
                self.between()
        return x.square().mean()


def trained(
    device: torch.device, runtime: delta.Runtime | None = None, steps: int = 4, **of_net: Any
) -> dict[str, Tensor]:
    """Train for some steps; return all gradients and buffers, on the CPU."""
    torch.manual_seed(0)
    model = Net(**of_net).to(device)
    found = {}
    for index in range(steps):
        x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(index)).to(device)
        model.zero_grad(set_to_none=True)
        with runtime.step() if runtime else contextlib.nullcontext():
            model(x).backward()
        for name, parameter in model.named_parameters():
            found[f"{index} {name}"] = parameter.grad.cpu()
        for name, buffer in model.named_buffers():
            found[f"{index} {name}"] = buffer.cpu()
    return found


def swapper(device: torch.device, policy: str, peak_bytes: int) -> delta.Runtime:
    return delta.Runtime(
        2 * peak_bytes, device=str(device), policy=policy, host_budget="256MiB", min_bytes=0
    )


@pytest.fixture
def peak_bytes(device, controls) -> int:
    """Of an ordinary run: bytes that are reserved for it at the most."""
    release(controls)
    torch.accelerator.reset_peak_memory_stats()
    trained(device)
    return int(torch.accelerator.max_memory_reserved())


def release(controls: Controls) -> None:
    controls.capacity(0)
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


@contextlib.contextmanager
def capacity(controls: Controls, bytes_: int) -> Iterator[None]:
    release(controls)
    controls.capacity(bytes_)
    try:
        yield
    finally:
        release(controls)


@pytest.mark.parametrize("policy", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_what_does_not_fit_is_rescued(device, controls, peak_bytes, policy, share):
    wanted = trained(device)
    with contextlib.closing(swapper(device, policy, peak_bytes)) as runtime:
        with capacity(controls, int(share * peak_bytes)):
            got = trained(device, runtime)
        assert runtime.report().totals.rescues > 0
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []


def test_without_rescue_it_dies(device, controls, peak_bytes):
    _C.set_op_rescue_enabled(False)
    try:
        with contextlib.closing(swapper(device, "recompute", peak_bytes)) as runtime:
            with capacity(controls, peak_bytes // 2), pytest.raises(torch.OutOfMemoryError):
                trained(device, runtime)
    finally:
        _C.set_op_rescue_enabled(True)


@pytest.mark.parametrize("op", ["layer_norm", "clone"])
def test_what_cannot_be_rescued_raises_as_without_us(device, controls, peak_bytes, op):
    """`clone` asks for its memory by ops inside of it: it is not tried again for each of them."""
    with contextlib.closing(swapper(device, "recompute", peak_bytes)) as runtime:
        with capacity(controls, peak_bytes // 2), runtime.step():
            x = torch.ones(256, MIB // 256, device=device)
            x = x.expand(peak_bytes // (4 * MIB), -1, -1)
            with pytest.raises(torch.OutOfMemoryError, match="out of memory") as told:
                nn.functional.layer_norm(x, x.shape[-1:]) if op == "layer_norm" else x.clone()
            assert f"aten::{'native_' if op == 'layer_norm' else ''}{op}" in str(told.value)
            assert "ran out of memory, and again when all that may leave" in str(told.value)
            assert str(told.value).count("delta_runtime: ") == 1
            assert runtime.session.counters().rescues == 3
            assert torch.ones(4, device=device).sum().item() == 4


@pytest.mark.parametrize("in_place", [True, False])
def test_an_op_is_not_tried_again_for_what_a_part_of_it_could_not_get(device, controls, in_place):
    runs = 0

    @torch.library.custom_op(
        f"delta_test::asks_{in_place}", mutates_args=("x",) if in_place else (), device_types=None
    )
    def asks(x: Tensor, bytes_: int) -> Tensor:
        nonlocal runs
        runs += 1
        if in_place:
            x.add_(1.0)
        return torch.empty(bytes_, dtype=torch.uint8, device=x.device)

    x = torch.zeros(MIB // 4, device=device)
    with (
        contextlib.closing(swapper(device, "swap", 64 * MIB)) as runtime,
        capacity(controls, 64 * MIB),
    ):
        with runtime.step(), pytest.raises(torch.OutOfMemoryError):
            asks(x, 128 * MIB)
    assert runs == 1
    assert x.cpu().eq(1.0 if in_place else 0.0).all()


def leave_room(controls: Controls, bytes_: int) -> None:
    """From here on the device has so much more than what lives on it."""
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    controls.capacity(int(torch.accelerator.memory_reserved()) + bytes_)


def chain(device: torch.device, ops: int = 8, bytes_: int = MIB) -> Tensor:
    """Something to drop: results of ops, each of so many bytes."""
    x = torch.randn(bytes_ // 4, device=device, requires_grad=True)
    for _ in range(ops):
        x = x.sin()
    return x


@contextlib.contextmanager
def step(
    controls: Controls,
    device: torch.device,
    budget_bytes: int = 64 * MIB,
    policy: str = "recompute",
) -> Iterator[delta.Runtime]:
    release(controls)
    runtime = swapper(device, policy, budget_bytes // 2)
    try:
        with contextlib.closing(runtime), runtime.step():
            yield runtime
    finally:
        release(controls)


def pause() -> None:
    with delta.disable():
        pass


@pytest.mark.parametrize(
    "of_net",
    [
        {"track_running_stats": False},
        {"momentum": None},
        {"between": pause},
    ],
    ids=["no running statistics", "a count of batches", "paused between layers"],
)
def test_other_nets_are_rescued(device, controls, peak_bytes, of_net):
    wanted = trained(device, **of_net)
    with contextlib.closing(swapper(device, "recompute", peak_bytes)) as runtime:
        with capacity(controls, int(0.6 * peak_bytes)):
            got = trained(device, runtime, **of_net)
        assert runtime.report().totals.rescues > 0
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []


def test_what_is_read_and_overwritten_is_not_read_again(device, controls):
    if not controls.simulated:
        pytest.skip("a sort of a real device may take no memory beside its result")
    wanted, wanted_order = torch.sort(
        torch.randn(MIB // 4, generator=torch.Generator().manual_seed(0))
    )
    with step(controls, device) as runtime:
        x = torch.randn(MIB // 4, generator=torch.Generator().manual_seed(0)).to(device)
        order = torch.empty(0, dtype=torch.long, device=device)
        kept = chain(device)
        leave_room(controls, 256 << 10)
        with pytest.raises(torch.OutOfMemoryError, match="not run again"):
            torch.sort(x, out=(x, order))
        release(controls)
        kept.sum().backward()
        x = torch.randn(MIB // 4, generator=torch.Generator().manual_seed(0)).to(device)
        into = torch.empty_like(x)
        kept = chain(device)
        leave_room(controls, 256 << 10)
        torch.sort(x, out=(into, order))
        assert runtime.session.counters().rescues > 0
        assert torch.equal(into.cpu(), wanted) and torch.equal(order.cpu(), wanted_order)
        release(controls)
        kept.sum().backward()


def test_what_writes_and_draws_unseen_is_not_run_again(device, controls):
    if not controls.simulated:
        pytest.skip("needs an op of the simulated device's extension")
    with step(controls, device):
        kept, counter = chain(device), torch.zeros(4, device=device)
        leave_room(controls, 2 * MIB + (200 << 10))
        with pytest.raises(torch.OutOfMemoryError, match="fake::reticent .* not run again"):
            torch.ops.fake.reticent(kept.detach(), counter, 2 * MIB)
        release(controls)
        assert counter.tolist() == [1.0] * 4
        kept.sum().backward()


def test_a_lazy_clone_is_not_run_again(device, controls):
    """PyTorch may have counted it as no clone any more, and its memory as the tensor's own."""
    with step(controls, device):
        kept = chain(device)
        lazy = torch._lazy_clone(torch.ones(1024, 256, device=device))
        leave_room(controls, 100 << 10)
        with pytest.raises(torch.OutOfMemoryError, match="not run again"):
            nn.functional.layer_norm(lazy, (256,))
        nn.functional.layer_norm(torch.ones(1024, 64, device=device), (64,))
        release(controls)
        kept.sum().backward()


def test_the_steps_graph_is_the_same(device, controls):
    """What autograd saved for the run that failed is not counted."""

    def fingerprint(tight: bool) -> tuple[int, int, int]:
        with step(controls, device) as runtime:
            x = chain(device)
            if tight:
                leave_room(controls, 100 << 10)
            x = nn.functional.layer_norm(x.view(-1, 256), (256,)).sin()
            release(controls)
            x = x.sum()
            found = runtime.session.fingerprint(), runtime.session.packs()
            rescues = runtime.session.counters().rescues
            x.backward()
        return *found, rescues

    *ample, no_rescues = fingerprint(tight=False)
    *tight, rescues = fingerprint(tight=True)
    assert (no_rescues, ample) == (0, tight)
    assert rescues > 0


@pytest.mark.parametrize("verify", ["always", "first"])
def test_a_hash_that_finds_no_memory_does_not_wait_for_itself(device, controls, verify):
    """Hashes are taken one at a time, while room is made; they may run out of memory themselves."""
    release(controls)
    runtime = delta.Runtime(
        140 * MIB, device=str(device), policy="recompute", min_bytes=0, verify=verify
    )
    try:
        with contextlib.closing(runtime), runtime.step():
            x = chain(device, ops=3, bytes_=33 * MIB)
            leave_room(controls, 60 << 10)
            with contextlib.suppress(torch.OutOfMemoryError):
                for _ in range(3):
                    x = x.sin()
            release(controls)
            x.sum().backward()
    finally:
        release(controls)


@pytest.mark.parametrize(
    "write",
    [lambda t: t.add_(1.0), lambda t: t.zero_(), lambda t: t.__setitem__(0, 5.0)],
    ids=["add_", "zero_", "setitem"],
)
def test_there_is_room_for_a_copy_of_what_is_overwritten_behind_a_rescue(device, controls, write):
    def gradient(runtime: delta.Runtime | None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        source = torch.randn(MIB // 4, generator=generator).to(device)
        w = torch.randn(MIB // 4, generator=generator).to(device).requires_grad_()
        x = w
        for _ in range(6):
            x = (x + source).sin()
        if runtime is not None:
            leave_room(controls, 100 << 10)
        x = x.cos()
        write(source)
        release(controls)
        x.sum().backward()
        return w.grad.cpu()

    release(controls)
    wanted = gradient(None)
    with step(controls, device) as runtime:
        got = gradient(runtime)
        assert runtime.session.counters().rescues > 0
    assert torch.equal(got, wanted)


def test_what_asks_for_more_than_the_budget_leaves_the_device_as_it_was(device, controls):
    with step(controls, device) as runtime:
        kept = chain(device)
        leave_room(controls, 20 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match="more than the whole budget"):
            torch.empty(1 << 40, device=device)
        counters = runtime.session.counters()
        assert (counters.rescues, counters.drops) == (0, 0)
        kept.sum().backward()


def test_the_report_tells_of_rescues_and_of_no_shortfall(device, controls):
    with step(controls, device) as runtime:
        kept = chain(device, ops=6)
        leave_room(controls, 0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(60 * MIB, dtype=torch.uint8, device=device)
        counters = runtime.session.counters()
        assert (counters.rescues, counters.shortfalls) == (3, 0)
        release(controls)
        kept.sum().backward()


class Block(nn.Module):
    """What has a kernel of its own save, in an order that shows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.logsigmoid(self.norm(x) * self.linear(x)).sin().exp().cos()


def checkpointed(
    device: torch.device,
    runtime: delta.Runtime | None,
    behind_block: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[Tensor]:
    """The gradients of a net of which every second block is checkpointed."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(6)).to(device)
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(1)).to(device)
    with runtime.step() if runtime else contextlib.nullcontext():
        for index, block in enumerate(blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
            x = behind_block(x)
        x.square().mean().backward()
    return [p.grad.cpu() for p in blocks.parameters()]


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_checkpoints_number_what_was_saved_once(device, controls, policy):
    """They do so by hooks of their own: an op that runs twice would be counted twice."""
    release(controls)
    torch.accelerator.reset_peak_memory_stats()
    wanted = checkpointed(device, None)
    peak_bytes = int(torch.accelerator.max_memory_reserved())
    rescued = 0
    for percent in range(98, 40, -8):
        with contextlib.closing(swapper(device, policy, peak_bytes)) as runtime:
            with capacity(controls, peak_bytes * percent // 100):
                try:
                    got = checkpointed(device, runtime)
                except torch.OutOfMemoryError:
                    continue
                finally:
                    release(controls)
            assert all(torch.equal(*pair) for pair in zip(wanted, got, strict=True)), percent
            rescued += runtime.report().totals.rescues
    assert rescued > 0


def test_hooks_of_others_see_once_what_is_saved(device, controls):
    packed = []
    with step(controls, device):
        x = chain(device).view(-1, 256)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            leave_room(controls, 100 << 10)
            with contextlib.suppress(torch.OutOfMemoryError):
                nn.functional.layer_norm(x, (256,))
        in_all = len(packed)
        release(controls)
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            nn.functional.layer_norm(x, (256,))
        assert in_all <= len(packed)


def test_higher_order_ops_work_while_the_fallback_is_there(device, controls):
    class Twice(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    @torch.compile(backend="aot_eager", fullgraph=True)
    def either(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with step(controls, device):
        assert has_fallback()
        ones = torch.ones(4, device=device)
        assert torch.vmap(Twice.apply)(ones).tolist() == [2.0] * 4
        x = torch.ones(4)
        assert torch.equal(either(x), x.sin())
        assert torch.equal(torch.cond(x.sum() > 9, torch.sin, torch.cos, (x,)), x.cos())


def has_fallback() -> bool:
    """Whether this thread's ops go through the runtime's fallback."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included("TESTING_ONLY_GenericMode"))


def test_the_fallback_is_there_for_the_first_steps_only(device, controls):
    release(controls)
    found = []
    with contextlib.closing(swapper(device, "recompute", 64 * MIB)) as runtime:
        for _ in range(12):
            with runtime.step():
                chain(device).sum().backward()
                found.append(has_fallback())
                with delta.disable():
                    found[-1] = found[-1] and not has_fallback()
                found[-1] = found[-1] and has_fallback()
            assert not has_fallback()
    assert found == [True] * 8 + [False] * 4


def test_the_fallback_is_gone_when_a_hook_closes_the_runtime(device, controls):
    release(controls)
    runtime = swapper(device, "recompute", 64 * MIB)
    with contextlib.suppress(RuntimeError), runtime.step():
        x = chain(torch.device("cpu"))  # whose backward is on this thread
        x.register_hook(lambda _: runtime.close())
        x.sum().backward()
    runtime.close()
    assert not has_fallback()


def test_sizes_that_are_symbols_stay_so(device, controls):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    with step(controls, device):
        assert has_fallback()
        mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x = mode.from_tensor(torch.randn(4, 5), symbolic_context=context)
        with mode:
            assert isinstance((x * 2).shape[0], torch.SymInt)
            on_device = torch.empty_strided(x.shape, x.stride(), device=device)
            assert isinstance(on_device.sin().shape[0], torch.SymInt)
