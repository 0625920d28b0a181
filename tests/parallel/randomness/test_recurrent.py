"""Dropout between the layers of recurrent networks follows samples, under every layout, padded or packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import phalanx
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Moment, Randomness
from tests.parity import TOLERANCE, HostileLanguage, difference, reference, spread_run
from tests.ranks import Ranks

KINDS = [
    {"kind": "LSTM", "batch_first": True, "bidirectional": True, "packed": True},
    {"kind": "LSTM", "proj_size": 3},
    {"kind": "GRU", "bidirectional": True, "packed": True},
    {"kind": "GRU", "batch_first": True},
    {"kind": "RNN", "nonlinearity": "relu", "batch_first": True, "bias": False},
    {"kind": "RNN", "packed": True},
]


class Classifier(nn.Module):
    """Of sequences: an embedding, a recurrent network with three layers, a head on the mean."""

    def __init__(self, kind: str, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.packed = packed
        self.embedding = nn.Embedding(37, 6)
        self.cells = getattr(nn, kind)(6, 5, num_layers=3, dropout=0.4, **options)
        width = options.get("proj_size", 5) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.cells.batch_first else x.transpose(0, 1)
        if self.packed:
            packed = pack_padded_sequence(x, lengths, batch_first=self.cells.batch_first, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=self.cells.batch_first)
        else:
            out, _ = self.cells(x)
        out = out if self.cells.batch_first else out.transpose(0, 1)
        real = torch.arange(out.shape[1]) < lengths[:, None]
        return self.head((out * real[..., None]).sum(1))


@dataclass
class Sequences(HostileLanguage):
    options: tuple[tuple[str, Any], ...] = ()

    def model(self) -> nn.Module:
        return Classifier(**dict(self.options))

    def collate(self, samples: Any) -> dict[str, Tensor]:
        batch = super().collate(samples)
        return batch | {"length": torch.tensor([len(sample["tokens"]) for sample in samples])}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"tokens": batch["tokens"], "lengths": batch["length"]}

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["length"] % 4)


def trained(options: dict[str, Any], layout: str) -> Any:
    return spread_run(Sequences(options=tuple(options.items()), steps=2), phalanx.Layout.parse(layout))


@pytest.mark.parametrize("options", KINDS, ids=lambda options: "-".join(map(str, options.values())))
def test_ranks_train_like_one_device(ranks: Ranks, options: dict[str, Any]) -> None:
    expected = reference(Sequences(options=tuple(options.items()), steps=2))
    for layout in ("dp=2", "fsdp=2,micro_batch=4"):
        error, where = difference(ranks(2, trained, options, layout)[0], expected)
        assert error < TOLERANCE, (layout, where)


@pytest.mark.parametrize("packed", [False, True])
def test_without_dropout_it_is_torchs_own(packed: bool) -> None:
    torch.manual_seed(0)
    cells = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
    keyed = Randomness(0, Moment(slots=np.arange(2)), torch.device("cpu"), model=cells)
    keyed.answers = Answers(keyed)
    x: Any = torch.randn(5, 2, 3)
    x = pack_padded_sequence(x, torch.tensor([3, 5]), enforce_sorted=False) if packed else x
    expected = cells.eval()(x)
    with keyed.scope("task"):
        found = cells(x)
        assert not keyed.asked
        cells.train()
        dropped = cells(x)
    for mine, theirs in ((found, expected), (dropped, expected)):
        outputs = [each[0].data if packed else each[0] for each in (mine, theirs)]
        assert torch.equal(*outputs) == (mine is found)
    assert keyed.asked


def test_layers_one_by_one_are_all_layers() -> None:
    torch.manual_seed(0)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        cells = kind(3, 4, num_layers=3, dropout=1e-30, bidirectional=True).double()
        keyed = Randomness(0, Moment(slots=np.arange(2)), torch.device("cpu"))
        keyed.answers = Answers(keyed)
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        expected = cells.eval()(x)
        with keyed.scope("task"):
            found = cells.train()(x)
        assert torch.allclose(found[0], expected[0], atol=1e-12)
        for mine, theirs in zip(
            *(e[1] if isinstance(e[1], tuple) else (e[1],) for e in (found, expected)), strict=True
        ):
            assert torch.allclose(mine, theirs, atol=1e-12)


def test_each_layer_and_sample_draws_its_own() -> None:
    """Half of what comes out of each layer but the last is dropped, the same for a sample wherever it is sorted to."""
    cells = nn.RNN(2, 2000, num_layers=2, dropout=0.5, batch_first=True)
    with torch.no_grad():
        for name, weight in cells.named_parameters():
            weight.zero_()
            if name == "weight_ih_l1":
                weight.copy_(torch.eye(2000) * 1e-3)
            if name == "bias_ih_l0":
                weight.fill_(1.0)

    def kept(slots: list[int], lengths: list[int]) -> list[Tensor]:
        keyed = Randomness(0, Moment(slots=np.array(slots)), torch.device("cpu"), model=cells)
        keyed.answers = Answers(keyed)
        packed = pack_padded_sequence(
            torch.zeros(2, 3, 2), torch.tensor(lengths), batch_first=True, enforce_sorted=False
        )
        with keyed.scope("task"):
            out, _ = nn.utils.rnn.pad_packed_sequence(cells(packed)[0], batch_first=True)
        return [row[:length] != 0 for row, length in zip(out, lengths, strict=True)]

    first, second = kept([0, 1], [3, 2])
    assert 0.4 < float(first.float().mean()) < 0.6
    assert not torch.equal(first[:2], second)
    again, other = kept([1, 0], [2, 3])
    assert torch.equal(other, first)
    assert torch.equal(again, second)
