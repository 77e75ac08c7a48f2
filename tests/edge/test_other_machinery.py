"""Together with other machinery of PyTorch: checkpoints, hooks, autocast, compiled code, data loaders."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.edge.harness import (
    DirtyClamp,
    boundary,
    check,
    constant,
    leaf,
)
from tests.support.fixtures import one_thread  # noqa: F401


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside(reentrant: bool) -> None:
    def body() -> list[Tensor]:
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )
        x = leaf(8, 16)

        def forward() -> Tensor:
            h = x * 2.0
            for block in blocks:
                h = checkpoint(block, h, use_reentrant=reentrant) + h.sin()
            return h.square().mean()

        forward().backward()
        return [x.grad, *(p.grad for p in blocks.parameters())]

    check(body)


def test_saving_on_cpu_inside() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            a = (w * 2.0).exp()
            with save_on_cpu():
                b = (a * a).tanh()
            return (b * a).sin().sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_other_hooks_inside_and_outside() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)
        seen = torch.zeros(1)

        def pack(t: Tensor) -> Any:
            seen.add_(1)
            return t.detach().numpy().copy()

        def forward() -> Tensor:
            a = (w * 2.0).exp()
            with saved_tensors_hooks(pack, torch.from_numpy):
                b = (a * a).tanh() * a
            return (b * a).sin().sum()

        return [*torch.autograd.grad(forward(), w), seen]

    check(body)


def test_custom_function_that_writes_its_argument() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            clamped, where = DirtyClamp.apply(w * 2.0)
            return (clamped * clamped).sum() + where.sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_hooks_on_tensors_and_modules() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
        calls = torch.zeros(4)

        def forward_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            calls[0] += 1
            return output * 1.5

        def pre_hook(module: nn.Module, args: Any) -> Any:
            calls[1] += 1
            return (args[0].sin(),)

        def backward_hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            calls[2] += 1
            return (inputs[0] * 2 if inputs[0] is not None else None,)

        model[0].register_forward_hook(forward_hook)
        model[1].register_forward_pre_hook(pre_hook)
        model[1].register_full_backward_hook(backward_hook)

        def gradient_hook(parameter: Tensor) -> None:
            calls[3] += parameter.grad.sum()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(gradient_hook)

        def forward() -> Tensor:
            h = model(constant(8, 16))
            h.register_hook(lambda g: g * 0.5 + h.detach().mean())
            return h.exp().sum()

        forward().backward()
        return [calls, *(p.grad for p in model.parameters())]

    check(body)


def test_parametrized_modules_and_shared_weights() -> None:
    def body() -> list[Tensor]:
        first = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        second = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        x = constant(8, 16)
        for _ in range(2):
            h = second(first(first(x).tanh()).tanh())
            h.square().mean().backward()
        modules = nn.ModuleList([first, second])
        return [*(p.grad for p in modules.parameters()), *modules.buffers()]

    check(body)


def test_backward_on_another_thread() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            return F.dropout((w * 2.0).exp(), 0.5).sin().sum()

        loss = forward()
        boundary()
        result: list[Tensor] = []
        thread = threading.Thread(target=lambda: result.extend(torch.autograd.grad(loss, w)))
        thread.start()
        thread.join()
        return result[0]

    check(body)


def test_forwards_on_other_threads_at_the_same_time() -> None:
    """A runtime manages its own thread; the others run as if it were not there."""

    def body() -> list[Tensor]:
        def work(k: int) -> Tensor:
            w = leaf(256, seed=k)

            def forward() -> Tensor:
                h = w
                for _ in range(20):
                    h = (h * 1.1).tanh().exp().sin()
                return h.sum()

            return torch.autograd.grad(forward(), w)[0]

        results: dict[int, Tensor] = {}
        threads = [
            threading.Thread(target=lambda k=k: results.update({k: work(k)})) for k in range(3)
        ]
        for thread in threads:
            thread.start()
        mine = work(9)
        for thread in threads:
            thread.join()
        return [mine, *(results[k] for k in range(3))]

    check(body)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(context: str) -> None:
    def body() -> list[Tensor]:
        data = TensorDataset(constant(24, 16), torch.arange(24))
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        loader = DataLoader(
            data, batch_size=8, shuffle=True, num_workers=1, multiprocessing_context=context
        )
        for x, y in loader:
            F.cross_entropy(model(x), y % 4).backward()
        return [p.grad for p in model.parameters()]

    check(body, modes=("drop_all",))


def test_function_transforms() -> None:
    """torch.func refuses saved-tensor hooks: a runtime that is on must stand down for it."""

    def body() -> list[Tensor]:
        x = constant(8)
        w = leaf(8)

        def f(v: Tensor) -> Tensor:
            return (v.sin() * v).sum()

        before = torch.func.grad(f)(x)
        jacobian = torch.func.jacrev(lambda v: v.sin() * v)(x)
        batched = torch.vmap(torch.func.grad(f))(constant(3, 8))
        inside = torch.autograd.grad((w * 2.0).exp().sum(), w)[0]
        return [before, jacobian, batched, inside]

    check(body, rebuilds=False)


def test_vmap_and_forward_mode() -> None:
    def body() -> list[Tensor]:
        w = leaf(8)

        def forward() -> Tensor:
            return torch.vmap(lambda v: (v * w).exp())(constant(3, 8)).sin().sum()

        gradient = torch.autograd.grad(forward(), w)[0]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(constant(8), constant(8, seed=5))
            tangent = torch.autograd.forward_ad.unpack_dual((dual * 2.0).exp()).tangent
        return [gradient, tangent]

    check(body, rebuilds=False)


@pytest.mark.filterwarnings("ignore")
def test_compiled_parts() -> None:
    """What a compiled region makes is written by kernels that nobody records: it is kept, and the bits are the same."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    compiled = torch.compile(model)

    def body() -> list[Tensor]:
        x = leaf(16, 32)

        def forward() -> Tensor:
            h = compiled((x * 2.0).tanh()).exp()
            return (compiled(h.sin()) * h).square().mean()

        return list(torch.autograd.grad(forward(), [x, *model.parameters()]))

    try:
        check(body)
    finally:
        torch._dynamo.reset()
