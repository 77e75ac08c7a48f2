"""What any training program may do: ops of many kinds, views, writes in place, random numbers, blocks, hooks.

None of this is known to go wrong; it is what the attacks are hidden in, and what would show a fault that nobody has
thought of. A filler takes squares from the builder's pool and puts squares into it.
"""

from __future__ import annotations

from collections.abc import Callable

from scripts.programs.builder import Builder
from scripts.programs.program import Kind, Phase

UNARY = (
    "{0}.sin()",
    "{0}.tanh()",
    "{0}.sigmoid()",
    "{0}.clamp(-2, 2).exp() * 0.3",
    "{0}.relu() + 0.1",
    "F.gelu({0})",
    "F.silu({0})",
    "F.elu({0})",
    "F.hardswish({0})",
    "F.mish({0})",
    "F.softplus({0})",
    "F.leaky_relu({0}, 0.2)",
    "{0}.softmax(-1) * 8",
    "{0}.log_softmax(0) * 0.2",
    "F.layer_norm({0}, (32,))",
    "F.group_norm({0}.view(1, 32, 32), 4).view(32, 32)",
    "F.normalize({0}, dim=1) * 4",
    "({0} * {0} + 1).sqrt()",
    "({0} * {0} + 0.5).rsqrt()",
    "({0}.abs() + 0.2).log()",
    "{0}.cumsum(0) * 0.1",
    "({0} * 0.1 + 1).cumprod(1).clamp(-3, 3)",
    "{0}.erf()",
    "{0}.atan()",
    "{0}.sinh().clamp(-3, 3)",
    "{0}.square() * 0.5",
    "{0}.sort(1).values",
    "{0}.topk(16, 1).values.repeat(1, 2)",
    "{0}.flip(0)",
    "{0}.roll(3, 1)",
    "{0}.t().contiguous()",
    "{0}.logsumexp(1, keepdim=True).expand(32, 32) * 0.3",
    "{0} - {0}.mean(1, keepdim=True)",
    "{0} / ({0}.std() + 0.5)",
    "{0}.norm() * 0.03 + {0}",
    "{0}.amax(1, keepdim=True) + {0} * 0.5",
    "{0}.median(1, keepdim=True).values + {0} * 0.5",
    "{0}.prod(1, keepdim=True).clamp(-1, 1) + {0}",
    "{0}.double().sin().float()",
    "{0}.bfloat16().tanh().float()",
    "{0}.half().float() * 0.9",
    "F.pad({0}, (1, 1), 'constant', 0.5)[:, 1:33]",
    "F.max_pool2d({0}.view(1, 1, 32, 32), 2).repeat_interleave(2, 2).repeat_interleave(2, 3).view(32, 32)",
    "F.avg_pool2d({0}.view(1, 1, 32, 32), 3, 1, 1).view(32, 32)",
    "F.interpolate({0}.view(1, 1, 32, 32), scale_factor=0.5, mode='bilinear').repeat(1, 1, 2, 2).view(32, 32)",
    "F.unfold({0}.view(1, 1, 32, 32), 2, stride=2).view(32, 32)",
    "torch.where({0} > 0, {0}, {0} * 0.1)",
    "{0}.masked_fill({0} > 1.5, 1.5)",
    "{0}.tril() + {0} * 0.2",
    "{0}.triu(1) - {0} * 0.2",
    "torch.diag_embed({0}.diagonal()) + {0}",
    "torch.fft.rfft({0}).abs().repeat(1, 2)[:, :32] * 0.2",
    "torch.fft.ifft(torch.fft.fft({0}) * 0.9).real",
    "torch.view_as_real(torch.view_as_complex({0}.view(32, 16, 2)) ** 2).reshape(32, 32) * 0.3",
    "torch.complex({0}, {0} * 0.5).conj().imag + {0}",
    "torch.special.expit({0})",
    "torch.nan_to_num({0})",
    "torch.cdist({0}[:, :8], {0}[:, 8:16]) * 0.2",
    "F.pairwise_distance({0}, {0} * 0.5).view(32, 1) * 0.1 + {0}",
    "F.scaled_dot_product_attention(*({0}.view(1, 2, 16, 32),) * 3).view(32, 32)",
    "torch.stack(({0}[:16], {0}[16:])).view(32, 32)",
    "torch.cat({0}.chunk(4, 1)[::-1], 1)",
    "torch.cat([row.sin() if number % 5 else row for number, row in enumerate({0}.split(4))])",
    "sum({0}.unbind(0)).view(1, 32) * 0.1 + {0} * 0.5",
    "torch.einsum('ij,kj->ik', {0}, {0}) * 0.1",
    "{0} @ {0}.t() * 0.1",
    "torch.index_select({0}, 1, torch.arange(31, -1, -1))",
    "{0}.gather(1, torch.arange(1024).view(32, 32) % 32)",
    "{0}.scatter_add(0, torch.arange(1024).view(32, 32) % 7, {0}) * 0.5",
    "{0}.index_put((torch.arange(8),), {0}[8:16])",
    "{0}[torch.arange(1024).view(32, 32) % 32, 3] + {0}",
    "torch.logcumsumexp({0}, 1) * 0.2",
    "torch.renorm({0}, 2, 0, 4.0)",
    "{0}.unsqueeze(0).expand(3, 32, 32).sum(0) * 0.3",
    "torch._foreach_mul([{0}, {0} * 2], 0.5)[0]",
    "torch.cummax({0}, 1).values * 0.5 + {0}",
    "{0}.view(64, 16).repeat(1, 2)[:32]",
    "{0}.unflatten(1, (4, 8)).transpose(1, 2).flatten(1)",
)
"""Square -> square."""

BINARY = (
    "{0} + {1}",
    "{0} - {1} * 0.5",
    "{0} * {1}",
    "{0} @ {1} * 0.2",
    "torch.mm({0}, {1}.t()) * 0.2",
    "torch.addmm({0}, {1}, {1}, beta=0.5, alpha=0.1)",
    "torch.addcmul({0}, {1}, {0}, value=0.3)",
    "torch.addcdiv({0}, {1}, {0}.square() + 1, value=0.3)",
    "torch.lerp({0}, {1}, 0.3)",
    "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})",
    "torch.where({1} > 0, {0}, {1})",
    "torch.atan2({0}, {1}.square() + 1)",
    "torch.hypot({0}, {1} + 0.1)",
    "{0} / ({1}.square() + 1)",
    "F.linear({0}, {1}) * 0.2",
    "torch.bmm({0}.view(2, 16, 32), {1}.view(2, 32, 16)).view(16, 32).repeat(2, 1) * 0.2",
    "torch.matmul({0}.view(2, 16, 32), {1}).view(32, 32) * 0.2",
    "torch.einsum('ij,ij->i', {0}, {1}).view(32, 1) * 0.1 + {0}",
    "F.mse_loss({0}, {1}) + {0}",
    "F.smooth_l1_loss({0}, {1}, reduction='none')",
    "F.cosine_similarity({0}, {1}, 1).view(32, 1) * {0}",
    "F.kl_div({0}.log_softmax(1), {1}.softmax(1), reduction='none') * 4",
    "torch.cat(({0}[:16], {1}[16:]))",
    "torch._foreach_add([{0}, {1}], [{1}, {0}])[1]",
    "torch._foreach_addcmul([{0}], [{1}], [{0}], value=0.2)[0]",
    "F.scaled_dot_product_attention(*(x.view(1, 2, 16, 32) for x in ({0}, {1}, {0}))).view(32, 32)",
    "torch.linalg.solve(torch.eye(32) * 4 + {0} * 0.1, {1})",
    "torch.logaddexp({0}, {1}) * 0.5",
)
"""Two squares -> square."""

VIEWS = (
    "{0}.t()",
    "{0}.view(16, 64)",
    "{0}.reshape(-1)",
    "{0}[::2]",
    "{0}[3:20, 5:]",
    "{0}[:, 1::3]",
    "{0}.narrow(0, 4, 9)",
    "{0}.select(1, 7)",
    "{0}.diagonal()",
    "{0}.unfold(1, 5, 3)",
    "{0}.expand(2, 32, 32)",
    "{0}.unsqueeze(0).transpose(0, 2)",
    "{0}.permute(1, 0)",
    "{0}.as_strided((30, 5), (32, 3), 7)",
    "{0}.chunk(3)[1]",
    "{0}.split((10, 22), 1)[1]",
    "{0}.unbind(0)[9]",
    "{0}.view(4, 8, 32).movedim(0, 2)",
    "{0}.mT[4:]",
    "{0}.squeeze()",
    "{0}.view_as({0})[1:]",
    "torch.view_as_complex({0}.view(32, 16, 2)).real",
    "torch.real(torch.view_as_complex({0}.view(32, 16, 2)).conj())",
    "{0}.tensor_split(5)[2]",
    "{0}.hsplit(2)[0]",
    "{0}.swapaxes(0, 1)[2:5]",
)
"""Square -> view of any shape, of float32."""

IN_PLACE = (
    "{0}.mul_(0.7)",
    "{0}.add_(0.25)",
    "{0}.add_({1}, alpha=0.5)",
    "{0}.sub_({1})",
    "{0}.clamp_(-1, 1)",
    "{0}.relu_()",
    "{0}.tanh_()",
    "{0}.sigmoid_()",
    "{0}.neg_()",
    "{0}.sin_()",
    "F.hardswish({0}, inplace=True)",
    "F.leaky_relu_({0}, 0.1)",
    "{0}.copy_({1})",
    "{0}.addcmul_({1}, {1}, value=0.2)",
    "{0}.lerp_({1}, 0.4)",
    "{0}.masked_fill_({1} > 0.5, 0.3)",
    "{0}.index_fill_(0, torch.tensor([1, 5]), 0.1)",
    "{0}.index_add_(0, torch.tensor([3, 4]), {1}[:2])",
    "{0}.index_copy_(0, torch.tensor([3, 4]), {1}[:2])",
    "{0}[2:5].mul_(0.5)",
    "{0}[:, ::2] = {1}[:, 1::2]",
    "{0}[0] = 0.5",
    "{0}.t().add_({1})",
    "{0}.view(-1)[100:300].zero_()",
    "{0}.view(16, 64)[:, :8].copy_({1}.view(16, 64)[:, 8:16])",
    "{0}.diagonal().fill_(0.2)",
    "{0}.unfold(1, 4, 4).select(2, 1).mul_(0.3)",
    "{0}.as_strided((10, 10), (33, 2), 5).add_(0.3)",
    "{0}.narrow(0, 16, 16).tanh_()",
    "{0}.data.mul_(0.9)",
    "{0}.data[3:9].add_(0.2)",
    "{0}.data.t()[1].zero_()",
    "{0}.detach().mul_(0.8)",
    "{0}.detach()[4:7].fill_(0.1)",
    "{0}.tril_()",
    "{0}.fill_diagonal_(0.4)",
    "{0}.squeeze_().mul_(0.9)",
    "{0}.t_().mul_(1.1).t_()",
    "torch._foreach_mul_([{0}], 0.8)",
    "torch._foreach_add_([{0}], [{1}])",
    "{0}.put_(torch.tensor([0, 99]), torch.tensor([0.1, 0.2]))",
    "{0}.scatter_(1, torch.tensor([[0, 3]]), 0.7)",
    "{0}.cumsum_(0).mul_(0.1)",
    "{0}.data.copy_({1}.data)",
    "{0}.data = {0}.data.clone()",
    "{0}.data = {1}.data * 0.5",
    "{0}.data[::3].copy_({1}.data[::3])",
    "torch.add({1}.data, 0.1, out={0}.data)",
    "torch.tanh({1}.data, out={0}.data)",
    "torch.mul({1}.data[:8], 0.5, out={0}.data[:8])",
    "{0}.data.zero_()",
    "{0}.data.set_({0}.data.clone())",
    "{0}.detach().requires_grad_(False).add_(0.1)",
)
"""Writes to a square that was made for it, through any alias."""

RANDOM = (
    "F.dropout({0}, 0.3)",
    "F.dropout({0} * 1.0, 0.2, inplace=True)",
    "F.alpha_dropout({0}, 0.2)",
    "F.feature_alpha_dropout({0}.view(1, 8, 128), 0.3).view(32, 32)",
    "F.dropout2d({0}.view(1, 8, 8, 16), 0.3).view(32, 32)",
    "{0} * torch.rand_like({0})",
    "{0} + torch.randn(32, 32) * 0.3",
    "{0} * torch.bernoulli(torch.full((32, 32), 0.7))",
    "{0} * torch.empty(32, 32).uniform_(0.5, 1.5)",
    "{0} + torch.empty(32, 32).normal_(0, 0.2)",
    "{0} + torch.normal(torch.zeros(32, 32), torch.ones(32, 32) * 0.1)",
    "{0}[torch.randperm(32)]",
    "{0} + torch.randint(0, 3, (32, 32)) * 0.1",
    "F.rrelu({0}, training=True)",
    "F.gumbel_softmax({0}, tau=1.0) * 8",
    "{0}[:, torch.multinomial({0}.detach().softmax(0)[:, 0], 32, True)]",
    "{0} * torch.empty(32, 32).exponential_().clamp(max=2)",
    "{0} + torch.poisson(torch.ones(32, 32)) * 0.1",
    "{0} + torch.empty(32, 32).geometric_(0.5) * 0.1",
    "{0} + torch.empty(32, 32).cauchy_().clamp_(-1, 1)",
    "{0} + torch.from_numpy(np.random.rand(32, 32).astype(np.float32))",
    "{0} * random.uniform(0.5, 1.5)",
    "F.scaled_dot_product_attention(*({0}.view(1, 2, 16, 32),) * 3, dropout_p=0.2).view(32, 32)",
    "torch.native_dropout({0}, 0.3, True)[0]",
)
"""Square -> square, with random numbers."""

FACTORIES = (
    "torch.zeros(32, 32)",
    "torch.ones(32, 32)",
    "torch.full((32, 32), 0.3)",
    "torch.arange(1024.0).view(32, 32) * 0.001",
    "torch.eye(32)",
    "torch.linspace(-1, 1, 1024).view(32, 32)",
    "torch.empty(32, 32).fill_(0.2)",
    "torch.zeros_like({0})",
    "torch.ones_like({0})",
    "torch.full_like({0}, 0.4)",
    "{0}.new_zeros(32, 32)",
    "{0}.new_full((32, 32), 0.6)",
    "torch.tril(torch.ones(32, 32))",
    "torch.hann_window(1024).view(32, 32)",
    "torch.tensor([[0.5] * 32] * 32)",
)
"""Made without history; {0} is a square."""


def unary(b: Builder) -> None:
    b.square(b.pick(UNARY), b.any_square())


def binary(b: Builder) -> None:
    b.square(b.pick(BINARY), b.any_square(), b.any_square())


def with_leaf(b: Builder) -> None:
    b.square(b.pick(BINARY), b.any_square(), b.leaf())


def data(b: Builder) -> None:
    b.square(b.pick(BINARY), b.batch(), b.leaf())


def view(b: Builder) -> None:
    v = b.view(b.pick(VIEWS), b.any_square())
    if b.chance(0.4):
        v = b.view("{0}[..., 1:]", v)
    b.square(
        b.pick(("spread({0}).tanh()", "spread({0}) * {1}", "spread({0}.sin()) + {1}")),
        v,
        b.any_square(),
    )


def in_place(b: Builder) -> None:
    start = b.pick(
        ("{0}.clone()", "{0} * 1.0", "{0} + {1}", "{0} - 0.1", "{0}.contiguous().clone()")
    )
    c = b.make(start, b.any_square(), b.any_square(), prefix="c")
    for _ in range(b.pick((1, 1, 2, 3))):
        b.write(b.pick(IN_PLACE), c, b.any_square())
    b.join(c)


def in_place_later(b: Builder) -> None:
    """A buffer is used, written and used again; what is used saves no part of it."""
    c = b.make(b.pick(FACTORIES) + " * 1.0", b.any_square(), prefix="c")
    b.square("{0} + {1}", b.any_square(), c)
    with b.block("with torch.no_grad():\n    {body}"):
        b.write(
            b.pick(("{0}.mul_(0.5)", "{0}.add_(0.3)", "{0}[2:9].zero_()", "{0}.copy_({1})")),
            c,
            b.any_square(),
        )
    b.square("{0} - {1}", b.any_square(), c)


def factory(b: Builder) -> None:
    c = b.make(b.pick(FACTORIES), b.any_square(), prefix="c")
    b.square(b.pick(BINARY[:6]), b.any_square(), c)


def empty_filled(b: Builder) -> None:
    c = b.make(
        b.pick(("torch.empty(32, 32)", "torch.empty_like({0})", "{0}.new_empty(32, 32)")),
        b.any_square(),
        prefix="c",
    )
    b.write(
        b.pick(
            (
                "{0}.copy_({1}.detach())",
                "{0}.fill_(0.3)",
                "torch.tanh({1}.detach(), out={0})",
                "{0}[:] = 0.5",
            )
        ),
        c,
        b.any_square(),
    )
    b.square("{0} * {1}", b.any_square(), c)


def random_numbers(b: Builder) -> None:
    b.square(b.pick(RANDOM), b.any_square())


def own_generator(b: Builder) -> None:
    g = b.once("generator", "torch.Generator().manual_seed(SEED)", "g")
    expression = b.pick(
        (
            "{0} * torch.rand(32, 32, generator={1})",
            "{0} + torch.randn(32, 32, generator={1}) * 0.2",
            "{0} * torch.bernoulli(torch.full((32, 32), 0.6), generator={1})",
            "{0}[torch.randperm(32, generator={1})]",
            "{0} + torch.empty(32, 32).normal_(generator={1}) * 0.1",
        )
    )
    b.square(expression, b.any_square(), g)


def layer(b: Builder) -> None:
    h = b.any_square()
    kind = b.rng.randrange(6)
    if kind == 0:
        w = b.weight("conv", "4, 4, 3, 3", 0.15)
        b.square("F.conv2d({0}.view(1, 4, 16, 16), {1}, padding=1).view(32, 32)", h, w)
    elif kind == 1:
        mean = b.once("running mean", "torch.zeros(32)", "m")
        var = b.once("running var", "torch.ones(32)", "m")
        training = b.pick(("True", "True", "False"))
        b.square(f"F.batch_norm({{0}}, {{1}}, {{2}}, training={training})", h, mean, var)
    elif kind == 2:
        w = b.weight("embedding", "16, 32", 0.5)
        index = b.once("index", "torch.arange(32) * 7 % 16", "i")
        b.square("F.embedding({2}, {1}) + {0}", h, w, index)
    elif kind == 3:
        w = b.weight("conv1d", "8, 8, 3", 0.2)
        b.square("F.conv1d({0}.view(4, 8, 32), {1}, padding=1).view(32, 32)", h, w)
    elif kind == 4:
        w = b.weight("linear", "32, 32", 0.3)
        bias = b.weight("bias", "32", 0.3)
        b.square("F.linear({0}, {1}, {2})", h, w, bias)
    else:
        w = b.weight("gate", "128, 32", 0.2)
        bias = b.weight("gate bias", "128", 0.1)
        b.square("torch.lstm_cell({0}, ({0}, {0}), {1}, {1}, {2}, {2})[0]", h, w, bias)


def autocast(b: Builder) -> None:
    h, w = b.any_square(), b.leaf()
    with b.block("with torch.autocast('cpu', torch.bfloat16):\n    {body}"):
        inner = b.make(
            b.pick(("{0} @ {1}", "F.linear({0}, {1})", "torch.mm({0}, {1}).relu()")), h, w
        )
        if b.chance(0.5):
            inner = b.make(
                b.pick(("{0} @ {1}", "{0}.softmax(-1)", "F.gelu({0})", "{0} + {1}")), inner, w
            )
    b.square("{0}.float() * 0.3", inner)


def no_grad_block(b: Builder) -> None:
    h = b.any_square()
    with b.block("with torch.no_grad():\n    {body}"):
        e = b.make("{0} * 0.5", h, prefix="e")
        for _ in range(3):
            e = b.make(
                b.pick(("{0}.tanh() + 0.1", "({0} @ {0}) * 0.1", "F.dropout({0}, 0.2)")),
                e,
                prefix="e",
            )
    b.square("{0} + {1}", h, e)


def evaluation_loop(b: Builder) -> None:
    h, w = b.any_square(), b.leaf()
    code = (
        "with torch.no_grad():\n    {o} = torch.zeros(32, 32)\n    for _ in range(4):\n"
        "        {o} = {o} * 0.5 + ({0} @ {1}).tanh()"
    )
    e = b.fresh("e")
    b.emit(Kind.BLOCK, code, h, w, out=(e,))
    b.square("{0} * {1}", h, e)


def checkpointed(b: Builder) -> None:
    h = b.any_square()
    w = b.leaf()
    reentrant = b.pick(("True", "False"))
    out = b.fresh("h")
    inner = "x_inner"
    code = (
        f"def segment_{{i}}({inner}):\n    {{body}}\n    return y_inner\n"
        f"{{o}} = checkpoint(segment_{{i}}, {{0}}, use_reentrant={reentrant})"
    )
    with b.block(code, h, kind=Kind.SEGMENT, out=(out,)):
        b.emit(Kind.MAKE, "{o} = " + b.pick(UNARY[:30]), inner, out=("t_inner",))
        if b.chance(0.4):
            b.emit(Kind.MAKE, "{o} = F.dropout({0}, 0.2)", "t_inner", out=("t_inner",))
        b.emit(Kind.MAKE, "{o} = " + b.pick(BINARY[:4]) + " * 1.0", "t_inner", w, out=("y_inner",))
    b.join(out)


def function(b: Builder) -> None:
    kind = b.pick(
        (
            "Cube.apply({0})",
            "Held.apply({0}, {1})",
            "Dirty.apply({0} * 1.0, 0.6)",
            "DirtySaved.apply({0} * 1.0)",
            "ThroughNumpy.apply({0})",
            "DrawsInBackward.apply({0})",
        )
    )
    b.square(kind, b.any_square(), b.leaf())


def custom_op(b: Builder) -> None:
    kind = b.rng.randrange(6)
    h = b.any_square()
    if kind == 0:
        b.square("twice({0}) * 0.4", h)
    elif kind == 1:
        b.square("{0} * mix({0}.detach(), {1}.detach())", h, b.leaf())
    elif kind == 2:
        c = b.make("{0}.detach() * 1.0", h, prefix="c")
        b.write(f"scale_in_place({{0}}, {b.number()})", c)
        b.square("{0} * {1}", h, c)
    elif kind == 3:
        c = b.make("torch.zeros(32, 32)", prefix="c")
        b.write(f"fill_in_place({{0}}, {b.number()})", c)
        b.square("{0} * {1}", h, c)
    elif kind == 4:
        first, second = b.make_two("two_results({0}.detach())", h, prefix="c")
        b.square("{0} * {1} + {2}", h, first, second)
    else:
        b.square("draws_torch({0})", h)


def hook(b: Builder) -> None:
    h = b.any_square()
    if h in b.leaves:
        return
    code = b.pick(
        (
            "{0}.register_hook(lambda gradient: gradient * 0.9)",
            "{0}.register_hook(lambda gradient: gradient.clamp(-1, 1))",
            "{0}.register_hook(lambda gradient: gradient + torch.rand(32, 32) * 0.01)",
            "{0}.register_hook(lambda gradient: gradient.clone().mul_(0.5))",
            "{0}.retain_grad()",
        )
    )
    b.call(code, h)


def disabled(b: Builder) -> None:
    h, other = b.any_square(), b.any_square()
    with b.block("with delta.disable():\n    {body}"):
        inner = b.make(b.pick(BINARY), h, other)
        inner = b.make(b.pick(UNARY), inner)
    b.join(inner)


def other_hooks(b: Builder) -> None:
    h = b.any_square()
    code = "with torch.autograd.graph." + b.pick(
        (
            "saved_tensors_hooks(lambda t: t * 1.0, lambda t: t):\n    {body}",
            "saved_tensors_hooks(lambda t: (t.numpy().copy() if not t.requires_grad else t), "
            "lambda t: torch.from_numpy(t) if isinstance(t, np.ndarray) else t):\n    {body}",
            "save_on_cpu():\n    {body}",
        )
    )
    with b.block(code):
        inner = b.make(b.pick(UNARY[:30]), h)
    b.join(inner)


def inner_gradient(b: Builder) -> None:
    """A gradient taken in forward, with or without a graph of its own."""
    h = b.any_square()
    create = b.pick(("True", "False"))
    g = b.make(
        f"torch.autograd.grad(({{0}} * {{0}}).tanh().sum(), {{0}}, create_graph={create}, retain_graph=True)[0]",
        h,
        prefix="g",
    )
    b.square("{0} * 0.5 + {1}", h, g)


def functional(b: Builder) -> None:
    """torch.func, which bears no hooks."""
    h, w = b.any_square(), b.leaf()
    code = b.pick(
        (
            "torch.func.grad(lambda w: ({0}.detach() @ w).tanh().sum())({1}.detach())",
            "torch.func.vmap(lambda row: row.sin() * 2)({0}.detach())",
            "torch.func.jvp(lambda w: w.sin(), ({1}.detach(),), ({0}.detach(),))[1]",
            "torch.func.vjp(lambda w: w.tanh(), {1}.detach())[1](torch.ones(32, 32))[0]",
        )
    )
    g = b.make(code, h, w, prefix="g")
    b.square("{0} + {1} * 0.3", h, g)


def partial_graph(b: Builder) -> None:
    """A forward that nobody asks a gradient of."""
    h = b.make(b.pick(BINARY), b.any_square(), b.leaf())
    h = b.make(b.pick(UNARY), h)
    if b.chance(0.3):
        b.held.add(h)


def gradient_buffer(b: Builder) -> None:
    """A buffer that lives between steps and is written in each."""
    c = b.once("running", "torch.zeros(32, 32)", "r")
    h = b.any_square()
    b.write(
        b.pick(
            (
                "{0}.mul_(0.9).add_({1}.detach(), alpha=0.1)",
                "{0}.copy_({1}.detach())",
                "{0}[step].add_({1}.detach()[0])",
            )
        ),
        c,
        h,
    )
    if b.chance(0.7):
        b.square(b.pick(("{0} + {1} * 0.5", "{0} * 1.0 - {1}")), h, c)


def deep_chain(b: Builder) -> None:
    """Many cheap ops in a row."""
    code = (
        "{o} = {0}\nfor _ in range("
        + str(b.pick((6, 12, 20)))
        + "):\n    {o} = ({o} * 1.01 + 0.01).sin()"
    )
    out = b.fresh("h")
    b.emit(Kind.MAKE, code, b.any_square(), out=(out,))
    b.join(out)


def large(b: Builder) -> None:
    """A value of half a megabyte, of which large reductions are taken."""
    h = b.any_square()
    wide = b.make("{0}.repeat(8, 8)", h)
    wide = b.make(b.pick(("{0}.sin()", "F.dropout({0}, 0.2)", "{0}.tanh() * {0}")), wide)
    b.square(
        b.pick(
            (
                "{0}.view(8, 32, 8, 32).mean((0, 2)) + {1}",
                "{1} + {0}.sum() * 1e-4",
                "{1} * {0}[:32, :32]",
            )
        ),
        wide,
        h,
    )


def held(b: Builder) -> None:
    if b.pool:
        b.held.add(b.any_square())


FILLERS: tuple[tuple[float, Callable[[Builder], None]], ...] = (
    (12, unary),
    (8, binary),
    (7, with_leaf),
    (2, data),
    (4, view),
    (5, in_place),
    (2, in_place_later),
    (2, factory),
    (1, empty_filled),
    (4, random_numbers),
    (1.5, own_generator),
    (2.5, layer),
    (1.2, autocast),
    (0.8, no_grad_block),
    (0.5, evaluation_loop),
    (1.2, checkpointed),
    (1.2, function),
    (0.8, custom_op),
    (1, hook),
    (0.7, disabled),
    (0.5, other_hooks),
    (0.6, inner_gradient),
    (0.25, functional),
    (0.7, partial_graph),
    (0.8, gradient_buffer),
    (0.4, deep_chain),
    (0.3, large),
    (0.5, held),
)
"""(weight, filler)."""

_WEIGHTS = tuple(weight for weight, _ in FILLERS)
_FUNCTIONS = tuple(filler for _, filler in FILLERS)


_WITH_CONTEXTS = frozenset(
    (
        autocast,
        no_grad_block,
        evaluation_loop,
        checkpointed,
        other_hooks,
        functional,
        in_place_later,
    )
)


def fill(b: Builder) -> None:
    """Adds one filler of any kind."""
    filler = b.rng.choices(_FUNCTIONS, weights=_WEIGHTS)[0]
    (unary if b.calm and filler in _WITH_CONTEXTS else filler)(b)


def evaluate_between_steps(b: Builder) -> None:
    """What programs do after the optimizer: an evaluation, a copy of the weights."""
    with b.into(Phase.AFTER):
        w = b.leaf()
        if b.chance(0.5):
            average = b.once("average", "torch.zeros(32, 32)", "r")
            b.write("{0}.lerp_({1}.detach(), 0.1)", average, w)
        else:
            e = b.fresh("e")
            b.emit(
                Kind.BLOCK, "with torch.no_grad():\n    {o} = ({0} @ {0}).tanh().sum()", w, out=(e,)
            )
            b.call("note('evaluation', {0})", e)
