"""Evidence on an accelerator: what comes back different is loud before an optimizer steps, and nothing waits for it.

On the CPU the same is in tests/faults/test_evidence.py. Does not cover: speed, and kernels that only a real card has.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import _C
from tests.accelerator.test_lanes import train
from tests.support.bitwise import assert_same_bits
from tests.support.managed import sabotage

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

ELEMENTS = 1 << 14


def fill_by_address(t: Tensor, byte: int) -> None:
    """As a kernel does that PyTorch knows nothing of."""
    torch.accelerator.synchronize()
    ctypes.memset(t.data_ptr(), byte, t.nbytes)


def runtime_on(device: torch.device, policy: str, **settings: object) -> delta.Runtime:
    host = {"host_budget": "256MiB"} if policy != "stress_drop_all" else {}
    return delta.Runtime(
        1 << 34, device=str(device), policy=policy, min_bytes=0, **host, **settings
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu_(self.first(x)).sin()).square().mean()


def counters(runtime: delta.Runtime) -> _C.Counters:
    return runtime.session.counters()


# ---------------------------------------------------------------- the hash


def hash_of(device: torch.device, content: Tensor) -> tuple[int, int]:
    return _C.device_hash(content.to(device))


@pytest.mark.parametrize("bytes_", [1, 7, 8, 9, 64, 4096, 5003])
def test_each_bit_counts(device, controls, bytes_):
    content = torch.randint(256, (bytes_,), dtype=torch.uint8)
    there = content.to(device)
    seen = {_C.device_hash(there)}
    bits = range(8 * bytes_) if bytes_ <= 64 else range(0, 8 * bytes_, 97)
    for bit in bits:
        flipped = content.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        there.copy_(flipped)
        seen.add(_C.device_hash(there))
    assert len(seen) == 1 + len(bits)
    there.copy_(content)
    assert _C.device_hash(there) in seen, "it depends on more than the bytes"


@pytest.mark.parametrize(
    "content",
    [torch.randn(4096), (torch.rand(4096) < 0.5).float(), torch.arange(4096) % 7 == 0],
    ids=["numbers", "zeros and ones", "booleans"],
)
def test_places_count(device, controls, content):
    """Values that change places, and content that is moved as a whole, or its rows and columns."""
    first = hash_of(device, content)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        a, b = torch.randint(content.numel(), (2,), generator=generator).tolist()
        if content[a] == content[b]:
            continue
        swapped = content.clone()
        swapped[a], swapped[b] = content[b], content[a]
        assert hash_of(device, swapped) != first, (a, b)
    for by in (1, 2, 8, 32, 64, 128, 1024):
        if not torch.equal(content.roll(by), content):
            assert hash_of(device, content.roll(by)) != first, by
    square = content.view(64, 64)
    for moved in (square.t(), square.flip(0), square.flip(1), square.roll(1, 1)):
        if not torch.equal(moved, square):
            assert hash_of(device, moved.contiguous()) != first


def unlike_contents() -> dict[str, tuple[Tensor, Tensor]]:
    """Contents that sums over rows and columns could take for each other."""
    generator = torch.Generator().manual_seed(0)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    shapes = [(2,), (3,), (4,), (16,), (8, 8), (64, 64), (512, 512), (100, 37)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex128):
        for shape in shapes:
            x = draw(*shape, dtype=dtype)
            odd = x.clone()
            odd.view(-1)[::2] *= -1
            changed = {"negated": -x, "16 times": 16 * x, "halved": x / 2, "every odd one": odd}
            changed |= {"flipped": x.flip(0), "rolled": x.roll(1)}
            if dtype.is_complex:
                changed["conjugated"] = x.conj().resolve_conj()
            for how, y in changed.items():
                pairs[f"{how} {dtype} {shape}"] = (x, y)
    for n in (2, 4, 8, 64):
        eye = torch.eye(n, dtype=torch.float64)
        pairs[f"identity {n}"] = (eye, eye.roll(1, 0))
        r = draw(n, dtype=torch.float64)
        block = torch.stack([torch.cat([r, -r]), torch.cat([-r, r])])
        pairs[f"blocks {n}"] = (block, -block)
        circulant = torch.stack([r.roll(i) for i in range(n)])
        pairs[f"circulant {n}"] = (circulant, circulant.roll(1, 0))
        board = torch.ones(n, n, dtype=torch.float64)
        board[::2, ::2] = board[1::2, 1::2] = -1
        pairs[f"checkerboard {n}"] = (board, -board)
    for n in (1, 4, 4096):
        high, low = torch.full((n,), 2**63 - 1), torch.full((n,), -(2**63) + 2**32 - 2)
        pairs[f"halves of words {n}"] = (high, low)
    return pairs


def test_changes_that_cancel_in_sums_count(device, controls):
    alike = [
        name
        for name, (a, b) in unlike_contents().items()
        if hash_of(device, a.contiguous()) == hash_of(device, b.contiguous())
    ]
    assert not alike


def test_signs_that_flip_at_the_corners_of_rectangles_count(device, controls):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    first = hash_of(device, x)
    for _ in range(300):
        rows = torch.randperm(64, generator=generator)[:2]
        columns = torch.randperm(64, generator=generator)[:2]
        y = x.clone()
        y[rows[:, None], columns] *= -1
        assert hash_of(device, y) != first, (rows, columns)


def test_the_room_changes_nothing(device, controls):
    """One tile or many, the hash is the same."""
    content = torch.randn(200_003).to(device)
    assert len({_C.device_hash(content, budget_bytes=1 << bits) for bits in (0, 24, 28, 34)}) == 1


def test_memory_that_begins_anywhere_is_hashed(device, controls):
    """A storage over a part of another, as from a slice, begins at any byte."""
    content = torch.arange(4099, dtype=torch.int64).remainder(251).to(torch.uint8).to(device)
    seen = set()
    for first in range(8):
        part = content.untyped_storage()[first : first + 4001]
        t = torch.empty(0, dtype=torch.uint8, device=device).set_(part)
        assert t.data_ptr() % 8 == first
        seen.add(_C.device_hash(t))
        t[1777] += 1
        seen.add(_C.device_hash(t))
    assert len(seen) == 16


# ---------------------------------------------------------------- ordinary programs


@pytest.mark.parametrize("verify", ["first", "always", "off"])
@pytest.mark.parametrize("policy", ["stress_drop_all", "stress_swap_all", "stress_mix"])
def test_ordinary_programs_keep_their_bits(device, controls, policy, verify):
    ordinary = train(device, "chain")
    runtime = runtime_on(device, policy, verify=verify)
    assert_same_bits(train(device, "chain", runtime), ordinary, f"{policy} {verify}")
    totals = runtime.report().totals
    assert totals.mismatches == 0
    assert (totals.comparisons > 20) == (verify != "off"), totals
    if verify == "always" and policy != "stress_mix":
        assert totals.comparisons == totals.rebuilds + totals.swap_ins
    runtime.close()


def test_all_values_are_compared_in_the_same_few_steps(device, controls):
    w = torch.linspace(-1, 1, ELEMENTS).to(device).requires_grad_()
    steps = []
    with runtime_on(device, "stress_drop_all") as runtime:
        for step in range(120):
            before = counters(runtime).comparisons
            (w.sin() * w.cos()).sum().backward()
            w.grad = None
            runtime.steps.end_and_begin()
            steps += [step] * (counters(runtime).comparisons - before)
    saved = 2  # values that are dropped in each step
    at = sorted(set(steps))
    assert len(steps) == saved * len(at)
    assert at[:2] == [0, 1] and 2 + 120 // 50 <= len(at) <= 5
    assert all(later - earlier <= 49 for earlier, later in zip(at, at[1:], strict=False))


def test_nothing_waits_inside_a_step(device, controls):
    """The host is far ahead of the device when backward is over, in a step that compares everything."""
    if not controls.simulated:
        pytest.skip("the waits are counted on the simulated device")
    torch.manual_seed(0)
    model, x = Net().to(device), torch.randn(64, 32).to(device)
    waits: dict[str, list[tuple[int, int]]] = {}
    for verify in ("off", "always"):
        runtime = runtime_on(device, "stress_drop_all", verify=verify)
        waits[verify] = []
        for _ in range(12):
            torch.accelerator.synchronize()
            with runtime.step():
                before = controls.fake.waits()
                model(x).backward()
                inside = controls.fake.waits() - before
            waits[verify].append((inside, controls.fake.waits() - before - inside))
        assert (counters(runtime).comparisons > 0) == (verify == "always")
        runtime.close()
    # The first steps are timed, op by op.
    assert waits["off"][6:] == [(0, 0)] * 6
    assert waits["always"][6:] == [(0, 1)] * 6


# ---------------------------------------------------------------- what comes back different

Forward = Callable[[Tensor, Tensor], Tensor]


def source_overwritten(w: Tensor, x: Tensor) -> Tensor:
    """Between forward and backward, by address: what is made from it is made again with other bits."""
    out = (x.sin() * w).sum()
    torch.ones(4, device=w.device).add(1)
    fill_by_address(x, 7)
    return out


def value_overwritten(w: Tensor, x: Tensor) -> Tensor:
    """It is written to while it is still there; what leaves is not what its recipe makes."""
    with torch.no_grad():
        h = x * 1.5
    fill_by_address(h, 7)
    return (h * w).sum()


def in_place(w: Tensor, x: Tensor) -> Tensor:
    h = (w * 1.5).add_(1.0)
    return (h.mul_(2.0).sin() * w).sum()


CASES: dict[str, tuple[str, Forward]] = {
    "a source": ("None", source_overwritten),
    "a value": ("None", value_overwritten),
    "an op in place left out": ("PreWriteValue", in_place),
}


@pytest.mark.parametrize("style", ["step", "optimizer", "by hand"])
@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_loud_in_time(device, controls, case, style):
    name, forward = CASES[case]
    if not controls.simulated and forward is not in_place:
        pytest.skip("the host cannot write to a real device by address")

    def run(runtime: delta.Runtime | None) -> tuple[list[Tensor], list[int], bool]:
        w = torch.linspace(-1, 1, ELEMENTS).to(device).requires_grad_()
        optimizer = torch.optim.SGD([w], lr=0.1)
        results, loud, kept = [], [], True
        said: list[str] = []
        for step in range(6):
            x = torch.linspace(0, 1 + step, ELEMENTS).to(device)
            weights = w.detach().clone()
            optimizer.zero_grad()
            try:
                with runtime.step() if runtime and style == "step" else contextlib.nullcontext():
                    forward(w, x).backward()
                if style == "by hand":
                    with torch.no_grad():
                        w.sub_(w.grad, alpha=0.1)
                else:
                    optimizer.step()
            except delta.RecomputeMismatch as error:
                loud.append(step)
                said.append(str(error))
                kept &= torch.equal(w.detach(), weights)
                with torch.no_grad():  # as if the step had been made without a runtime
                    w.copy_(WEIGHTS[step])
            results.append(w.detach().clone())
        assert all("must not be used" in each for each in said), said
        return results, loud, kept

    WEIGHTS: list[Tensor] = []  # noqa: N806
    WEIGHTS += run(None)[0]
    runtime = runtime_on(device, "stress_drop_all")
    with sabotage(name), contextlib.nullcontext() if style == "step" else runtime:
        results, loud, kept = run(runtime)
    assert loud, f"{case}: silent"
    if style == "by hand":
        assert loud[0] <= 2, loud  # by the next backward
        return
    assert loud[0] <= 1 and loud[-1] < 4, loud
    assert kept, "the weights had changed by then"
    for step, (ours, theirs) in enumerate(zip(results, WEIGHTS, strict=True)):
        assert torch.equal(ours, theirs), f"{case}: step {step} is silently different"
    runtime.close()


def test_a_copy_of_what_was_overwritten_is_loud(device, controls):
    """Copied out, then written to by address before it is freed: what comes back is not what was there."""
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(-1, 1, ELEMENTS).to(device).requires_grad_()

    def forward() -> tuple[Tensor, int]:
        h = w.sin()
        return (h * w).sum(), h.data_ptr()

    runtime = runtime_on(device, "swap")
    loud = []
    for step in range(5):
        w.grad = None
        try:
            with runtime.step():
                out, address = forward()
                runtime.session.begin_copies()
                torch.accelerator.synchronize()
                ctypes.memset(address, 7, w.nbytes)
                runtime.session.make_room(1 << 40)
                out.backward()
        except delta.RecomputeMismatch as error:
            loud.append((step, "swapped out" in str(error)))
            continue
        out, address = forward()
        ctypes.memset(address, 7, w.nbytes)
        ours, w.grad = w.grad, None
        out.backward()
        assert torch.equal(ours, w.grad), f"step {step} is silently different"
    assert loud == [(0, True)]
    runtime.close()


def test_backward_after_the_runtime_was_left_is_judged_at_once(device, controls):
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(-1, 1, ELEMENTS).to(device).requires_grad_()
    x = torch.linspace(0, 1, ELEMENTS).to(device)
    with runtime_on(device, "stress_drop_all"):
        out = source_overwritten(w, x)
    with pytest.raises(delta.RecomputeMismatch, match="must not be used"):
        out.backward()


# ---------------------------------------------------------------- who is told, and when


def backward_with_bad_source(runtime_step: int, bad: frozenset[int], w: Tensor) -> Tensor:
    """The right gradient; in bad steps the runtime recomputes from a source that was overwritten by address."""
    x = torch.linspace(0.1, 1 + runtime_step, ELEMENTS).to(w.device)
    right = x.sin()
    loss = (x.sin() * w).sum()
    torch.ones(4, device=w.device).add(1)
    if runtime_step in bad:
        fill_by_address(x, 63)
    w.grad = None
    loss.backward()
    return right


@pytest.mark.parametrize("bad", [{0}, {1}, {0, 1}], ids=str)
def test_updates_by_hand_in_an_endless_loop_are_told(device, controls, bad):
    """No optimizer asks, no step ends, and after the mismatch nothing that differed is dropped any more."""
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
    runtime = runtime_on(device, "stress_drop_all")
    loud, wrong, said = [], [], []
    with runtime:
        for step in range(20):
            try:
                right = backward_with_bad_source(step, frozenset(bad), w)
            except delta.RecomputeMismatch as error:
                said.append(str(error))
                loud.append(step)
                continue
            if not torch.equal(w.grad, right):
                wrong.append(step)
            with torch.no_grad():
                w.sub_(w.grad, alpha=0.1)
    assert wrong == [min(bad)] and loud == [min(bad) + 1]
    assert "weights of before" in said[0]
    runtime.close()


def test_an_error_of_the_program_does_not_hide_a_mismatch(device, controls):
    """The program's own error comes first; then a warning, and the next backward raises."""
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
    runtime = runtime_on(device, "stress_drop_all")

    def failing_step() -> None:
        with runtime.step():
            backward_with_bad_source(0, frozenset({0}), w)
            raise ZeroDivisionError

    def good_step() -> None:
        with runtime.step():
            backward_with_bad_source(1, frozenset(), w)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError):
            failing_step()
    assert sum("must not be used" in str(each.message) for each in told) == 1
    with pytest.raises(delta.RecomputeMismatch, match="must not be used"):
        good_step()
    with runtime.step():
        right = backward_with_bad_source(2, frozenset(), w)
    assert torch.equal(w.grad, right)
    runtime.close()


def test_an_error_inside_of_an_outer_block_does_not_hide_a_mismatch(device, controls):
    """Where warnings are errors, too, the program's own error is the one that is raised."""
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    for way in ("always", "error"):
        w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
        runtime = runtime_on(device, "stress_drop_all")

        def failing_step(runtime: delta.Runtime = runtime, w: Tensor = w) -> None:
            with runtime.step():
                backward_with_bad_source(0, frozenset({0}), w)
                raise ZeroDivisionError

        with runtime, warnings.catch_warnings(record=way == "always") as told:
            warnings.simplefilter(way)
            with pytest.raises(ZeroDivisionError):
                failing_step()
            if told is not None:
                assert sum("must not be used" in str(each.message) for each in told) == 1
            with pytest.raises(delta.RecomputeMismatch, match="must not be used"), runtime.step():
                backward_with_bad_source(1, frozenset(), w)
        runtime.close()


def test_closing_tells_a_mismatch_and_closes(device, controls):
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
    runtime = runtime_on(device, "stress_drop_all")
    runtime.__enter__()
    backward_with_bad_source(0, frozenset({0}), w)
    with pytest.raises(delta.RecomputeMismatch, match="must not be used"):
        runtime.close()
    runtime.close()
    with pytest.raises(delta.UsageError, match="closed"), runtime.step():
        pass
    assert torch.Tensor.apply_ is torch._C.TensorBase.apply_


def test_a_full_card_hides_no_mismatch(device, controls):
    """Hashes that were taken while there was room are judged when there is none."""
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
    runtime = runtime_on(device, "stress_drop_all")

    def step() -> None:
        with runtime.step():
            backward_with_bad_source(0, frozenset({0}), w)
            torch.accelerator.empty_cache()
            controls.capacity(1)

    with pytest.raises(delta.RecomputeMismatch):
        step()
    controls.capacity(0)
    runtime.close()


def test_room_for_hashes_is_there_when_the_card_is_full(device, controls):
    """Taken when the first step begins: what goes because the card is full is hashed too."""
    w = torch.linspace(0.1, 1, 1 << 20).to(device).requires_grad_()
    runtime = runtime_on(device, "stress_drop_all", verify="always")
    with runtime.step():
        loss = (w.sin() * w.cos()).sum()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        if controls.simulated:
            controls.capacity(1)
        runtime.session.make_room(1 << 40)
        assert counters(runtime).drops >= 2 and counters(runtime).unhashed == 0
        controls.capacity(0)
        loss.backward()
    assert counters(runtime).comparisons == counters(runtime).rebuilds
    runtime.close()


@pytest.mark.filterwarnings("ignore:delta_runtime. the budget of:RuntimeWarning")
@pytest.mark.parametrize("verify", ["first", "always"])
def test_what_cannot_be_hashed_is_counted_or_stays(device, controls, verify):
    """The room that a small budget takes does not do for these values, and the card is full."""
    if not controls.simulated:
        pytest.skip("a card cannot be made full at will")
    w = torch.linspace(0.1, 1, 1 << 21).to(device).requires_grad_()
    runtime = delta.Runtime(1 << 20, device=str(device), policy="recompute", verify=verify)
    runtime.session.set_budget(1 << 34)  # nothing goes before it is asked for
    with runtime.step():
        loss = (w.sin() * w.cos()).sum()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        controls.capacity(1)
        runtime.session.make_room(1 << 40)
        found = counters(runtime)
        controls.capacity(0)
        loss.backward()
    if verify == "always":
        assert found.drops == 0 and found.unhashed > 0
    else:
        assert found.drops == found.unhashed == 2
        assert "not compared for want of room" in str(runtime.report())
    runtime.close()


def by_dlpack(x: Tensor) -> Tensor:
    return torch.from_dlpack(x)


def by_slice(x: Tensor) -> Tensor:
    part = x.untyped_storage()[: x.nbytes]
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(part)


def on_a_thread(write: Callable[[], object]) -> None:
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


@pytest.mark.parametrize("early", [True, False], ids=["before the runtime", "in the step"])
@pytest.mark.parametrize("thread", [True, False], ids=["thread", "own thread"])
def test_memory_that_others_share_is_not_recomputed_from(device, controls, thread, early):
    """A consumer of DLPack, or a slice of the storage, writes to it after the steps that compare everything."""
    for alias in (by_slice,) if controls.simulated else (by_dlpack, by_slice):
        w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
        x = torch.linspace(0.1, 1, ELEMENTS).to(device)
        other = alias(x) if early else None
        runtime = runtime_on(device, "stress_drop_all")
        for step in range(8):
            w.grad = None
            x.fill_(0.5)
            right = (x * (1.0 + step)).sin()
            with runtime.step():
                loss = ((x * (1.0 + step)).sin() * w).sum()
                torch.ones(4, device=device).add(1)
                if step > 4:
                    there = other if other is not None else alias(x)
                    around = on_a_thread if thread else lambda write: write()
                    around(lambda there=there: there.fill_(0.25))
                    torch.accelerator.synchronize()
                loss.backward()
            assert torch.equal(w.grad, right), (alias, step)
        runtime.close()


def test_what_others_may_have_written_to_is_not_made_again_by_its_producer(device, controls):
    """It has died by then: what was made from it stays, for nobody knows what it was made from."""
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
    x = torch.linspace(0.1, 1, ELEMENTS).to(device)
    filled = torch.empty(ELEMENTS).to(device)
    fill_by_address(filled, 62)
    runtime = runtime_on(device, "stress_drop_all")

    def forward(step: int) -> Tensor:
        m = x * (1.0 + step)
        part = m.untyped_storage()[: m.nbytes]
        if step > 4:
            torch.accelerator.synchronize()
            ctypes.memset(part.data_ptr(), 62, part.nbytes())
        return (m.sin() * w).sum()

    for step in range(8):
        w.grad = None
        right = (filled if step > 4 else x * (1.0 + step)).sin()
        with runtime.step():
            loss = forward(step)
            torch.ones(4, device=device).add(1)
            loss.backward()
        assert torch.equal(w.grad, right), step
    runtime.close()


@pytest.mark.parametrize("gone", [True, False], ids=["dropped before", "dropped since"])
def test_what_was_read_before_others_could_write_to_it(device, controls, gone):
    """Its producer makes it again; what lies there now is somebody else's."""
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
    x = torch.linspace(0.1, 1, ELEMENTS).to(device)
    runtime = runtime_on(device, "stress_drop_all")
    for step in range(8):
        w.grad = None
        right = (x * (1.0 + step)).sin()
        with runtime.step():
            m = x * (1.0 + step)
            loss = (m.sin() * w).sum()
            if gone:
                torch.ones(4, device=device).add(1)
            part = m.untyped_storage()[: m.nbytes]
            if step > 4:
                torch.accelerator.synchronize()
                ctypes.memset(part.data_ptr(), 62, part.nbytes())
            torch.ones(4, device=device).add(1)
            loss.backward()
        assert torch.equal(w.grad, right), step
    assert counters(runtime).drops >= 8
    runtime.close()


def test_a_late_write_through_an_old_alias_that_is_told_after_it_was_made(device, controls):
    """An error for what was to be made from it; the next step is as ordinary."""
    if not controls.simulated:
        pytest.skip("the host cannot write to a real device by address")
    w = torch.linspace(0.1, 1, ELEMENTS).to(device).requires_grad_()
    x = torch.linspace(0.1, 1, ELEMENTS).to(device)
    other = by_slice(x)
    runtime = runtime_on(device, "stress_drop_all")
    loud = []
    for step in range(8):
        w.grad = None
        x.fill_(0.5)
        right = (x * (1.0 + step)).sin()
        try:
            with runtime.step():
                loss = ((x * (1.0 + step)).sin() * w).sum()
                torch.ones(4, device=device).add(1)
                if step == 4:
                    torch.accelerator.synchronize()
                    ctypes.memset(other.data_ptr(), 62, other.nbytes)
                    delta.mark_written(other)
                loss.backward()
        except delta.InplaceModification:
            loud.append(step)
            continue
        assert torch.equal(w.grad, right), step
    assert loud == [4]
    runtime.close()
