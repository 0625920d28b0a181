"""Words between ranks: bounded, and nothing but words."""

from __future__ import annotations

import json

import pytest
import torch

from phalanx.parallel.communication import words


def test_words_come_back() -> None:
    assert words.read(words.spelled(["größer", ""], "cpu")) == ["größer", ""]


@pytest.mark.parametrize("said", ["a", {"a": 1}, [1], None])
def test_what_is_no_list_of_words_is_refused(said: object) -> None:
    letters = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="no list of words"):
        words.read(letters)


@pytest.mark.parametrize("size", [0, -1, words.MOST_BYTES + 1])
def test_no_more_than_can_be_said_is_read(size: int) -> None:
    with pytest.raises(ValueError, match="there can be 1 to"):
        words.bounded(size)
