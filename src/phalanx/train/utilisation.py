"""How much of what its device could compute a run does: the model's FLOPs by the seconds they took (MFU)."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from phalanx.files import write_whole
from phalanx.peaks import peak_rate
from phalanx.train.check.beside import Check
from phalanx.train.model_flops import ModelFlops
from phalanx.words import in_flops

if TYPE_CHECKING:
    from phalanx.run import Run
    from phalanx.train.engine import Engine
    from phalanx.train.step import Metrics


CPU = "a CPU"
WARM = 3
"""Steps at the beginning, which compile and warm up."""
FILE = "flops.json"
"""In a run's folder: what its model costs, and the peak of the first rank's device."""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU


def peak_of(engine: Engine) -> float | None:
    """FLOP/s of a rank's device at most, in the dtype that it computes in; None: not known."""
    return peak_rate(device_name(engine.device), engine.dtypes.compute, engine.dtypes.fp8 is not None)


@dataclass
class Utilisation:
    """Of rank 0, for all: ranks share a step's samples."""

    world: int
    device: str
    peak: float | None
    """FLOP/s of one rank's device at most; None: not known."""
    counted: Callable[[], ModelFlops | None]
    """Says what the model costs, when that is known."""
    note: Callable[[ModelFlops], object] = lambda flops: None
    """Told of it, so that who goes on need not count again."""
    said: Callable[[str], None] = lambda line: None
    _flops: ModelFlops | None = field(default=None, init=False)

    @classmethod
    def of(cls, engine: Engine, run: Run, check: Check | None, said: Callable[[str], None]) -> Utilisation:
        """By the check beside this rank, or by what it has counted before."""
        device, peak = device_name(engine.device), peak_of(engine)
        known = _noted(run)
        before = ModelFlops(
            known.get("a_sample", 0.0), known.get("why", "its FLOPs were not counted before ranks were started again")
        )
        counted = check.flops if check is not None else lambda: before
        return cls(engine.world, device, peak, counted, partial(_note, run, device, peak), said)

    def measure(self, metrics: Metrics, seconds: float) -> dict[str, float]:
        """After a step that took so long: FLOPs of the model, in TFLOP/s a rank, and as a share of the peak."""
        if self._flops is None:
            self._flops = self.counted()
            if self._flops is None:
                return {}
            self.note(self._flops)
            if self.device != CPU and (why := self._flops.why or unknown(self.device, self.peak)):
                self.said(f"   note  no MFU: {why}")
        metrics.flops = self._flops.a_sample * metrics.slots / self.world
        if not metrics.flops or seconds <= 0:
            return {}
        rate = metrics.flops / seconds
        return {"tflops": rate / 1e12, "mfu": rate / self.peak} if self.peak else {"tflops": rate / 1e12}


def unknown(device: str, peak: float | None) -> str:
    """Why there is no MFU although a model's FLOPs are known; nothing: there is one."""
    return "" if peak else f"the peak rate of {device} is not known for what it computes in"


def _noted(run: Run) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((run.path / FILE).read_text())
        return found
    return {}


def _note(run: Run, device: str, peak: float | None, flops: ModelFlops) -> None:
    with suppress(OSError):  # a full disk: a start after this one has no MFU
        write_whole(run.path / FILE, json.dumps(asdict(flops) | {"device": device, "peak": peak}) + "\n")


def used(run: Run) -> list[str]:
    """How much of its devices a run has used since its ranks last started, the first steps left out: a line, or none.

    Ranks before may have been more or fewer, or on another machine.
    """
    noted = _noted(run)
    if not noted:
        return []
    why = noted["why"] or unknown(noted["device"], noted["peak"])
    *_, began = 0, *(event.get("step", 0) for event in run.events(0, "start"))
    steps = [event for step, event in run.ledger().items() if step >= began and event.get("tflops")]
    if not steps:
        return [f"no MFU: {why}"] if noted["why"] else []
    steps = steps[WARM:] or steps
    samples = [event.get("slots") or 1 for event in steps]
    seconds = [count / event["tflops"] for count, event in zip(samples, steps, strict=True)]  # in units of a sample's
    rate = sum(samples) / sum(seconds)
    told = f"{in_flops(1e12 * rate)} a rank"
    peak = noted["peak"]
    return [f"{told}, MFU {1e12 * rate / peak:.1%}" if peak else f"{told}; no MFU: {why}"]
