"""What programs are made of beside torch itself: modes, subclasses, autograd functions, custom ops, raw writes.

Each part stands by itself, so that a standalone script can bring along exactly those that its program uses: a part
uses nothing but the imports below, the driver's names (Job, Interrupted) and other parts. REGISTRY has them in order.

Note: what repeats
  Every part does the same when it is called in the same order with the same arguments after the same seeds, except
  where its name says that it does not; those draw from a generator that belongs to the program, so that ordinary runs
  repeat while a second call of the same op, out of order, does not.
"""

import contextlib
import ctypes
import inspect
import io
import itertools
import mmap
import random
import sys
import tempfile
import threading
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import delta_runtime as delta
from scripts.programs.driver import Job

_USED_BY_PROGRAMS = (
    contextlib,
    io,
    itertools,
    mmap,
    random,
    sys,
    tempfile,
    threading,
    dist,
    F,
    nn,
    checkpoint,
    Job,
)
REGISTRY: dict[str, object] = {}
"""Name -> part, in the order of definition."""


def _part(thing):
    REGISTRY[thing.__name__] = thing
    return thing


_OPS: dict[str, tuple[Callable[..., object], str, str]] = {}
"""Custom op -> its function, its declaration, and the line that gives it a backward."""


def source_of(name: str) -> str:
    """The source of a part, for a standalone script."""
    if name not in _OPS:
        return inspect.getsource(REGISTRY[name]).replace("@_part\n", "", 1).strip()
    function, declaration, backward = _OPS[name]
    text = inspect.getsource(function)
    return "\n".join(
        [declaration, text[text.index("def ") :].strip(), *([backward] if backward else [])]
    )


def _op(mutates=(), backward=""):
    """Declares a custom op with the function's name; `backward` is the source of a function (ctx, *gradients)."""

    def declare(function):
        name = f"stress_programs::{function.__name__}"
        op = torch.library.custom_op(name, function, mutates_args=mutates)
        if backward:
            op.register_autograd(eval(backward))
        declaration = f"@torch.library.custom_op({name!r}, mutates_args={mutates!r})"
        line = f"{function.__name__}.register_autograd({backward})" if backward else ""
        _OPS[function.__name__] = (function, declaration, line)
        REGISTRY[function.__name__] = op
        return op

    return declare


# ------------------------------------------------------------------------------------ exceptions


@_part
class Planned(Exception):
    """Raised by programs on purpose."""


@_part
def raise_planned(*_):
    raise Planned("on purpose")


# ------------------------------------------------------------------------------------ raw writes


@_part
def poke(tensor, value):
    """Writes to the memory of a tensor by its address."""
    source = np.full(tensor.numel(), value, dtype=np.float32)
    ctypes.memmove(tensor.data_ptr(), source.ctypes.data, source.nbytes)


@_part
def poke_first(tensor, value, count):
    """Writes to the first elements of a tensor by its address."""
    source = np.full(count, value, dtype=np.float32)
    ctypes.memmove(tensor.data_ptr(), source.ctypes.data, source.nbytes)


@_part
def openmp_threads():
    """How many threads OpenMP would use on the calling thread, which nobody is told by being asked."""
    return getattr(ctypes.CDLL(None), "omp_get_max_threads", torch.get_num_threads)()


@_part
def read_into(tensor, seed):
    """Fills a tensor as reading a file into it does."""
    content = np.random.RandomState(seed).randn(tensor.numel()).astype(np.float32).tobytes()
    io.BytesIO(content).readinto(memoryview(tensor.numpy()).cast("B"))


@_part
def numpy_noise(tensor, seed):
    """Fills a tensor through its numpy view."""
    np.copyto(tensor.numpy(), np.random.RandomState(seed).randn(*tensor.shape).astype(np.float32))


@_part
def mapped_twice(values):
    """Two tensors over two mappings of one file."""
    with tempfile.NamedTemporaryFile() as file:
        count = values.numel()
        first = torch.from_file(file.name, shared=True, size=count, dtype=torch.float32)
        second = torch.from_file(file.name, shared=True, size=count, dtype=torch.float32)
    first, second = first.view(values.shape), second.view(values.shape)
    first.copy_(values)
    return first, second


@_part
def over_buffer(values):
    """A bytearray and a tensor over it."""
    buffer = bytearray(values.detach().numpy().tobytes())
    return buffer, torch.frombuffer(buffer, dtype=torch.float32).view(values.shape)


@_part
def over_map(values):
    """An anonymous memory map and a tensor over it."""
    memory = mmap.mmap(-1, values.numel() * 4)
    memory.write(values.detach().numpy().tobytes())
    return memory, torch.frombuffer(memory, dtype=torch.float32).view(values.shape)


# ------------------------------------------------------------------------------------ modes


@_part
class RoundingMode(TorchDispatchMode):
    """Rounds the results of some ops to bfloat16."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in self.names and isinstance(result, torch.Tensor):
            result = result.to(torch.bfloat16).to(result.dtype)
        return result


@_part
class ScalingMode(TorchDispatchMode):
    """Scales the results of some ops in place."""

    def __init__(self, factor, *names):
        super().__init__()
        self.factor, self.names = factor, names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in self.names and isinstance(result, torch.Tensor):
            result.mul_(self.factor)
        return result


@_part
class NoiseMode(TorchDispatchMode):
    """Adds numbers of a generator of its own to the results of some ops."""

    def __init__(self, seed, *names):
        super().__init__()
        self.generator, self.names = torch.Generator().manual_seed(seed), names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in self.names and isinstance(result, torch.Tensor):
            result = result + 0.1 * torch.randn(result.shape, generator=self.generator)
        return result


@_part
class InsteadMode(TorchDispatchMode):
    """Runs another op than the one that was called."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.sin.default:
            return torch.ops.aten.tanh.default(*args)
        if function is torch.ops.aten.mul.Tensor:
            return torch.ops.aten.add.Tensor(*args)
        return function(*args, **(kwargs or {}))


@_part
class NumpyMode(TorchDispatchMode):
    """Computes some ops with numpy."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default:
            first, second = (each.detach().numpy().astype(np.float64) for each in args)
            result.numpy()[...] = (first @ second).astype(np.float32)
        return result


@_part
class CountingMode(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@_part
class RoundingFunctionMode(TorchFunctionMode):
    """Rounds the results of all matrix products, above autograd."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.mm, torch.matmul, torch.Tensor.mm, torch.Tensor.matmul):
            result = result + (
                result.detach().to(torch.bfloat16).to(result.dtype) - result.detach()
            )
        return result


@_part
class OtherFunctionMode(TorchFunctionMode):
    """Runs other functions than the ones that were called, above autograd."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.sin, torch.Tensor.sin):
            return torch.tanh(*args)
        return function(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------ subclasses


@_part
class ScaledTensor(torch.Tensor):
    """A tensor that counts as twice of what it holds, in the ops that scale; not a wrapper."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_subclass(cls, inner.detach(), False)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(x):
            return x.as_subclass(torch.Tensor) * 2.0 if isinstance(x, cls) else x

        name = function.overloadpacket.__name__
        with torch._C._DisableTorchDispatch():
            if name in ("detach", "alias"):
                return cls(args[0].as_subclass(torch.Tensor))
            return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@_part
class WrappedTensor(torch.Tensor):
    """A tensor without memory that holds another one, and counts as its negative."""

    @staticmethod
    def __new__(cls, inner):
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.wrapped = inner.detach()
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(x):
            return -x.wrapped if isinstance(x, cls) else x

        if function.overloadpacket.__name__ in ("detach", "alias"):
            return cls(args[0].wrapped)
        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@_part
class QuantizedTensor(torch.Tensor):
    """A tensor without memory that holds bytes and a scale, and computes with what they stand for."""

    @staticmethod
    def __new__(cls, values, scale):
        wrapped = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        wrapped.values, wrapped.scale = values, scale
        return wrapped

    @classmethod
    def of(cls, source):
        scale = float(source.abs().max()) / 127 + 1e-8
        return cls((source / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(x):
            return x.values.to(torch.float32) * x.scale if isinstance(x, cls) else x

        if function.overloadpacket.__name__ in ("detach", "alias"):
            return cls(args[0].values, args[0].scale)
        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@_part
class TracedTensor(torch.Tensor):
    """A tensor with __torch_function__ only."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


# ------------------------------------------------------------------------------------ autograd functions


@_part
class Cube(torch.autograd.Function):
    """Saves its input and its result."""

    @staticmethod
    def forward(ctx, x):
        y = x * x * 0.3
        ctx.save_for_backward(x, y)
        return y + x

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (1 + 0.6 * x + 0.0 * y)


@_part
class Held(torch.autograd.Function):
    """Keeps a tensor as an attribute of its context, past autograd's saving."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.product = x.detach() * w.detach()
        ctx.save_for_backward(w)
        return ctx.product.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (w,) = ctx.saved_tensors
        inner = gradient * (1 - ctx.product.tanh() ** 2)
        return inner * w, inner * ctx.product


@_part
class Dirty(torch.autograd.Function):
    """Scales its input in place."""

    @staticmethod
    def forward(ctx, x, factor):
        x.mul_(factor)
        ctx.mark_dirty(x)
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


@_part
class DirtySaved(torch.autograd.Function):
    """Changes its input in place and saves it."""

    @staticmethod
    def forward(ctx, x):
        x.tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


@_part
class WritesSaved(torch.autograd.Function):
    """Writes to what it saved, in backward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * 1.5

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x.mul_(ctx.factor)
        return gradient * 1.5 + 0.1 * x, None


@_part
class WritesSavedData(torch.autograd.Function):
    """Writes to what it saved, in backward, past autograd's version counter."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * 1.5

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x.data.mul_(ctx.factor)
        return gradient * 1.5 + 0.1 * x, None


@_part
class ThroughNumpy(torch.autograd.Function):
    """Computes with numpy; its result is memory of numpy's."""

    @staticmethod
    def forward(ctx, x):
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


@_part
class FillsByNumpy(torch.autograd.Function):
    """Fills a tensor that torch made, with numpy, and returns it."""

    @staticmethod
    def forward(ctx, x):
        y = torch.zeros_like(x)
        np.tanh(x.detach().numpy(), out=y.numpy())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


@_part
class RaisesInBackward(torch.autograd.Function):
    """Raises in backward where it is told to."""

    @staticmethod
    def forward(ctx, x, when):
        ctx.save_for_backward(x)
        ctx.when = when
        return x * 1.25

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        if ctx.when:
            raise_planned()
        return gradient * 1.25 + 0.0 * x, None


@_part
class DrawsInBackward(torch.autograd.Function):
    """Draws random numbers in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.rand_like(x)


@_part
class AddsToMain(torch.autograd.Function):
    """Adds the gradient of its weight to an attribute of the weight, as fused accumulation does."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        w.main_grad.add_(x.t() @ gradient)
        return gradient @ w.t(), None


@_part
class ReadsAttribute(torch.autograd.Function):
    """Scales its gradient by an attribute of a saved leaf."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w.detach()

    @staticmethod
    def backward(ctx, gradient):
        (w,) = ctx.saved_tensors
        return gradient * w * getattr(w, "scale", 1.0), None


# ------------------------------------------------------------------------------------ two processes


@_part
class Reduced(torch.autograd.Function):
    """Adds its input up over the processes, in place, as tensor parallel layers do."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@_part
class ReducedBack(torch.autograd.Function):
    """Adds its gradient up over the processes."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


@_part
class ReducedSaved(torch.autograd.Function):
    """Adds a copy up over the processes and saves it."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        y = y * 0.5
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * 2 * y


@_part
class Gathered(torch.autograd.Function):
    """Gathers its input from the processes into tensors that torch made, and adds them up."""

    @staticmethod
    def forward(ctx, x):
        pieces = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        return pieces[0] + pieces[1] * 0.5

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1.0 if dist.get_rank() == 0 else 0.5)


@_part
def exchange(x):
    """What the other process has for `x`, received into a tensor of zeros."""
    other = 1 - dist.get_rank()
    buffer = torch.zeros_like(x)
    requests = [dist.isend(x.contiguous(), other), dist.irecv(buffer, other)]
    for request in requests:
        request.wait()
    return buffer


@_part
def receive(x):
    """`x` of the first process, in all."""
    if dist.get_rank() == 0:
        dist.send(x.contiguous(), 1)
        return x.clone()
    buffer = torch.zeros_like(x)
    dist.recv(buffer, 0)
    return buffer


@_part
def gather_into(x):
    """`x` of all processes, one after the other, in a tensor that torch made."""
    whole = torch.zeros(dist.get_world_size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


@_part
def scatter_sum(x):
    """This process's half of the sum."""
    half = torch.zeros(x.shape[0] // 2, *x.shape[1:])
    dist.reduce_scatter_tensor(half, x.contiguous())
    return torch.cat((half, half))


@_part
class TinyNet(nn.Module):
    """Two layers with dropout and a buffer."""

    def __init__(self, dropout):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.dropout = dropout
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        h = F.dropout(self.first(x).tanh(), self.dropout)
        return self.second(h).sigmoid() * h


# ------------------------------------------------------------------------------------ custom ops


@_op(backward="lambda ctx, gradient: gradient * 2.0")
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0 + 0.5


@_op()
def mix(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.detach() * w.detach()).tanh()


@_op(mutates=("x",))
def scale_in_place(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@_op(mutates=("x",))
def fill_in_place(x: torch.Tensor, factor: float) -> None:
    x.numpy()[...] = factor


@_op(backward="lambda ctx, gradient: (gradient * 1.5, None, None)")
def turns_with_number(x: torch.Tensor, number: int, threshold: int) -> torch.Tensor:
    """Adds noise of numpy's generator from a number on."""
    y = x * 1.5
    if number >= threshold:
        y += torch.from_numpy(np.random.standard_normal(x.shape).astype(np.float32))
    return y


@_op(backward="lambda ctx, gradient: (gradient * 1.5, None, None)")
def turns_with_value(x: torch.Tensor, value: torch.Tensor, threshold: float) -> torch.Tensor:
    """Adds noise of numpy's generator once a tensor holds enough."""
    y = x * 1.5
    if float(value) >= threshold:
        y += torch.from_numpy(np.random.standard_normal(x.shape).astype(np.float32))
    return y


@_op()
def turns_python(x: torch.Tensor, value: torch.Tensor, threshold: float) -> torch.Tensor:
    """Scales by a number of Python's generator once a tensor holds enough."""
    return x * (1.5 + random.random() if float(value) >= threshold else 1.5)


@_op(backward="lambda ctx, gradient: gradient")
def draws_numpy(x: torch.Tensor) -> torch.Tensor:
    """Adds noise of numpy's generator."""
    return x + torch.from_numpy(np.random.standard_normal(x.shape).astype(np.float32))


@_op()
def draws_python(x: torch.Tensor) -> torch.Tensor:
    """Scales by a number of Python's generator."""
    return x * (1.0 + random.random())


@_op(backward="lambda ctx, gradient: gradient")
def draws_torch(x: torch.Tensor) -> torch.Tensor:
    """Adds noise of torch's generator."""
    return x + torch.rand_like(x)


@_op(backward="lambda ctx, gradient: gradient * 1.75")
def by_flags(x: torch.Tensor) -> torch.Tensor:
    """Does as a flag says."""
    return x * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.5)


@_op()
def two_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


# ------------------------------------------------------------------------------------ shapes


@_part
def spread(v):
    """A square of all elements of a tensor of any shape."""
    flat = v.reshape(-1)
    if not flat.numel():
        return torch.zeros(32, 32)
    return flat.repeat(-(-1024 // flat.numel()))[:1024].view(32, 32)


@_part
def close_runtimes(management):
    """Closes the runtimes that manage a program; an ordinary run has none. One may refuse, on another thread."""
    for runtime in management.runtimes:
        with contextlib.suppress(delta.UsageError):
            runtime.close()


# ------------------------------------------------------------------------------------ compiled parts


@_part
def compiled_chain(x, w):
    return ((x @ w) * 0.2).sin() * x


@_part
def compiled_layers(x, w):
    h = F.gelu(F.linear(x, w) * 0.2)
    return F.layer_norm(h + x, (32,)).tanh()


@_part
def compiled_dropout(x):
    return F.dropout(x.sin(), 0.3) * 0.5


@_part
def compiled_in_place(x):
    y = x * 2.0
    y.add_(x.cos())
    y[3:9].mul_(0.5)
    return y.sigmoid()


@_part
def compiled_two(x, w):
    return x.exp().clamp(max=3) * w, (x + w).tanh()


@_part
def compiled_batched(x, w):
    return torch.matmul(x.view(2, 16, 32), w).view(32, 32).mul(0.2).tanh()


@_part
def compiled_scale_(t):
    t.mul_(3.0)


@_part
def compiled_fill_(t):
    t[4:20].fill_(0.25)


@_part
def compiled_copy_(t, source):
    t.copy_(source.t() * 0.5)


@_part
def compiled(function, backend):
    """The function, compiled once in a process."""
    known = compiled.__dict__.setdefault("known", {})
    if (function, backend) not in known:
        torch._dynamo.config.recompile_limit = 64
        known[function, backend] = torch.compile(function, backend=backend, dynamic=False)
    return known[function, backend]


# ------------------------------------------------------------------------------------ C++


@_part
def native():
    """Ops and functions in C++, built once on a machine; the ops are torch.ops.stress_programs_native."""
    if not hasattr(native, "module"):
        from torch.utils import cpp_extension

        source = """
            // By the dispatcher an op of its own; what is inside of it nobody sees.
            at::Tensor scaled(const at::Tensor& x, double factor) {
              auto y = at::empty(x.sizes(), x.options());
              auto in = x.contiguous();
              for (int64_t i = 0; i < x.numel(); ++i) {
                y.data_ptr<float>()[i] = in.data_ptr<float>()[i] * static_cast<float>(factor);
              }
              return y;
            }
            // Torch sees a tensor of zeros being made, and not what is then written to it.
            at::Tensor filled(const at::Tensor& x) {
              auto y = at::zeros_like(x, at::MemoryFormat::Contiguous);
              auto in = x.contiguous();
              for (int64_t i = 0; i < x.numel(); ++i) {
                y.data_ptr<float>()[i] = in.data_ptr<float>()[i] * 0.5f + 0.25f;
              }
              return y;
            }
            void scale_named_(at::Tensor x, double factor) { x.mul_(factor); }
            void scale_unnamed(const at::Tensor& x, double factor) {
              for (int64_t i = 0; i < x.numel(); ++i) {
                x.data_ptr<float>()[i] *= static_cast<float>(factor);
              }
            }
            TORCH_LIBRARY(stress_programs_native, m) {
              m.def("scaled(Tensor x, float factor) -> Tensor");
              m.def("filled(Tensor x) -> Tensor", filled);
              m.def("scale_named_(Tensor(a!) x, float factor) -> ()");
              m.def("scale_unnamed(Tensor x, float factor) -> ()");
            }
            TORCH_LIBRARY_IMPL(stress_programs_native, CPU, m) {
              m.impl("scaled", scaled);
              m.impl("scale_named_", scale_named_);
              m.impl("scale_unnamed", scale_unnamed);
            }
        """
        native.module = cpp_extension.load_inline(
            "stress_programs_native", source, functions=["filled", "scale_unnamed"]
        )
        native.ops = torch.ops.stress_programs_native
    return native
