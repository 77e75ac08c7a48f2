"""Autograd gets a session's hooks without Python, where the session's pair is on top of the thread's hooks."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.extension import _C
from tests.support.bitwise import assert_same_bits, gradients

pytestmark = pytest.mark.timeout(120)

BUDGET_BYTES = 7 << 20
NEVER_BINDS = "2GiB"
WIDTH = 256


def _net() -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(6)
    )
    return nn.Sequential(*blocks)


def _rows() -> torch.Tensor:
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, which must end well and say nothing of errors."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done


def _tickets() -> int:
    """How many tickets Python has: each object refers to its type."""
    return sys.getrefcount(_C.Ticket)


@pytest.fixture
def python_hooks() -> Iterator[None]:
    yield
    _C.use_direct_hooks(True)


@pytest.mark.usefixtures("python_hooks")
def test_python_sees_no_ticket_and_both_ways_keep_every_bit():
    cpu_pool.install()
    gc.collect()
    budget_bytes = cpu_pool.allocated_bytes() + BUDGET_BYTES  # other tests may have left something
    net, x = _net(), _rows()
    net(x).sum().backward()
    ordinary = gradients(net)
    for direct in (True, False):
        with delta.Runtime(budget_bytes, device="cpu") as runtime:
            for step in range(4):
                net.zero_grad()
                with runtime.step():
                    _C.use_direct_hooks(direct)
                    before = _tickets()
                    loss = net(x).sum()
                    made = _tickets() - before
                    loss.backward()
                assert (made == 0) == direct
                assert_same_bits(gradients(net), ordinary, f"direct={direct}, step {step}")
            assert runtime.report().totals.drops > 0


def test_hooks_above_ours_are_called_in_our_stead():
    seen = []
    x = torch.rand(4, requires_grad=True)
    with delta.Runtime(BUDGET_BYTES, device="cpu"):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: seen.append(t.shape) or t, lambda t: t
        ):
            y = x.exp()
        z = y.sin()
    assert len(seen) == 1
    z.sum().backward()
    assert x.grad is not None


def test_ours_are_called_above_others():
    def must_not(_: object) -> None:
        raise AssertionError("ours are on top")

    x = torch.rand(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(must_not, must_not):
        with delta.Runtime(BUDGET_BYTES, device="cpu"):
            x.exp().sum().backward()
    assert x.grad is not None


def test_a_backward_that_c_plus_plus_begins_is_pytorchs():
    """`aten::_backward` asks for the default engine, which must be the one that Python's backward uses."""
    net, x = _net(), _rows()
    net(x).sum().backward()
    ordinary = gradients(net)
    with delta.Runtime(NEVER_BINDS, device="cpu") as runtime:
        for _ in range(2):
            net.zero_grad()
            with runtime.step():
                torch.ops.aten._backward(net(x).sum(), list(net.parameters()))
    assert_same_bits(gradients(net), ordinary)


def test_anomalies_name_the_op_of_the_forward():
    x = torch.zeros(4, requires_grad=True)
    with delta.Runtime(BUDGET_BYTES, device="cpu"), torch.autograd.set_detect_anomaly(True):
        y = (x.sqrt() * 0).sum()
        with (
            pytest.warns(UserWarning, match="x.sqrt"),
            pytest.raises(RuntimeError, match="SqrtBackward0"),
        ):
            y.backward()


def test_errors_of_a_hook_arrive_as_python_has_them():
    x = torch.rand(2048, requires_grad=True)
    with delta.Runtime(BUDGET_BYTES, device="cpu"):
        y = x.exp()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            y.sum().backward()
    assert type(error.value) is type(_own_error(y))


def _own_error(changed: torch.Tensor) -> BaseException:
    """What Python's hooks raise."""
    session = _C.Session(device="cpu", budget_bytes=1 << 40)
    pack, unpack = session.pack_hook(), session.unpack_hook()
    ticket = pack(changed.detach())
    changed.detach().add_(1)
    with pytest.raises(RuntimeError) as error:
        unpack(ticket)
    return error.value


def test_compiled_autograd_finds_the_hook_and_the_ticket():
    from torch._dynamo import compiled_autograd

    x = torch.rand(2048, requires_grad=True)
    with delta.Runtime(NEVER_BINDS, device="cpu"):
        y = x.exp().sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_what_is_saved_at_the_end_of_the_process_does_no_harm():
    done = _run("""
        import torch, delta_runtime as delta
        x = torch.rand(4096, requires_grad=True)
        runtime = delta.Runtime("1MiB", device="cpu")
        runtime.__enter__()
        torch.saved_for_good = x.exp().sin()
        print("done")
    """)
    assert done.stdout.split() == ["done"]


def test_where_remote_calls_are_on_autograd_gets_pythons_hooks(tmp_path):
    done = _run(
        """
        import sys, torch
        import torch.distributed.rpc as rpc
        import delta_runtime as delta
        from delta_runtime.extension import _C
        x = torch.rand(4096, requires_grad=True)

        def made():
            before = sys.getrefcount(_C.Ticket)
            y = x.exp()
            return sys.getrefcount(_C.Ticket) - before

        with delta.Runtime("1MiB", device="cpu") as runtime:
            with runtime.step():
                print(made())
            options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[1])
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
            with runtime.step():
                print(made())
        with delta.Runtime("1MiB", device="cpu") as runtime:
            print(made())
        rpc.shutdown()
        with delta.Runtime("1MiB", device="cpu") as runtime:
            print(made())
        """,
        str(tmp_path / "store"),
    )
    assert done.stdout.split() == ["0", "1", "1", "0"]
