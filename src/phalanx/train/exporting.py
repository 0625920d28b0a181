"""A run's weights taken out of it, as a user asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from phalanx.checkpoint.export import Progress, everything, export
from phalanx.checkpoint.frozen import beginnings
from phalanx.checkpoint.manager import Checkpoint, CheckpointManager
from phalanx.checkpoint.manifest import Damaged, Manifest
from phalanx.checkpoint.verify import manager_of
from phalanx.errors import WrongUse
from phalanx.files import exists
from phalanx.models.beside import beside_names
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import building
from phalanx.references import find_task
from phalanx.run import Run
from phalanx.settings import make_task, over, parse_assignments
from phalanx.train.exporting_lora import LoraExport
from phalanx.verdict import Verdict
from phalanx.words import many


def export_run(
    path: Path,
    to: Path,
    format: str | None = None,
    step: int | None = None,
    progress: Progress | None = None,
    checkpoints: str | None = None,
    merge: bool = False,
    assignments: Sequence[str] = (),
) -> Verdict:
    """Write the weights of a run's last checkpoint, or of a step's, into a new folder.

    Where LoRA was trained, that alone is written, as peft does, or with ``merge`` the model that it makes of its base.
    ``assignments``: settings that are others than the run's, as where its base lies now.
    """
    if format not in (None, "safetensors", "hf"):
        raise WrongUse(f"--format {format} is not known. Choose safetensors or hf.")
    checkpoint = _chosen(manager_of(checkpoints or str(path), "Give that URL with --checkpoints."), step)
    if merge and format == "safetensors":
        raise WrongUse("--merge writes a Hugging Face folder. Leave --format safetensors out.")
    plain = format == "safetensors"
    origin = (
        _Origin()
        if plain and not checkpoint.manifest.frozen
        else _Origin.of(Run(path), checkpoint.manifest, assignments)
    )
    checkpoint, origin = replace(checkpoint, began=origin.began), _Origin() if plain else origin
    config, beside, along = origin.config, origin.folder, origin.along
    if config is None and format == "hf":
        raise WrongUse(f"the model of {path} is not one of Hugging Face's. Use --format safetensors.")
    lora = LoraExport.of(origin.model, beside)
    if merge and lora is None:
        raise WrongUse(f"{path} has trained no LoRA to merge. Leave --merge out.")
    others = beside_names(origin.model)
    selection = None if lora is None else lora.merged(checkpoint, others) if merge else lora.alone()
    if others:
        selection = (selection or everything(checkpoint)).without(others)
    if lora is not None and not merge:
        config, along = None, lora.describing(along)
    try:
        files = export(checkpoint, to, config, beside, progress, selection=selection, along=along)
    except Damaged as damage:
        raise WrongUse(f"{damage}. Choose another checkpoint with --step; phalanx verify {path} says which.") from None
    kind = "safetensors" if config is None else "a Hugging Face folder"
    if lora is not None and not merge:
        advice = f"peft's PeftModel.from_pretrained(base, {str(to)!r}) reads it; --merge writes the whole model."
        return Verdict(True, f"exported step {checkpoint.manifest.step} as LoRA", _sizes(files), next=advice)
    advice = f"phalanx train TASK --init-from {to} begins from it."
    if config is not None:
        advice = f"transformers' from_pretrained({str(to)!r}) reads it, and {advice}"
    return Verdict(True, f"exported step {checkpoint.manifest.step} as {kind}", _sizes(files), next=advice)


def _sizes(files: list[Path]) -> list[str]:
    return [f"{file} {file.stat().st_size:,} bytes" for file in files]


def _chosen(manager: CheckpointManager, step: int | None) -> Checkpoint:
    steps = manager.steps()
    if not steps:
        raise WrongUse(f"there is no checkpoint in {manager.store.url}. Train first, or give another run.")
    if step is not None and step not in steps:
        raise WrongUse(f"there is no checkpoint of step {step}. Choose one of: {', '.join(map(str, steps))}.")
    try:
        return manager.open(max(steps) if step is None else step)
    except Damaged as damage:
        raise WrongUse(f"{damage}. Choose another checkpoint with --step.") from None


@dataclass(frozen=True)
class _Origin:
    """What a run's settings say of its model."""

    model: nn.Module = field(default_factory=nn.Module)
    """Described, without weights."""
    config: Any = None
    """Its configuration, if it is one of Hugging Face's."""
    folder: Path | None = None
    """Where its weights came from."""
    along: Callable[[Path], None] = lambda folder: None
    """Writes all that belongs to it."""
    began: Callable[[str], Tensor] | None = None
    """Gives the weights that checkpoints leave out."""

    @classmethod
    def of(cls, run: Run, manifest: Manifest, assignments: Sequence[str]) -> _Origin:
        """Nothing of a run without settings."""
        if not exists(run.settings_path):
            if manifest.frozen:
                raise WrongUse(
                    f"the checkpoint leaves {many(len(manifest.frozen), 'frozen weight')} to "
                    f"{manifest.facts['frozen']['from']}, and {run.path} does not say how they are made. Give the "
                    "folder of the run, with --checkpoints where these lie elsewhere."
                )
            return cls()
        saved = run.settings()
        values = over(saved.get("settings", {}), parse_assignments(assignments))
        task = make_task(find_task(run.task(), saved["run"].get("folder")), values)
        blueprint = Blueprint(building(task), task.seed)
        config = getattr(blueprint.model, "config", None)
        begun = saved["run"].get("init_from") or task.pretrained()
        began = beginnings(blueprint, begun, task, manifest) if manifest.frozen else None
        known, folder = config if hasattr(config, "save_pretrained") else None, begun
        if isinstance(folder, Mapping):
            folder = folder.get("")
        return cls(blueprint.model, known, None if folder is None else Path(folder), task.write_along, began)
