"""Attacks on what memory holds: writes that nobody announces, memory shared, exchanged or only partly written."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.programs.attacks.common import Aim, Attacker, making, writing
from scripts.programs.builder import Builder
from scripts.programs.faults import Fault
from scripts.programs.program import Kind, Phase

FACTORIES = (
    "torch.zeros(32, 32)",
    "torch.ones(32, 32)",
    "torch.full((32, 32), 0.4)",
    "torch.zeros_like({0})",
    "torch.empty(32, 32).fill_(0.3)",
    "torch.empty_like({0}).zero_()",
    "{0}.new_zeros(32, 32)",
    "torch.arange(1024.0).view(32, 32) * 0.001",
    "torch.zeros(64, 32)[:32]",
    "torch.eye(32)",
    "torch.rand(32, 32)",
    "torch.zeros(32, 32, 1).squeeze(2)",
)
"""Made without history; {0} is a square."""

OP_MADE = (
    "{0}.detach() * 0.5",
    "{0}.detach().tanh()",
    "{0}.detach().clone()",
    "({0}.detach() @ {0}.detach()) * 0.1",
    "torch.cat(({0}.detach()[:16], {0}.detach()[16:]))",
    "F.dropout({0}.detach(), 0.2)",
)
"""Made by an op of a square {0}."""


def _memory(b: Builder, op_made: float = 0.35) -> str:
    source = b.any_square()
    return b.make(b.pick(OP_MADE if b.chance(op_made) else FACTORIES), source, prefix="m")


# ------------------------------------------------------------------------------------ raw writes

RAW_FILLS = (
    "poke({0}, {value})",
    "poke_first({0}, {value}, 300)",
    "numpy_noise({0}, {seed})",
    "{0}.numpy()[...] = {value}",
    "{0}.numpy()[::2] *= {value}",
    "np.multiply({0}.numpy(), {value}, out={0}.numpy())",
    "{0}.detach().numpy()[3:9, 4:] += {value}",
    "np.copyto({0}.numpy(), np.float32({value}))",
    "{0}.numpy().fill({value})",
    "np.asarray({0})[:, 1] = {value}",
    "np.add.at({0}.numpy(), (0, 1), {value})",
    "memoryview({0}.numpy()).cast('B')[0:64] = bytes(range(0, 128, 2))",
    "read_into({0}, {seed})",
)


def _filled(b: Builder, codes: tuple[str, ...]) -> str:
    code = b.pick(codes).replace("{value}", b.number(0.2, 1.5))
    return code.replace("{seed}", str(b.rng.randrange(1000)))


def raw_fill(b: Builder, aim: Aim) -> Iterator[None]:
    """Fills memory of torch's with numpy, by its address, or from a file."""
    if b.chance(0.15):
        yield from making(b, aim, lambda leaf: _by_function(b, leaf))
        return

    def strike(m: str) -> None:
        b.strike(Kind.WRITE, _filled(b, RAW_FILLS), m, fault=aim.fault, on=(m,))

    yield from writing(b, aim, lambda: _memory(b), strike, visible=False)


def _by_function(b: Builder, leaf: str) -> str:
    """An autograd function that fills its result with numpy."""
    h = b.fresh("h")
    code = "{o} = FillsByNumpy.apply({0} * 1.0)"
    b.emit(Kind.MAKE, code, leaf, out=(h,), attack=b.moment(Fault.RAW_FILL, h))
    return b.make("{0} * {0}", h)


PAST_DISPATCHER = (
    "{0}.apply_(lambda v: v * 0.5 + 0.1)",
    "{0}[:4].apply_(lambda v: -v)",
    "{0}.map_({0}.clone(), lambda v, w: v + 0.5 * w)",
    "{0}.untyped_storage().byteswap(torch.float32)",
    "{0}.untyped_storage().byteswap(torch.float16)",
    "{0}.untyped_storage().fill_(63)",
    "{0}.untyped_storage()[3] = 63",
    "{0}.untyped_storage()[:512] = 62",
    "{0}.untyped_storage().copy_(({0} * 0.3).untyped_storage())",
    "{0}.map2_({0}.clone(), {0}.clone(), lambda u, v, w: u + v - 0.5 * w)",
)


def past_dispatcher(b: Builder, aim: Aim) -> Iterator[None]:
    """Torch's own functions that write without an op."""

    def strike(m: str) -> None:
        b.strike(Kind.WRITE, b.pick(PAST_DISPATCHER), m, fault=aim.fault, on=(m,))

    def make() -> str:
        m = _memory(b)
        return b.make("{0}.contiguous()", m, prefix="m") if b.chance(0.5) else m

    yield from writing(b, aim, make, strike, visible=False)


# ------------------------------------------------------------------------------------ shared memory

ARRAY_WRITES = (
    "np.multiply({0}, np.float32({value}), out={0})",
    "{0}[...] = np.roll({0}, 3) * np.float32({value})",
    "{0}[2:9] = {value}",
    "{0}.fill({value})",
    "np.tanh({0}, out={0})",
    "{0}.sort()",
)
ALIAS_WRITES = (
    "{0}.mul_({value})",
    "{0}.add_({value})",
    "{0}[3:17].zero_()",
    "{0}.t().copy_({0}.clone())",
    "{0}.tanh_()",
    "{0}.fill_({value})",
    "torch.sin({0}.clone(), out={0})",
    "torch._foreach_mul_([{0}], {value})",
)
ALIASES_OF_TENSOR = (
    "torch.from_dlpack({0})",
    "torch.from_numpy({0}.numpy())",
    "torch.as_tensor({0}.numpy())",
    "torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack({0}))",
    "torch.frombuffer(memoryview({0}.contiguous().numpy()).cast('B'), dtype=torch.float32).view(32, 32)",
)


def shared_memory(b: Builder, aim: Aim) -> Iterator[None]:
    """Two storages over one memory, of which one is written; or one over memory of numpy's, of the system's."""
    kind = b.rng.randrange(7)
    names: dict[str, str] = {}

    def own(m: str) -> tuple[str, ...]:
        return tuple({m, *names.values()})

    def write_alias(m: str) -> None:
        code = _filled(b, ALIAS_WRITES)
        b.strike(Kind.WRITE, code, names["alias"], fault=aim.fault, on=own(m))

    def write_array(m: str) -> None:
        code = _filled(b, ARRAY_WRITES)
        b.strike(Kind.WRITE, code, names["array"], fault=aim.fault, on=own(m))

    def array_wrapped_each_step() -> str:
        names["array"] = b.prepared(
            "np.random.RandomState(SEED % 99991).randn(32, 32).astype(np.float32)", "array"
        )
        return b.make(
            b.pick(
                (
                    "torch.from_numpy({0})",
                    "torch.as_tensor({0})",
                    "torch.asarray({0})",
                    "torch.from_dlpack({0})",
                )
            ),
            names["array"],
            prefix="m",
        )

    def array_wrapped_once() -> str:
        names["array"] = b.prepared(
            "np.random.RandomState(SEED % 99991).randn(32, 32).astype(np.float32)", "array"
        )
        return b.prepared("torch.from_numpy({0})", "m", names["array"])

    def array_wrapped_twice() -> str:
        m = array_wrapped_each_step()
        names["alias"] = b.make("torch.from_numpy({0})", names["array"], prefix="a")
        return m

    def alias_of_tensor() -> str:
        m = _memory(b, op_made=0.7)
        names["alias"] = b.make(b.pick(ALIASES_OF_TENSOR), m, prefix="a")
        return m

    def in_shared_memory() -> str:
        m = _memory(b, op_made=0.7)
        m = b.make("{0}.contiguous().clone().share_memory_()", m, prefix="m")
        names["alias"] = b.make("torch.from_numpy({0}.numpy())", m, prefix="a")
        return m

    def of_buffer() -> str:
        code = b.pick(("over_buffer({0})", "over_map({0})"))
        names["array"], m = b.make_two(code, b.any_square(), prefix="m")
        return m

    def write_buffer(m: str) -> None:
        code = "{0}[512:1536] = bytes(range(0, 128)) * 8"
        b.strike(Kind.WRITE, code, names["array"], fault=aim.fault, on=own(m))

    def of_file() -> str:
        m, names["alias"] = b.make_two("mapped_twice({0}.detach())", b.any_square(), prefix="m")
        return m

    make, strike = (
        (array_wrapped_each_step, write_array),
        (array_wrapped_once, write_array),
        (array_wrapped_twice, write_alias),
        (alias_of_tensor, write_alias),
        (in_shared_memory, write_alias),
        (of_buffer, write_buffer),
        (of_file, write_alias),
    )[kind]
    # None of these writes moves the counter of what autograd saved.
    yield from writing(b, aim, make, strike, visible=False)


# ------------------------------------------------------------------------------------ aliases

OWN_COUNTERS = (
    "torch.matmul({0}.view(2, 16, 32), {1}.detach()).view(32, 32)",
    "F.linear({0}.view(4, 8, 32), {1}.detach()).view(32, 32)",
    "({0}.view(2, 16, 32) @ {1}.detach())[1].repeat(2, 1)[:32]",
    "torch.unsafe_chunk(torch.cat(({0}, {1}.detach())), 2)[1]",
    "torch.unsafe_split(torch.cat(({0}, {1}.detach())), 32)[0]",
    "torch.einsum('bij,jk->bik', {0}.view(2, 16, 32), {1}.detach()).view(32, 32)",
)
"""Of a square without history and a leaf; the last op returns an alias that the schema does not tell of."""

QUIET_WRITES = (
    "{0}.mul_({value})",
    "{0}.add_({value})",
    "{0}[5:20].mul_({value})",
    "{0}.copy_({0}.clone().t())",
    "{0}.tanh_()",
    "{0}.fill_({value})",
    "torch._foreach_mul_([{0}], {value})",
)
DATA_WRITES = (
    "{0}.data.mul_({value})",
    "{0}.data[5:20].add_({value})",
    "{0}.data.copy_({0}.data.clone().t())",
    "torch.tanh({0}.data.clone(), out={0}.data)",
    "{0}.data.fill_({value})",
)


def _unseen(b: Builder, code: str, m: str, fault: Fault, where: str) -> None:
    """Emits a write on another thread, or while the runtime is disabled."""
    attack = b.moment(fault, m)
    if where == "thread":
        with b.thread(attack=attack) as job:
            b.write(code, m)
        b.call("{0}.wait()", job)
    elif where == "disabled":
        with b.block("with delta.disable():\n    {body}", attack=attack):
            b.write(code, m)
    elif where == "disabled thread":
        with b.block("with delta.disable():\n    {body}", attack=attack):
            with b.thread() as job:
                b.write(code, m)
            b.call("{0}.wait()", job)
    else:
        b.strike(Kind.WRITE, code, m, fault=fault, on=(m,))


def own_version_counter(b: Builder, aim: Aim) -> Iterator[None]:
    """Writes to what an op without annotation returned as an alias."""
    where = b.pick(("thread", "thread", "disabled", "here"))
    data = b.chance(0.25)
    code = _filled(b, DATA_WRITES if data else QUIET_WRITES)

    def make() -> str:
        return b.make(
            b.pick(OWN_COUNTERS),
            b.make("{0}.detach() * 0.5", b.any_square(), prefix="x"),
            b.leaf(),
            prefix="m",
        )

    def strike(m: str) -> None:
        _unseen(b, code, m, aim.fault, where)

    yield from writing(b, aim, make, strike, visible=not data)


def unseen_write(b: Builder, aim: Aim) -> Iterator[None]:
    """Writes past autograd, on another thread, or while the runtime is disabled."""
    where = b.pick(("thread", "disabled", "disabled", "disabled thread", "here"))
    data = where == "here" or b.chance(0.4)
    code = _filled(b, DATA_WRITES if data else QUIET_WRITES)
    op_made = 0.35 if data else 0.2

    def strike(m: str) -> None:
        _unseen(b, code, m, aim.fault, where)

    yield from writing(b, aim, lambda: _memory(b, op_made), strike, visible=not data)


# ------------------------------------------------------------------------------------ storages

_AWAY_AND_BACK = "{0}.untyped_storage().resize_(0)\n{0}.untyped_storage().resize_({1}.untyped_storage().nbytes())\n"
RESIZES = (
    "{1} = {0}.clone()\n" + _AWAY_AND_BACK + "{0}.data.copy_({1})",
    "{1} = {0}.clone()\n" + _AWAY_AND_BACK + "{0}.untyped_storage().copy_({1}.untyped_storage())",
    "{1} = {0}.clone()\n" + _AWAY_AND_BACK + "{0}.numpy()[...] = {1}.numpy()",
    "{1} = {0} * 0.5\n" + _AWAY_AND_BACK + "{0}.data.copy_({1})",
    "{1} = {0} * 0.5\n{0}.data = {1}",
    "{1} = {0} * 0.5\n{0}.data.set_({1})",
    "{1} = {0} * 0.5\n{0}.data = {1}\n{1}.add_(0.25)",
    "{1} = {0}.clone()\n{0}.data = torch.empty(0)\n{0}.data = {1}",
    "{0}.untyped_storage().resize_({0}.untyped_storage().nbytes() * 2)\n{0}.data.mul_(0.5)",
    "{1} = {0}.clone()\n{0}.data.resize_(0)\n{0}.data = {1}",
    # An op whose schema does not say that the bytes lie elsewhere afterwards.
    "torch.ops.inductor.resize_storage_bytes_({0}, 2 * {0}.nbytes)\npoke({0}, 0.4)",
    "torch.ops.inductor.resize_storage_bytes_({0}, 3 * {0}.nbytes)\npoke_first({0}, -0.3, 500)",
)
"""Of memory {0} and a name {1} that is assigned."""

_REFILL = (
    "if {0}.untyped_storage().nbytes() == 0:\n"
    "    {0}.untyped_storage().resize_({0}.nbytes)\n"
    "    {0}.data.fill_(0.1)"
)
"""Where a legal error in backward came before the memory was back, the next step would read none."""


def storage_resized(b: Builder, aim: Aim) -> Iterator[None]:
    """Memory is given back and taken again, or exchanged, as sharded training and manual offloading do."""
    persistent = b.chance(0.3)
    apart = b.chance(0.35) and aim.phase is Phase.BETWEEN

    def make() -> str:
        if persistent:
            m = b.prepared("torch.randn(32, 32)", "m")
            if apart:
                b.call(_REFILL, m)
            return m
        m = _memory(b, op_made=0.6)
        return b.make("{0}.contiguous().clone()", m, prefix="m")

    def strike(m: str) -> None:
        keep = b.fresh("k")
        if apart:  # away at the moment, back in backward
            first = "{o} = {0}.clone()\n{0}.untyped_storage().resize_(0)"
            attack = b.moment(aim.fault, m)
            b.emit(Kind.WRITE, first, m, out=(keep,), attack=attack)
            code = (
                "{0}.untyped_storage().resize_({1}.untyped_storage().nbytes())\n{0}.data.copy_({1})"
            )
            with b.into(Phase.BACKWARD):
                b.write(code, m, keep)
            return
        code = b.pick(RESIZES).replace("{1} =", "{o} =").replace("{1}", "{o}")
        attack = b.moment(aim.fault, m)
        b.emit(Kind.WRITE, code, m, out=(keep,) if "{o}" in code else (), attack=attack)

    yield from writing(b, aim, make, strike, visible=False)


OVERLAPPING = (
    "{0}.view(-1)[:513].unfold(0, 2, 1).zero_()",
    "{0}.view(-1)[:259].unfold(0, 4, 1).fill_(0.5)",
    "{0}.as_strided((32, 32), (16, 1)).fill_(0.25)",
    "{0}.as_strided((32, 32), (16, 1)).normal_()",
    "{0}.as_strided((32, 32), (8, 1)).uniform_()",
    "{0}.as_strided((32, 32), (16, 1)).copy_(torch.full((32, 32), 0.3))",
    "{0}.as_strided((32, 32), (4, 1)).bernoulli_(0.5)",
    "torch.full((32, 32), 0.5, out={0}.as_strided((32, 32), (16, 1)))",
    "torch.zeros(32, 32, out={0}.as_strided((32, 32), (16, 1)))",
    "{0}.as_strided((1024,), (0,)).fill_(0.7)",
    "{0}[:1].expand(40, 32).zero_()",
    "{0}.as_strided((32, 32), (16, 1)).random_(5)",
    "torch.sin(torch.full((32, 32), 0.4), out={0}.as_strided((32, 32), (16, 1)))",
    "{0}.as_strided((32, 32), (16, 1)).exponential_().clamp_(max=3)",
    "torch.randn(32, 32, out={0}.as_strided((32, 32), (16, 1)))",
    "{0}.as_strided((32, 32), (16, 1)).masked_fill_(torch.ones(32, 32) > 0, 0.5)",
    "{0}.view(-1)[1:].unfold(0, 2, 1)[:512].zero_()",
    "{0}[::2].zero_()",
    "{0}[4:].copy_(torch.full((28, 32), 0.3))",
    "{0}.view(torch.float16)[:, ::2].zero_()",
    "torch.full((16, 32), 0.5, out={0}[:16])",
    "{0}.view(torch.int32)[3:7].fill_(1056964608)",
)


def partial_overwrite(b: Builder, aim: Aim) -> Iterator[None]:
    """An op that writes without reading, to a view with as many elements as the storage has, but not all of them."""

    def make(leaf: str) -> str:
        source = leaf if b.chance(0.5) else b.any_square()
        base = b.pick(
            (
                "{0}.detach() * 0.5",
                "{0}.detach().clone()",
                "torch.ones(32, 32)",
                "torch.rand(32, 32)",
                "torch.full_like({0}, 0.2)",
            )
        )
        m = b.make(base, source, prefix="m")
        b.strike(Kind.WRITE, b.pick(OVERLAPPING), m, fault=aim.fault, on=(m,))
        y = b.make(
            b.pick(("{0} * {1}", "{0} + {1}", "torch.mm({0}, {1}) * 0.2")), m, leaf, prefix="y"
        )
        # What is made inside of a hook keeps its name; only what has none can leave device memory there.
        return b.make(b.pick(("{0}.sin()", "({0} * 1.1).sin()")), y)

    yield from making(b, aim, make)


ATTACKS: dict[Fault, Attacker] = {
    Fault.RAW_FILL: raw_fill,
    Fault.PAST_DISPATCHER: past_dispatcher,
    Fault.SHARED_MEMORY: shared_memory,
    Fault.OWN_VERSION_COUNTER: own_version_counter,
    Fault.UNSEEN_WRITE: unseen_write,
    Fault.STORAGE_RESIZED: storage_resized,
    Fault.PARTIAL_OVERWRITE: partial_overwrite,
}
