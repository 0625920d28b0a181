"""Modules of torch's that would train otherwise on several ranks are refused by the option's name."""

from __future__ import annotations

import pytest
from torch import nn

from phalanx import Layout, WrongUse
from phalanx.parallel.axes.rank_local import check_modules

MODULES = {
    "max_norm=1.0 of 0": nn.Embedding(4, 2, max_norm=1.0),
    "scale_grad_by_freq=True of 0": nn.EmbeddingBag(4, 2, scale_grad_by_freq=True),
    "track_running_stats=True of 0": nn.InstanceNorm1d(2, track_running_stats=True),
}


@pytest.mark.parametrize("words", MODULES)
def test_they_are_refused_where_ranks_have_samples_of_their_own(words: str) -> None:
    model = nn.Sequential(MODULES[words])
    check_modules(model, Layout())
    for layout in (Layout(dp=2), Layout(fsdp=2)):
        with pytest.raises(WrongUse, match=f"^{words} .*Leave it out"):
            check_modules(model, layout)


def test_a_part_of_a_batch_has_other_frequencies() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, scale_grad_by_freq=True))
    with pytest.raises(WrongUse, match="scale_grad_by_freq"):
        check_modules(model, Layout(micro_batch=2))
    check_modules(nn.Sequential(nn.InstanceNorm1d(2), nn.Embedding(4, 2)), Layout(dp=2, micro_batch=2))
