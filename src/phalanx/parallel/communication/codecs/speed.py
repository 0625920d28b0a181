"""How long a codec takes, measured where it is to be used."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.links import synchronize

SAMPLE = 1 << 20
"""Numbers that are encoded and decoded."""
TIMES = 3


def seconds(codec: Codec, device: torch.device) -> tuple[float, float]:
    """To encode `SAMPLE` numbers, with what is owed of them if the codec owes, and to decode them."""
    draws = torch.Generator(device).manual_seed(0)  # its own: others' draws do not depend on when this is asked
    x, owed, left = torch.randn(3, SAMPLE, device=device, generator=draws)
    out = torch.empty(1, codec.size(SAMPLE, x.dtype), dtype=torch.uint8, device=device)
    feedback = (owed, left) if codec.feedback else (None, None)
    return (
        timed(lambda: codec.encode(x, out[0], *feedback), device),
        timed(lambda: codec.decode(out, left), device),
    )


def timed(call: Callable[[], object], device: torch.device, times: int = TIMES) -> float:
    """Seconds of a call, the least of some."""
    found = []
    for _ in range(times):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
