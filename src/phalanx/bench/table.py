"""All contenders that are installed, one after another, and the table of what they did."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from phalanx.bench.contenders import CONTENDERS, Setting
from phalanx.bench.shape import Shape
from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.task import Precision
from phalanx.words import columns

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp8", "fp8_rowwise")
OURS = "phalanx"


@dataclass
class Comparison:
    """What was measured, and what was not and why."""

    setting: Setting
    machine: str
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        setting = self.setting
        offload = (
            f", {setting.offload}% of the state on the host, activations computed again" if setting.offload else ""
        )
        head = [f"{setting.shape}, {setting.precision}, AdamW, clipped at 1{offload}", self.machine, ""]
        if setting.precision.startswith("fp8"):
            head.insert(1, "peers train in bf16")
        rows = [("contender", "tokens/s", "ms a step", "memory", "first step", "ours to it")]
        fastest = sorted(self.found.items(), key=lambda item: -item[1]["tokens_per_s"])
        for name, told in fastest:
            ratio = f"{self.found[OURS]['tokens_per_s'] / told['tokens_per_s']:.2f}" if OURS in self.found else ""
            rows.append((
                CONTENDERS[name].title, f"{told['tokens_per_s']:,.0f}", f"{told['ms']:.1f}",
                f"{told['gib']:.1f} GiB", f"{told['first_step_s']:.1f} s", ratio,
            ))  # fmt: skip
        left = [f"{name}: {why}" for name, why in self.missing.items()]
        return "\n".join([*head, *columns(rows, right=range(1, 6)), *([""] if left else []), *left])

    def to_json(self) -> str:
        return json.dumps({
            "machine": self.machine, "shape": asdict(self.setting.shape), "precision": self.setting.precision,
            "offload": self.setting.offload,
            "contenders": self.found, "missing": self.missing,
        })  # fmt: skip


def setting_of(device: str | None, precision: str | None, offload: int | None = None, **sizes: int | None) -> Setting:
    """What was asked for, and what a device is measured with by default."""
    if device not in (None, "cpu", "cuda"):
        raise WrongUse(f"--device {device} is not known. Choose cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotHere("torch finds no GPU here. Use --device cpu.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    precision = precision or ("bf16" if device == "cuda" else "fp32")
    if precision not in PRECISIONS:
        raise WrongUse(f"--precision {precision} is not measured; {closest(precision, PRECISIONS)}")
    if offload is not None and not 1 <= offload <= 100:
        raise WrongUse(f"--offload {offload} is no share of the state. Give a percentage from 1 to 100.")
    if offload and device == "cpu":
        raise CannotHere(
            "--offload measures a GPU whose memory is not enough, and torch finds none here. Leave it out."
        )
    return Setting(Shape.default(device).changed(**sizes), device, precision, offload or 0)


def bench(setting: Setting, only: Sequence[str], tell: Callable[[str], None]) -> Comparison:
    """Measure each in a process of its own, so that nobody finds another's memory, threads or caches."""
    for name in only:
        if name not in CONTENDERS:
            raise WrongUse(f"--only {name} is nobody that is measured; {closest(name, CONTENDERS)}")
    table = Comparison(setting, machine(setting.device))
    for name in only or CONTENDERS:
        absent = [package for package in CONTENDERS[name].needs if importlib.util.find_spec(package) is None]
        if absent:
            table.missing[name] = f"not installed. pip install {' '.join(absent)}"
            continue
        if setting.offload and not CONTENDERS[name].offloads:
            table.missing[name] = "does not keep state on the host here"
            continue
        tell(f"{CONTENDERS[name].title} ...")
        found = _measured(name, setting)
        if isinstance(found, str):
            table.missing[name] = f"does not run here: {found}"
        else:
            table.found[name] = found
    return table


def _measured(name: str, setting: Setting) -> dict[str, float] | str:
    """Its numbers, or the last line of what it died of."""
    words = [sys.executable, "-m", "phalanx.bench.measure", name, json.dumps(asdict(setting))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it ended with {done.returncode}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def machine(device: str) -> str:
    """Device, torch and its version."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores, {platform.machine()}"
    return f"{name}, torch {torch.__version__}, one {'GPU' if device == 'cuda' else 'process'}"
