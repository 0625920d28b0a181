"""LoRA in peft's files: ``adapter_config.json`` and ``adapter_model.safetensors``, written so and read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import WrongUse, closest
from phalanx.files import json_object
from phalanx.models.lora import Lora

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapter_config(lora: Lora, linears: Collection[str], every: Sequence[str], base: str | None) -> dict[str, Any]:
    """What peft wants to know. ``linears`` have LoRA, of ``every`` linear of the model."""
    lasts = {name.rpartition(".")[2] for name in linears}
    meant = {name for name in every if name.rpartition(".")[2] in lasts}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lasts if meant == set(linears) else linears),
        "use_dora": lora.kind == "dora",
        "use_rslora": lora.kind == "rslora",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


class Adapter:
    """The LoRA of a folder, held against the one that a task asks for."""

    def __init__(self, folder: str | Path, lora: Lora) -> None:
        self.folder = Path(folder)
        try:
            said = json_object(self.folder / CONFIG)
            with safe_open(self.folder / WEIGHTS, framework="pt") as opened:
                self._names = set(opened.keys())
        except (OSError, ValueError, SafetensorError) as error:
            raise WrongUse(
                f"{folder} is not a whole folder of peft's ({type(error).__name__}: {error}). Give one with {CONFIG} "
                f"and {WEIGHTS}."
            ) from None
        kind = "dora" if said.get("use_dora") else "rslora" if said.get("use_rslora") else "lora"
        for name, has, wants in (
            ("lora", said.get("r"), lora.rank),
            ("lora_alpha", said.get("lora_alpha"), lora.alpha),
            ("lora_kind", kind, lora.kind),
        ):
            if has != wants:
                raise WrongUse(f"{folder} has {name}={has}, and the task {name}={wants}. Set {name}={has}.")
        for name in ("rank_pattern", "alpha_pattern", "modules_to_save"):
            if said.get(name):
                raise WrongUse(
                    f"{folder} has a {name}, which is not known here. Merge it with peft and begin from that."
                )

    def __call__(self, weight: str) -> Tensor:
        """A weight by the model's own name for it."""
        name = PREFIX + weight
        if name not in self._names:
            raise WrongUse(f"{self.folder} has no {name}; {closest(name, self._names)}")
        with safe_open(self.folder / WEIGHTS, framework="pt") as opened:
            return opened.get_tensor(name)

    def check_used(self, weights: Collection[str]) -> None:
        """Refuse what would be left out of the model."""
        left = sorted(self._names - {PREFIX + weight for weight in weights})
        if left:
            raise WrongUse(
                f"{self.folder} holds {left[0]}, and the model has no LoRA there. Set lora_targets as it was."
            )
