"""`phalanx.gather` and `phalanx.rows` without an engine, and who answers them."""

from __future__ import annotations

import torch
from torch import Tensor

import phalanx
from phalanx import gathering


def test_without_an_engine_a_batch_is_all_there_is() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    before = gathering.calls
    assert phalanx.gather(x) is x
    assert phalanx.rows(x).tolist() == [0, 1, 2]
    assert gathering.calls == before + 1


class Twice:
    def gathered(self, x: Tensor) -> Tensor:
        return torch.cat([x, x])

    def own(self, x: Tensor) -> Tensor:
        return torch.arange(len(x)) + len(x)


def test_whoever_computes_answers_until_it_has_ended() -> None:
    x = torch.arange(2.0)
    with gathering.answered_by(Twice()):
        assert phalanx.gather(x).tolist() == [0, 1, 0, 1]
        assert phalanx.rows(x).tolist() == [2, 3]
        with gathering.answered_by(None):
            assert phalanx.gather(x) is x
        assert len(phalanx.gather(x)) == 4
    assert phalanx.gather(x) is x
