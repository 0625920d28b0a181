"""How fast codecs are on one core: Gbit/s of float32 that they encode and decode, beside a copy of the same memory.

    python benchmarks/codecs.py [--quick]

Encoding is of a gradient with what is owed of it, if the codec owes; decoding is of two ranks' bytes into one sum, each
counted. Times are of the processor, so that others on it do not count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

from phalanx.kernels import blockwise_cpu
from phalanx.layout import Layout
from phalanx.parallel.communication.codecs.chosen import Coding
from phalanx.parallel.communication.codecs.codec import Codec
from report import Figure, report

GBIT = 10.0
"""A second a core is enough for so many, of encoding and of decoding."""


def seconds(call: Callable[[], object], times: int) -> float:
    """The least of some."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


def measured(codec: Codec, size: int, times: int) -> tuple[float, float]:
    """Gbit/s of encoding and of decoding."""
    x, owed, left = torch.randn(3, size)
    feedback = (owed, left) if codec.feedback else (None, None)
    rows = torch.empty(2, codec.size(size, x.dtype), dtype=torch.uint8)
    for row in rows:
        codec.encode(x, row)
    encode = seconds(lambda: codec.encode(x, rows[0], *feedback), times)
    decode = seconds(lambda: codec.decode(rows, left), times)
    return 32e-9 * size / encode, 2 * 32e-9 * size / decode


def main() -> None:
    quick = "--quick" in sys.argv
    torch.set_num_threads(1)
    size, times = (1 << 22, 3) if quick else (1 << 24, 9)
    x, y = torch.randn(2, size)
    copy = 32e-9 * size / seconds(lambda: y.copy_(x), times)
    figures = [Figure("copy, seconds for 10 Gbit", GBIT / copy, note=f"{copy:.1f} Gbit/s")]
    for comm in ("bf16", "int8", "int4"):
        coding = Coding.of(Layout(dp=2, comm=comm))
        assert coding is not None
        codec = coding.gradients
        for name, speed in zip(("encode", "decode"), measured(codec, size, times), strict=True):
            fewer = 4 * size / codec.size(size, x.dtype)
            note = f"{speed:.1f} Gbit/s, {speed / copy:.2f} of a copy; {fewer:.2f}x fewer bytes"
            figures.append(Figure(f"{comm} {name}, seconds for 10 Gbit", GBIT / speed, 1.0, note))
    print(f"compiled: {'yes' if blockwise_cpu.library() else 'no'}")
    report(figures)


if __name__ == "__main__":
    main()
