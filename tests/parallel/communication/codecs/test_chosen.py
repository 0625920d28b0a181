from __future__ import annotations

import pytest

from phalanx.layout import Layout
from phalanx.parallel.communication.codecs.bfloat16 import Bfloat16
from phalanx.parallel.communication.codecs.blockwise import Blockwise
from phalanx.parallel.communication.codecs.chosen import Coding


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,comm=int8"])
def test_nothing_is_encoded_unless_asked(layout: str) -> None:
    assert Coding.of(Layout.parse(layout)) is None


def test_weights_are_gathered_in_8_bits() -> None:
    coding = Coding.of(Layout.parse("fsdp=2,comm=int4"))
    assert coding is not None
    assert isinstance(coding.gradients, Blockwise)
    assert isinstance(coding.weights, Blockwise)
    assert (coding.axis, coding.gradients.bits, coding.weights.bits, coding.weights.full) == ("fsdp", 4, 8, 127)


def test_replicas_gather_nothing() -> None:
    coding = Coding.of(Layout.parse("dp=2,fsdp=2,comm=bf16"))
    assert coding is not None
    assert isinstance(coding.gradients, Bfloat16)
    assert (coding.axis, coding.weights) == ("dp", None)
