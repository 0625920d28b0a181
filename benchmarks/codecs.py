"""How fast codecs are on one core: Gbit/s of float32 that they encode and decode, beside a copy of the same memory.

    python benchmarks/codecs.py [--quick] [--gpu]

With ``--gpu`` on a GPU instead, in GB/s of float32, by its own clock.

Encoding is of a gradient with what is owed of it, if the codec owes; decoding is of two ranks' bytes into one sum, each
counted. Times are of the processor, so that others on it do not count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

from phalanx.kernels import blockwise_cpu
from phalanx.layout import Layout
from phalanx.parallel.communication.codecs.chosen import Coding
from phalanx.parallel.communication.codecs.codec import Codec
from report import Figure, report

GBIT, GIGABYTES = 10.0, 200.0
"""A second a core is enough for so many, of encoding and of decoding; and a second of a GPU's."""


METHODS = "bf16", "int8", "int4", "onebit"


def seconds_of_core(call: Callable[[], object], times: int) -> float:
    """The least of some."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


def seconds_of_gpu(call: Callable[[], object], times: int) -> float:
    """Of one of some in a row."""
    call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(times):
        call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3 / times


def measured(codec: Codec, size: int, times: int, device: str = "cpu") -> tuple[float, float]:
    """Gbit/s of encoding and of decoding."""
    seconds = seconds_of_gpu if device == "cuda" else seconds_of_core
    x, owed, left = torch.randn(3, size, device=device)
    feedback = (owed, left) if codec.feedback else (None, None)
    rows = torch.empty(2, codec.size(size, x.dtype), dtype=torch.uint8, device=device)
    for row in rows:
        codec.encode(x, row)
    encode = seconds(lambda: codec.encode(x, rows[0], *feedback), times)
    decode = seconds(lambda: codec.decode(rows, left), times)
    return 32e-9 * size / encode, 2 * 32e-9 * size / decode


def codec_of(comm: str) -> Codec:
    """For gradients."""
    coding = Coding.of(Layout(dp=2, comm=comm))
    assert coding is not None
    assert isinstance(coding.gradients, Codec)
    return coding.gradients


def on_gpu() -> Iterator[Figure]:
    size = 1 << 27
    for comm in METHODS:
        for name, speed in zip(("encode", "decode"), measured(codec_of(comm), size, 20, "cuda"), strict=True):
            note = f"{speed / 8:,.0f} GB/s of float32"
            yield Figure(f"{comm} {name} on a GPU, seconds for 200 GB", GIGABYTES / (speed / 8), 1.0, note)


def main() -> None:
    quick = "--quick" in sys.argv
    if "--gpu" in sys.argv:
        report(list(on_gpu()))
        return
    torch.set_num_threads(1)
    size, times = (1 << 22, 3) if quick else (1 << 24, 9)
    x, y = torch.randn(2, size)
    copy = 32e-9 * size / seconds_of_core(lambda: y.copy_(x), times)
    figures = [Figure("copy, seconds for 10 Gbit", GBIT / copy, note=f"{copy:.1f} Gbit/s")]
    for comm in METHODS:
        codec = codec_of(comm)
        for name, speed in zip(("encode", "decode"), measured(codec, size, times), strict=True):
            fewer = 4 * size / codec.size(size, x.dtype)
            note = f"{speed:.1f} Gbit/s, {speed / copy:.2f} of a copy; {fewer:.2f}x fewer bytes"
            figures.append(Figure(f"{comm} {name}, seconds for 10 Gbit", GBIT / speed, 1.0, note))
    print(f"compiled: {'yes' if blockwise_cpu.library() else 'no'}")
    report(figures)


if __name__ == "__main__":
    main()
