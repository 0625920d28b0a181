"""Codecs are timed where they run."""

from __future__ import annotations

import torch

from phalanx.layout import Layout
from phalanx.parallel.communication.codecs import speed
from phalanx.parallel.communication.codecs.chosen import Coding


def test_encoding_and_decoding_take_time() -> None:
    for comm in ("bf16", "int4"):
        coding = Coding.of(Layout(dp=2, comm=comm))
        assert coding is not None
        encode, decode = speed.seconds(coding.gradients, torch.device("cpu"))
        assert 0 < encode < 5
        assert 0 < decode < 5
