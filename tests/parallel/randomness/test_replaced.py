"""Random functions, replaced where models look them up, for compiled blocks."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Moment, Randomness
from phalanx.parallel.randomness.replaced import ReplacedAnswers


class Drawing(nn.Module):
    """Modules that drop, functions that do, and attention of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.3))
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(self.inner(x), 0.2)
        heads = F.scaled_dot_product_attention(dropped, dropped, dropped, dropout_p=0.2)
        return self.attention(heads, heads, heads, need_weights=False)[0]


def test_they_draw_what_a_function_mode_draws() -> None:
    model, x = Drawing(), torch.randn(3, 5, 4)
    found, before = [], (F.dropout, F.scaled_dot_product_attention)
    for kind in (Answers, ReplacedAnswers):
        keyed = Randomness(7, Moment(slots=np.arange(3)), torch.device("cpu"))
        keyed.answers = kind(keyed)
        with keyed.scope("block"):
            found.append(model(x))
        assert keyed.asked
    assert torch.equal(*found)
    assert before == (F.dropout, F.scaled_dot_product_attention), "they were left replaced"


def test_who_answers_first_is_given_what_would_have_answered() -> None:
    keyed = Randomness(7, Moment(slots=np.arange(3)), torch.device("cpu"))
    keyed.answers = ReplacedAnswers(keyed, {F.linear: lambda func, *args: func(*args) + 1})
    x, weight = torch.ones(3, 2), torch.ones(4, 2)
    with keyed.scope("block"):
        assert F.linear(x, weight).tolist() == [[3.0] * 4] * 3
    assert F.linear(x, weight).tolist() == [[2.0] * 4] * 3
    assert keyed.asked, "it would be left out after a step"


def test_what_somebody_put_in_torchs_place_stays_there() -> None:
    plain, own = F.scaled_dot_product_attention, lambda *args, **kwargs: "theirs"
    keyed = Randomness(7, Moment(slots=np.arange(3)), torch.device("cpu"))
    keyed.answers = ReplacedAnswers(keyed)
    F.scaled_dot_product_attention = own
    try:
        with keyed.scope("block"):
            assert F.scaled_dot_product_attention() == "theirs"
        assert F.scaled_dot_product_attention is own
    finally:
        F.scaled_dot_product_attention = plain
