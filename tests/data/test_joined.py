"""Samples with rows of tensors joined to them."""

from __future__ import annotations

import pytest
import torch

from phalanx.data.joined import JoinedSamples, apart


class Numbers:
    read = "all"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index, "score": -1}


def test_each_sample_has_its_row_and_the_rest_is_as_it_was() -> None:
    data = Numbers()
    joined = JoinedSamples(data, {"score": torch.tensor([4.0, 5.0, 6.0])})
    assert len(joined) == 3
    assert [(int(each["number"]), float(each["score"])) for each in (joined[i] for i in range(3))] == [
        (0, 4.0), (1, 5.0), (2, 6.0),
    ]  # fmt: skip
    assert joined.read == "all"
    assert apart(joined) is data
    assert apart(data) is data
    with pytest.raises(AttributeError):
        _ = joined.written
