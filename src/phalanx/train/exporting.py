"""A run's weights taken out of it, as a user asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from phalanx.checkpoint.export import Progress, everything, export
from phalanx.checkpoint.manager import Checkpoint, CheckpointManager
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.verify import manager_of
from phalanx.errors import WrongUse
from phalanx.files import exists
from phalanx.models.beside import beside_names
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.references import find_task
from phalanx.run import Run
from phalanx.settings import make_task
from phalanx.train.exporting_lora import LoraExport
from phalanx.verdict import Verdict


def export_run(
    path: Path,
    to: Path,
    format: str | None = None,
    step: int | None = None,
    progress: Progress | None = None,
    checkpoints: str | None = None,
    merge: bool = False,
) -> Verdict:
    """Write the weights of a run's last checkpoint, or of a step's, into a new folder.

    Where LoRA was trained, that alone is written, as peft does, or with ``merge`` the model that it makes of its base.
    """
    if format not in (None, "safetensors", "hf"):
        raise WrongUse(f"--format {format} is not known. Choose safetensors or hf.")
    checkpoint = _chosen(manager_of(checkpoints or str(path), "Give that URL with --checkpoints."), step)
    if merge and format == "safetensors":
        raise WrongUse("--merge writes a Hugging Face folder. Leave --format safetensors out.")
    config, beside, model, along = _NOTHING
    if format != "safetensors":
        config, beside, model, along = _hugging_face(Run(path))
        if config is None and format == "hf":
            raise WrongUse(f"the model of {path} is not one of Hugging Face's. Use --format safetensors.")
    lora = LoraExport.of(model, beside)
    if merge and lora is None:
        raise WrongUse(f"{path} has trained no LoRA to merge. Leave --merge out.")
    selection = None if lora is None else lora.merged(checkpoint) if merge else lora.alone()
    if others := beside_names(model):
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


_Exported = tuple[object | None, Path | None, nn.Module, Callable[[Path], None]]
_NOTHING: _Exported = (None, None, nn.Module(), lambda folder: None)


def _hugging_face(run: Run) -> _Exported:
    """The configuration of the run's model if it is one of Hugging Face's, and where its weights came from.

    Also the model, described, and what writes all that belongs to it.
    """
    if not exists(run.settings_path):
        return _NOTHING
    saved = run.settings()
    task = make_task(find_task(run.task(), saved["run"].get("folder")), saved.get("settings", {}))
    model = Blueprint(task.model, task.seed).model
    config = getattr(model, "config", None)
    begun = saved["run"].get("init_from") or task.pretrained()
    begun = begun.get("") if isinstance(begun, Mapping) else begun
    known = hasattr(config, "save_pretrained")
    beside = Path(begun) if begun is not None else None
    return (config if known else None), beside, model, task.write_along
