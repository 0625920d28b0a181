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
from phalanx.checkpoint.verify import check_committed, manager_of
from phalanx.errors import WrongUse
from phalanx.files import exists
from phalanx.models.beside import beside_names
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import building
from phalanx.run import Run
from phalanx.settings import make_task, over, parse_assignments
from phalanx.train.exporting_lora import LoraExport
from phalanx.train.trusted import task_of
from phalanx.verdict import Verdict
from phalanx.words import listed, many

MODEL = "model"
"""The weights that are exported where none are named: the model's own."""
SHOWN = 3
"""So many weights are named."""
FORMATS = ("safetensors", "pt", "hf")
PLAIN = ("safetensors", "pt")
"""Those that say nothing of the model beside its weights, so that the task's code is not needed for them."""


def export_run(
    path: Path,
    to: Path,
    format: str | None = None,
    step: int | None = None,
    progress: Progress | None = None,
    checkpoints: str | None = None,
    merge: bool = False,
    assignments: Sequence[str] = (),
    *,
    best: bool = False,
    weights: str = MODEL,
    trust: bool = False,
) -> Verdict:
    """Write the weights of a run's last checkpoint, of the best by a measure, or of a step's, into a new folder.

    A run that has ended with its best weights gives those, unless a step is named.

    Where LoRA was trained, that alone is written, as peft does, or with ``merge`` the model that it makes of its base.
    ``assignments``: settings that are others than the run's, as where its base lies now. ``weights``: the model's own,
    or those that a callback of this name keeps. ``trust``: run the code that another user's run.toml names.
    """
    if format not in (None, *FORMATS):
        raise WrongUse(f"--format {format} is not known. Choose one of: {', '.join(FORMATS)}.")
    plain = format in PLAIN
    if merge and plain:
        raise WrongUse(f"--merge writes a Hugging Face folder. Leave --format {format} out.")
    run = Run(path)
    manager = manager_of(checkpoints or str(path), "Give that URL with --checkpoints.")
    checkpoint = _chosen(manager, run, step, best)
    chosen = checkpoint if weights.lower() == MODEL else checkpoint.with_weights(weights)
    origin = _Origin()
    if not plain or checkpoint.manifest.frozen:
        origin = _Origin.of(run, checkpoint.manifest, assignments, trust)
    checkpoint, origin = replace(chosen, began=origin.began), _Origin() if plain else origin
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
        files = export(
            checkpoint, to, config, beside, progress, selection=selection, along=along, pt=format == "pt"
        )  # fmt: skip
    except Damaged as damage:
        raise WrongUse(f"{damage}. Choose another checkpoint with --step; phalanx verify {path} says which.") from None
    kind = "as safetensors" if config is None else "as a Hugging Face folder"
    advice = f"phalanx train TASK --init-from {to} begins from it."
    if format == "pt":
        kind, advice = "for torch.load", f"model.load_state_dict(torch.load({str(files[0])!r}, weights_only=True))"
    elif lora is not None and not merge:
        kind = "as LoRA"
        advice = f"peft's PeftModel.from_pretrained(base, {str(to)!r}) reads it; --merge writes the whole model."
    elif config is not None:
        advice = f"transformers' from_pretrained({str(to)!r}) reads it, and {advice}"
    told = [*_told(checkpoint, weights), *_told_best(manager, checkpoint.manifest.step)]
    told += [f"{file} {file.stat().st_size:,} bytes" for file in files]
    return Verdict(True, f"exported step {checkpoint.manifest.step} {kind}", told, next=advice)


def _told_best(manager: CheckpointManager, step: int) -> list[str]:
    best = manager.best()
    if best is None:
        return []
    return [str(best)] if best.step == step else [f"{best}, is another: --best exports it"]


def _told(checkpoint: Checkpoint, weights: str) -> list[str]:
    """What is to be known of the weights that were written."""
    found = [f"note: {checkpoint.caution}"] if checkpoint.caution else []
    if checkpoint.stands_in:
        every = checkpoint.manifest.weights()
        rest = sorted(every.keys() - {name.removeprefix("model/") for name in checkpoint.stands_in})
        of = f"{len(checkpoint.stands_in)} of {len(every)} weights and buffers are those of {weights}"
        found.append(f"{of}; {listed(rest, SHOWN)} {'is' if len(rest) == 1 else 'are'} the model's" if rest else of)
    return found


def _chosen(manager: CheckpointManager, run: Run, step: int | None, best: bool) -> Checkpoint:
    steps = manager.steps()
    if not steps:
        raise WrongUse(f"there is no checkpoint in {manager.store.url}. Train first, or give another run.")
    if best and step is not None:
        raise WrongUse("--best and --step name a checkpoint each. Give one of them.")
    if step is not None and step not in steps:
        raise WrongUse(f"there is no checkpoint of step {step}. Choose one of: {', '.join(map(str, steps))}.")
    try:
        checkpoint = manager.open(_best(manager, run) if best else _last(run, steps) if step is None else step)
        checkpoint.manifest.check_facts(checkpoint.where)
        check_committed(run, checkpoint)
        return checkpoint
    except Damaged as damage:
        raise WrongUse(f"{damage}. Choose another checkpoint with --step.") from None


def _best(manager: CheckpointManager, run: Run) -> int:
    found = manager.best()
    if found is None:
        raise WrongUse(
            f"{run.path} has kept no checkpoint as the best. Train with --set keep_best=MEASURE and evaluate_every, or "
            "choose one with --step."
        )
    return found.step


def _last(run: Run, steps: Sequence[int]) -> int:
    """The last of these steps; of a run that has ended there, the one whose weights are in ``final``."""
    final = run.final_step() if run.certified_steps() == max(steps) else None
    return max(steps) if final is None or final not in steps else final


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
    def of(cls, run: Run, manifest: Manifest, assignments: Sequence[str], trust: bool) -> _Origin:
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
        without = "" if manifest.frozen else ", or --format safetensors, which needs none of it"
        kind = task_of(run.settings_path, {**saved["run"], "task": run.task()}, trust, without)
        task = make_task(kind, values)
        blueprint = Blueprint(building(task), task.seed)
        config = getattr(blueprint.model, "config", None)
        begun = saved["run"].get("init_from") or task.pretrained()
        began = beginnings(blueprint, begun, task, manifest) if manifest.frozen else None
        known, folder = config if hasattr(config, "save_pretrained") else None, begun
        if isinstance(folder, Mapping):
            folder = folder.get("")
        return cls(blueprint.model, known, None if folder is None else Path(folder), task.write_along, began)
