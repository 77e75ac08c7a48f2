"""Where every rebuild is compared, ordinary programs are not accused: not of results that nothing reads either."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.faults.harness import Step, check, constant, taken
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(60)

WIDTH = 32


class Recurrent(nn.Module):
    """A recurrent net over a sequence, with what its forward returns joined."""

    def __init__(self, net: nn.Module, packed: bool = False) -> None:
        super().__init__()
        self.net = net
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(16, 8, WIDTH)
        if self.packed:
            lengths = torch.tensor([16, 15, 12, 12, 9, 5, 2, 1])
            out, _ = pad_packed_sequence(self.net(pack_padded_sequence(x, lengths))[0])
        else:
            out, _ = self.net(x)
        return out


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(constant(WIDTH, WIDTH, seed=4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.view(128, WIDTH), self.weight)


def _attention(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(2, 4, 16, WIDTH)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.0, is_causal=True)


def _ctc(x: Tensor, w: Tensor) -> Tensor:
    scores = (x @ w).view(16, 8, WIDTH).log_softmax(-1)
    targets = torch.randint(1, WIDTH, (8, 6), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([6, 5, 4, 3, 3, 2, 1, 1])
    return F.ctc_loss(scores, targets, torch.full((8,), 16), lengths, reduction="none")


def _bags(x: Tensor, w: Tensor) -> Tensor:
    index = torch.randint(0, WIDTH, (200,), generator=torch.Generator().manual_seed(1))
    starts = torch.arange(0, 200, 10)
    bags = F.embedding_bag(index, w * 1.5, starts, mode="max") * x[:20]
    return bags + F.embedding_bag(index, w.exp(), starts, mode="mean")


def _pooled(x: Tensor, w: Tensor) -> Tensor:
    image = (x @ w).view(4, 4, 8, WIDTH)
    return F.max_pool2d(image, 2).exp() * F.adaptive_max_pool2d(image, (4, WIDTH // 2))


def _sampled(x: Tensor, w: Tensor) -> Tensor:
    image = (x @ w).view(4, 4, 8, WIDTH)
    grid = constant(4, 6, 6, 2, seed=9)
    return F.grid_sample(image, grid * 8, align_corners=False).exp()


def _normalised(x: Tensor, w: Tensor) -> Tensor:
    image = (x @ w).view(4, 4, 8, WIDTH)
    h = F.group_norm(image, 2).exp()
    h = F.batch_norm(h, None, None, training=True).exp()
    return F.layer_norm(F.local_response_norm(h, 2), [WIDTH])


def _solved(x: Tensor, w: Tensor) -> Tensor:
    square = w @ w.t() + torch.eye(WIDTH)
    return torch.linalg.solve(square, x.t()).exp() * torch.linalg.det(square)


def _factored(x: Tensor, w: Tensor) -> Tensor:
    square = w @ w.t() + torch.eye(WIDTH)
    return x @ torch.linalg.cholesky(square).exp() @ torch.linalg.qr(w).Q.sin()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH)),
    "lstm of three layers": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, 3, dropout=0.2)),
    "lstm both ways": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, bidirectional=True)),
    "lstm with a projection": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, proj_size=8)),
    "lstm without a bias": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, bias=False, batch_first=True)),
    "lstm of lengths": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH), packed=True),
    "gru": lambda: Recurrent(nn.GRU(WIDTH, WIDTH, 2)),
    "rnn": lambda: Recurrent(nn.RNN(WIDTH, WIDTH, 2)),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(0, (16, 8)), nn.TransformerEncoderLayer(WIDTH, 4, 64)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(0, (8, 16)), nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16), nn.GELU()
    ),
    "attention": lambda: Called(_attention),
    "ctc": lambda: Called(_ctc),
    "bags": lambda: Called(_bags),
    "pooled": lambda: Called(_pooled),
    "sampled": lambda: Called(_sampled),
    "normalised": lambda: Called(_normalised),
    "solved": lambda: Called(_solved),
    "factored": lambda: Called(_factored),
}


@pytest.mark.parametrize("mode", ["compared", "drop_all"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module(name: str, mode: str) -> None:
    """Memory that was used before is full of other numbers, so that what an op leaves unwritten shows."""

    def program() -> Step:
        torch.manual_seed(3)
        module = MODULES[name]()
        first = nn.Linear(WIDTH, WIDTH)
        parameters = [*module.parameters(), *first.parameters()]

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = module(first(constant(128, WIDTH, seed=k)).tanh())
                return (h * h.sin()).mean()

            loss = forward()
            blocks = [torch.full((n, WIDTH), float(k)) for n in (64, 128, 256, 512)]
            del blocks
            loss.backward()
            return [loss.detach(), *taken(*parameters), *module.buffers()]

        return step

    check(program, mode, steps=4)


def test_an_lstm_that_is_evaluated_between_steps() -> None:
    def program() -> Step:
        torch.manual_seed(3)
        net = nn.LSTM(WIDTH, WIDTH, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def step(k: int) -> list[Tensor]:
            optimizer.zero_grad()
            loss = net(constant(16, 8, WIDTH, seed=k) * 2.0)[0].exp().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                seen = net(constant(16, 8, WIDTH, seed=50))[0]
            return [loss.detach(), seen, *net.parameters()]

        return step

    check(program, "compared", steps=4)
