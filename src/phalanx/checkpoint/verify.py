"""Checking a run's checkpoints offline: every byte read, every checksum and hash made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.hashing import hashed
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.manifest import Damaged, Manifest
from phalanx.checkpoint.store import open_store
from phalanx.errors import CannotHere, WrongUse
from phalanx.files import exists
from phalanx.parallel.weights.boxes import Box
from phalanx.redact import is_redacted
from phalanx.run import Run
from phalanx.verdict import Verdict
from phalanx.words import many

Progress = Callable[[str, int, int], None]
"""Told which checkpoint is read, and how many of its bytes have been."""


def manager_of(path: str, advice: str = "Give that URL itself.") -> CheckpointManager:
    """The checkpoints of a run, given its folder, or the folder or URL that they lie in.

    ``advice``: what to do where the run's folder does not hold all of that URL.
    """
    if "://" not in path:
        run = Run(path)
        if exists(run.settings_path):
            elsewhere = run.settings().get("run", {}).get("checkpoints")
            if is_redacted("checkpoints", elsewhere):
                raise WrongUse(f"{path} keeps its checkpoints at {elsewhere}, whose secret it does not hold. {advice}")
            return CheckpointManager(open_store(elsewhere or run.checkpoints_path))
        if not exists(run.path):
            raise WrongUse(f"{path} is not there. Give the folder of a run, or the one its checkpoints lie in.")
        if run.checkpoints_path.exists():
            return CheckpointManager(open_store(run.checkpoints_path))
    return CheckpointManager(open_store(path))


shelf_of = manager_of  # as it was documented first


def verify(path: str, progress: Progress | None = None) -> Verdict:
    """Whether every checkpoint there is whole, and the final weights are those of the last."""
    try:
        return _verify(path, progress)
    except OSError as error:
        advice = "Mount it, or see that you may read it."
        raise CannotHere(f"{error.filename or path} cannot be read: {error.strerror or error}. {advice}") from None


def _verify(path: str, progress: Progress | None) -> Verdict:
    manager = manager_of(path)
    whole, wrong, lines = 0, [], []
    newest: Manifest | None = None
    steps = manager.steps()
    for step in steps:
        found = _check(manager, step, progress)
        if isinstance(found, Manifest):
            whole, newest = whole + 1, found
            lines.append(
                f"step {step:>8}  whole    {found.size:>15,} bytes  {len(found.tensors)} tensors  "
                f"written as {found.facts['layout']}  weights {found.hash()[:16]}"
            )
            if found.frozen:
                origin = found.facts["frozen"]["from"]
                lines[-1] += f"  {many(len(found.frozen), 'frozen weight')} left to {origin}"
        else:
            wrong += found
            by_file: dict[str, list[Damaged]] = {}
            for damage in found:
                by_file.setdefault(damage.file, []).append(damage)
            for damages in by_file.values():
                more = f", and {len(damages) - 1} more there" if len(damages) > 1 else ""
                lines.append(f"step {step:>8}  DAMAGED  {damages[0]}{more}")
    lines += [f"unfinished: {name}; it is no checkpoint, and goes when the run goes on" for name in manager.leftovers()]
    lines += [f"set aside: {name}, found damaged when the run went on" for name in manager.damaged()]
    final = Run(path).weights_path
    if newest is not None and final.exists() and newest.step == Run(path).certified_steps():
        differs = final_differs(final, newest)
        wrong += differs
        lines.append(f"{final}: " + (str(differs[0].reason) if differs else "the weights of the last checkpoint"))
    if not steps:
        return Verdict(False, f"there is no checkpoint in {manager.store.url}", lines,
                       next="Give a run's folder, or train with --save-steps.")  # fmt: skip
    if wrong:
        good = f"The run can go on from step {newest.step}" if newest else "None of them can be gone on from"
        return Verdict(False, f"{len(wrong)} damages in {len(steps)} checkpoints", lines, next=f"{good}.")
    return Verdict(True, f"{whole} of {len(steps)} checkpoints are whole", lines)


def _check(manager: CheckpointManager, step: int, progress: Progress | None) -> Manifest | list[Damaged]:
    try:
        checkpoint = manager.open(step)
    except Damaged as damage:
        return [damage]
    done = 0

    def advanced(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(f"step {step}", done, checkpoint.manifest.size)

    return list(checkpoint.verify(advanced)) or checkpoint.manifest


def final_differs(path: Path, manifest: Manifest) -> list[Damaged]:
    """Whether the final weights are, bit for bit, those of a checkpoint."""
    wanted = manifest.weights()
    try:
        if not path.is_file():
            return [Damaged(str(path), "is no regular file")]
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in sorted(wanted.keys() | {name for name in names if 0 not in file.get_slice(name).get_shape()}):
                tensor = file.get_tensor(name) if name in names and name in wanted else None
                if tensor is None or hashed(tensor, Box.whole(tensor), tensor.shape) != wanted[name].hash:
                    return [Damaged(str(path), f"is not what step {manifest.step} has: {name} differs")]
    except (SafetensorError, OSError) as error:
        return [Damaged(str(path), f"is not a whole safetensors file: {error}")]
    return []
