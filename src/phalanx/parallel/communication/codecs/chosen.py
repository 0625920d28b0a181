"""The codecs of a layout: one for gradients, one for weights where they are gathered."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.comm import AUTO, EXACT, Comm
from phalanx.comm_methods import CANDIDATES
from phalanx.kernels.blockwise import FULL
from phalanx.layout import Layout
from phalanx.parallel.communication.codecs.bfloat16 import Bfloat16
from phalanx.parallel.communication.codecs.blockwise import UNEVEN, Blockwise
from phalanx.parallel.communication.codecs.codec import Codec, Method
from phalanx.parallel.communication.codecs.low_rank import LowRank
from phalanx.parallel.communication.codecs.switched import Switched
from phalanx.parallel.communication.codecs.topk import TopK


@dataclass(frozen=True)
class Coding:
    """What is encoded, and how."""

    axis: str
    """Over which gradients are summed in few bits."""
    gradients: Method
    weights: Codec | None
    """Gathered so over ``fsdp``; None: as they are. What is updated stays as it is."""
    momentum: bool = False
    """Whether gradients travel as the momentum that they make (`parallel.weights.momentum`)."""

    @classmethod
    def of(cls, layout: Layout) -> Coding | None:
        """None: everything is sent as it is."""
        method = Comm.parse(layout.comm)
        if method is None or not layout.coded_axis:
            return None
        weights: Codec | None = None
        if layout.coded_axis == "fsdp" and method.name != AUTO:  # what that changes of a loss is in no ladder
            weights = Bfloat16() if method.name == "bf16" else Blockwise(8)
        return cls(layout.coded_axis, codec_of(method), weights, method.name == "onebit")


def codec_of(method: Comm) -> Method:
    """Of what is summed."""
    if method.name == AUTO:
        others = (Comm.parse(each.name) for each in CANDIDATES if each.name != EXACT)
        codecs = {other.name: codec_of(other) for other in others if other is not None}
        return Switched({name: codec for name, codec in codecs.items() if isinstance(codec, Codec)})
    if method.name == "bf16":
        return Bfloat16()
    if method.name == "topk":
        return TopK(method.number)
    if method.name == "onebit":
        return Blockwise(1)
    if method.name == "powersgd":
        return LowRank(int(method.number))
    bits = int(method.name.removeprefix("int"))
    return Blockwise(bits, FULL[bits] - UNEVEN)
