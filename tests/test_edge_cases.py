"""Hand-made cases of what programs do between forward and backward, each against an ordinary run.

Most cases compare bits under two modes: everything dropped, and a seeded random choice dropped at random op boundaries.
Where an ordinary run raises, the runtime must raise; where it cannot know the right answer it must raise rather than
give a wrong gradient. op_db and the zoo cover the ops themselves; here are writes, versions, hooks, threads, errors.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.support.bitwise import Snapshot, assert_same_bits, freeze, freeze_all, random_state
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import live_bytes, managed

Body = Callable[[], Any]
MANAGED_MODES = ("drop_all", "random")


def leaf(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).requires_grad_()


def constant(*sizes: int, seed: int = 100) -> Tensor:
    return leaf(*sizes, seed=seed).detach()


def boundary() -> None:
    """An op, before which something can be evicted."""
    torch.zeros(1).add(1.0)


def run(body: Body, mode: str, seed: int = 0) -> tuple[Snapshot, int]:
    """Returns what `body` returned and the random state after it, and how many values were rebuilt."""
    torch.manual_seed(42)
    with managed(mode, seed=seed) as probe:
        result = body()
    tensors = [result] if isinstance(result, Tensor) else list(result)
    return freeze_all("result", tensors) | random_state(), probe.rebuilt


def check(body: Body, *, rebuilds: bool = True, modes: tuple[str, ...] = MANAGED_MODES) -> None:
    """Asserts that `body` gives the ordinary bits under every mode, and that dropping everything really rebuilt."""
    expected, _ = run(body, "ordinary")
    for mode in modes:
        for seed in (1, 2, 3) if mode == "random" else (0,):
            actual, rebuilt = run(body, mode, seed)
            assert_same_bits(actual, expected, f"{mode}, seed {seed}")
            if mode == "drop_all" and rebuilds:
                assert rebuilt > 0, "nothing was rebuilt, so nothing was tested"


def check_same_or_error(body: Body) -> None:
    """Asserts that `body` gives the ordinary bits or a RuntimeError that says why: never other bits."""
    expected, _ = run(body, "ordinary")
    for mode in MANAGED_MODES:
        complaint = ""
        try:
            actual, _ = run(body, mode, 1)
        except RuntimeError as error:
            complaint = str(error)
        if complaint:
            assert "delta_runtime" in complaint
        else:
            assert_same_bits(actual, expected, mode)


def check_raises(body: Body, match: str) -> None:
    """Asserts that `body` raises a RuntimeError with `match` ordinarily and under every mode."""
    for mode in ("ordinary", *MANAGED_MODES):
        with pytest.raises(RuntimeError, match=match):
            run(body, mode, 1)


# ---------------------------------------------------------------------------- writes to what recipes need


def test_source_overwritten_inside_the_region() -> None:
    def body() -> Tensor:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            y = (w * (table * 2.0)).sum()
            boundary()
            table.zero_()
            return y

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_source_overwritten_through_a_view_and_through_its_base() -> None:
    def body() -> list[Tensor]:
        w, table = leaf(32), constant(64)
        view = table[32:]

        def forward() -> Tensor:
            y = (w * view.exp()).sum()
            boundary()
            table.mul_(3.0)
            z = (w * view.exp()).sum()
            boundary()
            view.add_(1.0)
            return y + z

        return [*torch.autograd.grad(forward(), w), table]

    check(body)


def test_copy_on_write_storages() -> None:
    def body() -> list[Tensor]:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            lazy = torch._lazy_clone(table)
            y = (w * (lazy * 2.0)).sum()
            boundary()
            table.mul_(2.0)  # takes the two apart
            z = (w * (lazy + table)).sum()
            boundary()
            lazy.zero_()
            return y + z

        return [*torch.autograd.grad(forward(), w), table]

    check(body)


def test_copy_on_write_of_a_recorded_value() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            with torch.no_grad():
                value = w.exp()
                lazy = torch._lazy_clone(value)
                lazy.mul_(2.0)
            return (w * value).sum() + (w * lazy).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_values_between_writes() -> None:
    """Several versions of one storage are needed, each by another saved tensor."""

    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            total = torch.zeros(())
            state = torch.zeros(64)
            for k in range(5):
                state.add_(w.detach() * k)
                total = total + (w * state.sin()).sum()
            return total

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_partial_writes() -> None:
    def body() -> Tensor:
        w = leaf(4, 16)

        def forward() -> Tensor:
            grid = torch.zeros(6, 16)
            grid[1:5].copy_(w.detach())
            grid[0] = grid[1] * 2
            grid[5].fill_(0.5)
            grid[::2].mul_(1.5)
            return (w * grid.exp()[1:5]).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_differentiable_writes_into_views() -> None:
    def body() -> Tensor:
        w = leaf(4, 16)

        def forward() -> Tensor:
            grid = torch.zeros(4, 16)
            grid[:2] = w[:2].exp()
            grid[2:] = w[2:].tanh()
            grid = grid.clone()
            grid[1].mul_(w[0])
            return (grid * grid).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_source_overwritten_after_the_region_is_an_error_or_right() -> None:
    """Without the runtime the saved result is still there; a recipe must not be run on the new weights."""
    w = leaf(64)

    def forward() -> Tensor:
        loss = ((w * 2.0).exp().sin()).sum()
        boundary()
        return loss

    (expected,) = torch.autograd.grad(forward(), w)
    for mode in MANAGED_MODES:
        with managed(mode, seed=1):
            loss = forward()
        before = w.detach().clone()
        with torch.no_grad():
            w.add_(1.0)
        complaint = ""
        try:
            (actual,) = torch.autograd.grad(loss, w)
        except RuntimeError as error:
            complaint = str(error)
        if complaint:
            assert "delta_runtime" in complaint and "in place" in complaint
        else:
            assert_same_bits({"w": freeze(actual)}, {"w": freeze(expected)}, mode)
        with torch.no_grad():
            w.copy_(before)


def test_source_overwritten_after_forward_inside_the_region() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            return ((w * 2.0).exp().sin()).sum()

        loss = forward()
        boundary()
        with torch.no_grad():
            w.add_(1.0)
        return torch.autograd.grad(loss, w)[0]

    check_same_or_error(body)


def test_optimizer_step_before_a_second_backward() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)
        optimizer = torch.optim.SGD([w], lr=0.1)

        def forward() -> Tensor:
            return ((w * 2.0).exp().sin()).sum()

        loss = forward()
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()
        return [w, w.grad]

    check_same_or_error(body)


def test_data_of_a_source_swapped() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            return (w * 2.0).exp().sum()

        loss = forward()
        boundary()
        w.data = torch.zeros(64)
        return torch.autograd.grad(loss, w)[0]

    check_same_or_error(body)


@pytest.mark.parametrize("what", ["source", "value"])
def test_writes_through_data(what: str) -> None:
    """`.data` has a version counter of its own: autograd does not notice, so the bits must be the ordinary ones."""

    def body() -> Tensor:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            value = table * 2.0
            loss = (w * value).sum() + (w * table).sum()
            boundary()
            (table if what == "source" else value).data.mul_(3.0)
            return loss

        return torch.autograd.grad(forward(), w)[0]

    check_same_or_error(body)


def test_storage_of_a_source_resized_to_nothing() -> None:
    def body() -> Tensor:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            return (w * table.exp()).sum()

        loss = forward()
        boundary()
        table.untyped_storage().resize_(0)
        return torch.autograd.grad(loss, w)[0]

    check_same_or_error(body)


def test_foreign_write_that_was_announced() -> None:
    import delta_runtime as delta

    def body() -> Tensor:
        w = leaf(64, 64)

        def forward() -> Tensor:
            buffer = torch.zeros(64)
            buffer.add_(1.0)
            buffer.numpy()[:] = 5.0
            delta.mark_written(buffer)
            return (w * buffer).sum() + (w * buffer.exp()).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_foreign_write_into_a_source_after_use_that_was_announced() -> None:
    import delta_runtime as delta

    def body() -> Tensor:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            y = (w * table.exp()).sum()
            boundary()
            table.numpy()[:] = 5.0
            delta.mark_written(table)
            return y

        return torch.autograd.grad(forward(), w)[0]

    check_same_or_error(body)


# ------------------------------------------------------------- changed between forward and backward: an error


def _saved_result() -> Tensor:
    w = leaf(64)
    z = torch.exp(w * 1.0)
    loss = z.sum()
    z.mul_(2.0)
    return torch.autograd.grad(loss, w)[0]


def _saved_operand() -> Tensor:
    w = leaf(64)
    z = w * 2.0
    loss = (z * z).sum()
    z.add_(1.0)
    return torch.autograd.grad(loss, w)[0]


def _saved_view_through_its_base() -> Tensor:
    w = leaf(4, 16)
    z = w * 2.0
    loss = z[1].sin().sum()
    z.add_(1.0)
    return torch.autograd.grad(loss, w)[0]


def _saved_base_through_a_detached_alias() -> Tensor:
    w = leaf(64)
    z = torch.exp(w * 1.0)
    loss = z.sum()
    z.detach().zero_()
    return torch.autograd.grad(loss, w)[0]


def _saved_parameter() -> Tensor:
    w, x = leaf(8, 8), leaf(8, 8, seed=1)
    loss = (x @ w).sum()
    with torch.no_grad():
        w.add_(1.0)
    return torch.autograd.grad(loss, x)[0]


def _saved_parameter_by_an_optimizer() -> Tensor:
    linear = nn.Linear(8, 8)
    x = leaf(4, 8)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    linear(x).sum().backward()
    loss = linear(x).sum()
    optimizer.step()
    loss.backward()
    return x.grad


@pytest.mark.parametrize(
    "body",
    [
        _saved_result,
        _saved_operand,
        _saved_view_through_its_base,
        _saved_base_through_a_detached_alias,
        _saved_parameter,
        _saved_parameter_by_an_optimizer,
    ],
    ids=lambda body: body.__name__.strip("_"),
)
def test_changed_in_place_after_saving_raises_as_autograd_does(body: Body) -> None:
    check_raises(body, "modified by an inplace operation")


def test_the_error_of_a_change_in_place_is_ours_too() -> None:
    import delta_runtime as delta

    with pytest.raises(delta.InplaceModification):
        run(_saved_result, "drop_all")


def test_backward_twice_raises() -> None:
    def body() -> Tensor:
        w = leaf(64)
        loss = (w * 2.0).exp().sum()
        loss.backward()
        loss.backward()
        return w.grad

    check_raises(body, "second time")


# ------------------------------------------------------------------------------------- geometry of what is saved


def test_expanded_strided_and_reinterpreted_views() -> None:
    def body() -> Tensor:
        w = leaf(6)

        def forward() -> Tensor:
            a = (w * 1.0).exp()
            expanded = a.expand(5, 6)
            overlapping = a.as_strided((3, 4), (1, 1))
            bits = a.detach().view(torch.int32).bitwise_and(1).float()
            return (
                (expanded * expanded).sum() + (overlapping * overlapping).sum() + (a * bits).sum()
            )

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_offsets_transposes_and_negative_bits() -> None:
    def body() -> list[Tensor]:
        w = torch.randn(6, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
        w.requires_grad_()

        def forward() -> Tensor:
            a = w * 2.0
            b = a.conj().t()[1:, ::2] @ a[::2]
            c = a.conj().imag * a.real
            return b.abs().sum() + c.sum()

        return list(torch.autograd.grad(forward(), w))

    check(body)


def test_memory_formats() -> None:
    def body() -> list[Tensor]:
        conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        x = constant(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)

        def forward() -> Tensor:
            return conv(F.gelu(x * 1.5)).sigmoid().sum()

        gradients = torch.autograd.grad(forward(), list(conv.parameters()))
        assert gradients[0].is_contiguous(memory_format=torch.channels_last)
        return list(gradients)

    check(body)


def test_one_storage_saved_many_times() -> None:
    def body() -> Tensor:
        w = leaf(8, 8)

        def forward() -> Tensor:
            a = w * 2.0
            return (a * a + a.t() * a + a[:4].repeat(2, 1) * a.view(64).view(8, 8)).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_set_and_resize() -> None:
    def body() -> Tensor:
        w = leaf(4)

        def forward() -> Tensor:
            a, b = torch.ones(4), torch.full((4,), 7.0)
            a.set_(b)
            c = a * 2
            r = torch.ones(2)
            r.resize_(4).fill_(3.0)
            d = torch.empty(0)
            torch.add(b, c, out=d)
            return (w * c * r * d).sin().sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_results_written_to_out_arguments() -> None:
    def body() -> Tensor:
        w = leaf(8, 8)

        def forward() -> Tensor:
            buffer = torch.zeros(4, 8, 8)
            with torch.no_grad():
                torch.mul(w, 2.0, out=buffer[1])
                torch.matmul(w, buffer[1], out=buffer[2])
                values, indices = torch.empty(8), torch.empty(8, dtype=torch.int64)
                torch.max(buffer[2], 1, out=(values, indices))
            return (w * buffer[2]).sum() + (w.gather(1, indices[:, None]) * values[:, None]).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_an_op_that_throws_in_place() -> None:
    def body() -> Tensor:
        w = leaf(6)

        def forward() -> Tensor:
            a = torch.ones(3)
            with contextlib.suppress(RuntimeError):
                a.add_(torch.ones(4))
            return (w * a.repeat(2)).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_lists_of_tensors() -> None:
    def body() -> list[Tensor]:
        parameters = [leaf(16, seed=k) for k in range(3)]

        def forward() -> Tensor:
            with torch.no_grad():
                copies = [p * 1 for p in parameters]
                r = list(torch._foreach_exp(copies))
                torch._foreach_mul_(r, 2.0)
                s = torch._foreach_mul(r, copies)
                torch._foreach_add_(r, s, alpha=0.5)
            joined = torch.stack(r).unbind()
            return sum((p * a * b).sum() for p, a, b in zip(parameters, joined, s, strict=True))

        return list(torch.autograd.grad(forward(), parameters))

    check(body)


def test_split_chunk_and_other_outputs_that_share() -> None:
    def body() -> Tensor:
        w = leaf(12, 4)

        def forward() -> Tensor:
            q, k, v = (w * 3.0).chunk(3)
            s = torch.unsafe_split(q.exp(), 2)
            values, indices = (k * 2).topk(2)
            return (q @ k.t() @ v).sum() + (s[0] * s[1]).sum() + (values * indices).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_wrapped_numbers() -> None:
    def body() -> list[Tensor]:
        w = leaf(16)
        half = torch.randn(16, dtype=torch.bfloat16).requires_grad_()

        def forward() -> Tensor:
            counts = torch.arange(16)
            a = w * (counts * 0.5)
            b = (1 - w).pow(2) * (counts / 3 + True)
            c = w.mean() * 0.3
            d = (half * 0.1).exp() * half
            e = torch.where(counts > 7, w, 0.25) * torch.clamp(w, min=-0.5)
            return a.sum() + b.sum() + (w * c).sum() + d.float().sum() + e.sum()

        return list(torch.autograd.grad(forward(), [w, half]))

    check(body)


def test_sparse_gradients_and_operands() -> None:
    def body() -> list[Tensor]:
        embedding = nn.Embedding(10, 4, sparse=True)
        matrix = torch.eye(4).to_sparse()

        def forward() -> Tensor:
            x = embedding(torch.tensor([1, 3, 3, 7])) * 2.0
            return torch.sparse.mm(matrix, x).exp().sum()

        forward().backward()
        assert embedding.weight.grad.is_sparse
        return [embedding.weight.grad.coalesce().to_dense()]

    check(body)


# -------------------------------------------------------------------------------------------------- random numbers


def test_random_ops_of_every_kind() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)
        own = torch.Generator().manual_seed(9)

        def forward() -> Tensor:
            x = F.dropout(w * 2.0, 0.3) * torch.rand(64)
            y = torch.empty(64).normal_(generator=own)
            y.bernoulli_(0.5, generator=own)
            z = F.rrelu(w * 1.5, training=True) + torch.randn_like(w) * w
            order = torch.randperm(64)
            picked = torch.multinomial(torch.ones(64), 8)
            noisy = torch.zeros(64).uniform_(-1, 1).exponential_()
            return (x * y + z[order] * noisy).sin().sum() + w[picked].exp().sum()

        return [*torch.autograd.grad(forward(), w), own.get_state()]

    check(body)


def test_seeds_set_inside() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            torch.manual_seed(7)
            a = F.dropout(w * 2.0, 0.5).exp()
            with torch.random.fork_rng():
                torch.manual_seed(8)
                b = F.dropout(w * 3.0, 0.5).exp()
            return (a * b).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_running_statistics_are_updated_once() -> None:
    def body() -> list[Tensor]:
        norms = nn.Sequential(
            nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8, momentum=None), nn.Sigmoid()
        )
        x = constant(16, 8)
        for _ in range(3):
            (norms(x * 2.0).exp() * x).sum().backward()
        return [*norms.buffers(), *(p.grad for p in norms.parameters())]

    check(body)


def test_default_dtype_and_threads_changed_before_backward() -> None:
    def body() -> Tensor:
        w = leaf(256, 64)
        x = constant(64, 256)

        def forward() -> Tensor:
            y = (x @ w).mul(0.1).softmax(-1).pow(2)
            return (y.sum(0).sqrt() * torch.linspace(0, 1, 64) * torch.full((64,), 0.3)).exp().sum()

        loss = forward()
        torch.set_default_dtype(torch.float64)
        try:
            return torch.autograd.grad(loss, w)[0]
        finally:
            torch.set_default_dtype(torch.float32)

    check(body)


def test_full_reductions_are_replayed_with_the_threads_they_had() -> None:
    """The bits of a full reduction depend on the number of threads."""

    def body() -> Tensor:
        w = leaf(512, 512)

        def forward() -> Tensor:
            return (w * (w.detach() * 1.01).norm().exp().log()).sum()

        torch.set_num_threads(2)
        loss = forward()
        torch.set_num_threads(1)
        return torch.autograd.grad(loss, w)[0]

    check(body)


# ------------------------------------------------------------------------------- the many ways to run backward


def test_retain_graph() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)

        def forward() -> Tensor:
            return F.dropout((w * 2.0).exp(), 0.5).sin().sum()

        loss = forward()
        return [torch.autograd.grad(loss, w, retain_graph=keep)[0] for keep in (True, True, False)]

    check(body)


def test_double_backward() -> None:
    def body() -> list[Tensor]:
        w = leaf(16, 8)
        x = leaf(4, 16, seed=1)

        def forward() -> Tensor:
            return torch.tanh((x * 1.5) @ w).pow(2).sum()

        (first,) = torch.autograd.grad(forward(), x, create_graph=True)
        penalty = (first.norm(dim=1) - 1).pow(2).sum()
        first = first.detach()
        second = torch.autograd.grad(penalty, [w, x], create_graph=True)
        third = torch.autograd.grad(sum(s.sin().sum() for s in second), w)
        return [first, *second, *third]

    check(body)


def test_parts_of_a_graph() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)

        def forward() -> list[Tensor]:
            trunk = (w * 2.0).exp()
            return [trunk.sin().sum(), trunk.cos().sum(), (trunk * trunk).sum()]

        a, b, c = forward()
        first = torch.autograd.grad(a, w, retain_graph=True)[0]
        del a
        second = torch.autograd.grad(b + c, w)[0]
        return [first, second]

    check(body)


def test_gradient_accumulation() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            for micro in range(3):
                model(constant(8, 16, seed=micro)).square().mean().backward()
            optimizer.step()
        return [*model.parameters(), *(p.grad for p in model.parameters())]

    check(body)


def test_several_forwards_before_their_backwards() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        losses = [model(constant(8, 16, seed=k)).square().mean() for k in range(3)]
        for loss in reversed(losses):
            loss.backward()
        return [p.grad for p in model.parameters()]

    check(body)


def test_forwards_without_backward() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        for k in range(3):
            model(constant(8, 16, seed=k)).square().mean()
        with torch.no_grad():
            model(constant(8, 16))
        with torch.inference_mode():
            model(constant(8, 16))
        model(constant(8, 16)).square().mean().backward()
        return [p.grad for p in model.parameters()]

    check(body)


def test_tensors_from_inference_mode() -> None:
    def body() -> Tensor:
        w = leaf(64)
        with torch.inference_mode():
            table = constant(64).exp()

        def forward() -> Tensor:
            return (w * 2.0).exp().add(table).tanh().sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_scaled_and_clipped_gradients() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(constant(8, 16, seed=step)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return [*losses, *model.parameters()]

    check(body)


def test_nested_autocast() -> None:
    def body() -> list[Tensor]:
        a, b = leaf(16, 16), leaf(16, 16, seed=1)

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = (a * 2.0) @ b
                with torch.autocast("cpu", enabled=False):
                    y = (x.float() @ a).softmax(-1)
                z = F.layer_norm(x @ b, [16])
            return (y * z.float()).exp().sum()

        return list(torch.autograd.grad(forward(), [a, b]))

    check(body)


# -------------------------------------------------------------------------------- together with other machinery


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


class DirtyClamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x.abs() < 1
        x.clamp_(-1, 1)
        where = mask.nonzero()
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(mask, x, x.exp())
        return x, where

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        mask, x, e = ctx.saved_tensors
        return grad * mask * x.cos() * e


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


# -------------------------------------------------------------------------------------------- errors and ends


class Interrupted(BaseException):
    """As KeyboardInterrupt: not an Exception."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interrupted])
def test_an_exception_in_forward(error: type[BaseException]) -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))

        def fail(*_: Any) -> None:
            raise error

        for step in range(3):
            x = constant(8, 16, seed=step)
            handle = model[2].register_forward_hook(fail) if step == 1 else None
            with contextlib.suppress(error):
                model(x).square().mean().backward()
            if handle is not None:
                handle.remove()
        return [p.grad for p in model.parameters()]

    check(body)


def test_an_exception_in_backward() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))

        def fail(*_: Any) -> None:
            raise ValueError

        for step in range(3):
            h = model(constant(8, 16, seed=step))
            if step == 1:
                h.register_hook(fail)
            loss = h.square().mean()
            del h
            with contextlib.suppress(ValueError):
                loss.backward()
            del loss
        return [p.grad for p in model.parameters()]

    check(body)


def test_an_exception_that_leaves_the_region() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def leave(mode: str) -> None:
        with managed(mode):
            model(constant(8, 16)).square().mean()
            raise ValueError("mine")

    for mode in MANAGED_MODES:
        with pytest.raises(ValueError, match="mine"):
            leave(mode)
    check(lambda: torch.autograd.grad(model(constant(8, 16)).square().mean(), model[0].weight)[0])


def test_backward_outside_of_the_region() -> None:
    w = leaf(64)

    def forward() -> Tensor:
        loss = F.dropout((w * 2.0).exp(), 0.5).sin().sum()
        boundary()
        return loss

    torch.manual_seed(42)
    (expected,) = torch.autograd.grad(forward(), w)
    for mode in MANAGED_MODES:
        torch.manual_seed(42)
        with managed(mode, seed=1):
            loss = forward()
        gc.collect()
        (actual,) = torch.autograd.grad(loss, w)
        assert_same_bits({"w": freeze(actual)}, {"w": freeze(expected)}, mode)


def test_a_graph_that_outlives_many_regions() -> None:
    w = leaf(64)

    def forward() -> Tensor:
        loss = (w * 2.0).exp().sin().sum()
        boundary()
        return loss

    (expected,) = torch.autograd.grad(forward(), w)
    losses = []
    for seed in range(5):
        with managed("random", seed=seed):
            losses.append(forward())
            torch.autograd.grad(forward(), w)
    for loss in losses:
        (actual,) = torch.autograd.grad(loss, w)
        assert_same_bits({"w": freeze(actual)}, {"w": freeze(expected)})


@contextlib.contextmanager
def _no_op_records_left() -> Iterator[None]:
    from delta_runtime import _C

    gc.collect()
    before = _C.live_records()
    yield
    gc.collect()
    assert _C.live_records() <= before


def test_a_deep_chain_that_is_let_go() -> None:
    """Records point at each other as deep as the program; a recursive destructor would overflow the stack."""
    with _no_op_records_left(), managed("drop_all"):
        y = leaf(4)
        for _ in range(200_000):
            y = y * 1.0001
        del y


def test_a_deep_chain_that_is_rebuilt() -> None:
    w = leaf(4)

    def body() -> Tensor:
        def forward() -> Tensor:
            y = w
            for _ in range(200_000):
                y = y * 1.0001
            return (w * y).sum()

        loss = forward()
        boundary()
        return torch.autograd.grad(loss, w)[0]

    expected, _ = run(body, "ordinary")
    with _no_op_records_left():
        actual, rebuilt = run(body, "drop_all")
    assert_same_bits(actual, expected)
    assert rebuilt > 0


def test_a_deep_differentiable_chain() -> None:
    w = leaf(4)

    def body() -> Tensor:
        def forward() -> Tensor:
            y = w
            for _ in range(300):
                y = (y * 1.0001).sin()
            return y.sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


# ------------------------------------------------------------------------------------ nothing is left behind


def _chain_of_custom_functions(w: Tensor) -> None:
    h = w * 1.1
    for _ in range(2):
        h = DirtyClamp.apply(h)[0] * 1.01
    h.mean().backward()


def _values_between_writes(w: Tensor) -> None:
    with torch.no_grad():
        h = w * 1.1
        mask = (h.abs() < 1.5).float()
        other = h.clone()
        h.clamp_(-1, 1)
        other.mul_(h)
    ((w * mask).sum() + (w * h).exp().sum() + (w * other).sum()).backward()


def _forward_only(w: Tensor) -> None:
    (w * 2.0).exp().sin().sum()


def _graph_kept_and_let_go(w: Tensor) -> None:
    loss = F.dropout((w * 2.0).exp(), 0.5).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def _exception(w: Tensor) -> None:
    with contextlib.suppress(ValueError):
        h = (w * 2.0).exp().sin()
        boundary()
        raise ValueError(h.shape)


def _double_backward(w: Tensor) -> None:
    (g,) = torch.autograd.grad((w * 2.0).tanh().pow(2).sum(), w, create_graph=True)
    g.sin().sum().backward()


def _checkpoint(w: Tensor) -> None:
    h = checkpoint(lambda x: F.dropout((x * 2.0).exp(), 0.5).sin(), w * 1.0, use_reentrant=False)
    h.square().sum().backward()


@pytest.mark.parametrize(
    "step",
    [
        _chain_of_custom_functions,
        _values_between_writes,
        _forward_only,
        _graph_kept_and_let_go,
        _exception,
        _double_backward,
        _checkpoint,
    ],
    ids=lambda step: step.__name__.strip("_"),
)
@pytest.mark.parametrize("mode", MANAGED_MODES)
def test_nothing_is_left_behind(step: Callable[[Tensor], None], mode: str) -> None:
    w = leaf(1 << 14)
    block_bytes = w.numel() * w.element_size()
    live = []
    with managed(mode, seed=1):
        for _ in range(8):
            step(w)
            w.grad = None
            gc.collect()
            live.append(live_bytes())
    # A value or two may wait for the next op boundary; one more with each step is a leak.
    assert max(live[4:]) - max(live[:4]) < block_bytes, live
