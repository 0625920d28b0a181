"""One contender measured, in a process of its own: ``python -m phalanx.bench.measure NAME``, with settings as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from phalanx.bench.contenders import CONTENDERS, Setting, Step
from phalanx.bench.shape import Shape
from phalanx.watch.screen import memory_bytes

WARM, ROUNDS = 4, 3
EACH = {"cuda": 6, "cpu": 2}
"""Steps of a round."""


def measured(step: Step, setting: Setting) -> dict[str, float]:
    """After a few steps, so many in a row without waiting; the median of several such rounds."""
    seconds = _seconds(step, 1, setting.device)
    each = 1 if setting.offload else EACH[setting.device]
    _seconds(step, 1 if setting.offload else WARM, setting.device)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    median = statistics.median(_seconds(step, each, setting.device) for _ in range(ROUNDS))
    return {
        "tokens_per_s": setting.shape.tokens / median,
        "ms": median * 1e3,
        "gib": memory_bytes(torch.device(setting.device)) / 2**30,
        "first_step_s": seconds,
    }


def _seconds(step: Step, count: int, device: str) -> float:
    """A step, of so many."""
    begun = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def main() -> None:
    name, given = sys.argv[1], json.loads(sys.argv[2])
    setting = Setting(Shape(**given["shape"]), given["device"], given["precision"], given["offload"])
    torch.set_float32_matmul_precision("high")
    for step in CONTENDERS[name].steps(setting):
        found = {key: round(value, 2) for key, value in measured(step, setting).items()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
