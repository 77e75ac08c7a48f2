"""Recurrent networks: one fused op with many hidden states, and a cell unrolled in Python (long chains)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import ZooModel, classes, generator, tokens, zoo_model


class RecurrentClassifier(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.rnn = kind(32, 48, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 10)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(ids))
        return self.head(F.dropout(torch.tanh(states), 0.1, self.training).mean(1))


def _recurrent(kind: type[nn.RNNBase]) -> ZooModel:
    model = RecurrentClassifier(kind)
    return ZooModel(
        model,
        lambda i: {"x": tokens(i, 24, 24, 64), "y": classes(i, 24)},
        lambda b: F.cross_entropy(model(b["x"]), b["y"]),
    )


@zoo_model("lstm")
def lstm() -> ZooModel:
    return _recurrent(nn.LSTM)


@zoo_model("gru")
def gru() -> ZooModel:
    return _recurrent(nn.GRU)


class UnrolledCell(nn.Module):
    """An LSTM cell stepped in Python, with a clamp in place on its state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(24, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], 48)
        memory = x.new_zeros(x.shape[0], 48)
        for time in range(x.shape[1]):
            hidden, memory = self.cell(F.dropout(x[:, time], 0.1, self.training), (hidden, memory))
            memory = memory * 1.0
            memory.clamp_(-0.9, 0.9)
        return self.head(hidden)


@zoo_model("unrolled_lstm_cell")
def unrolled_lstm_cell() -> ZooModel:
    model = UnrolledCell()
    return ZooModel(
        model,
        lambda i: {
            "x": torch.randn(64, 30, 24, generator=generator(i)),
            "y": classes(i, 64),
        },
        lambda b: F.cross_entropy(model(b["x"]), b["y"]),
    )
