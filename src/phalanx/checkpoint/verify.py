"""Checking a run's checkpoints offline: every byte read, every checksum and hash made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.hashing import hashed, joined
from phalanx.checkpoint.manager import Checkpoint, CheckpointManager
from phalanx.checkpoint.manifest import Damaged, Manifest
from phalanx.checkpoint.store import open_store
from phalanx.errors import CannotHere, WrongUse
from phalanx.files import exists
from phalanx.folder_files import another_user
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
            check_store(run, elsewhere)
            return CheckpointManager(open_store(elsewhere or run.checkpoints_path))
        if not exists(run.path):
            raise WrongUse(f"{path} is not there. Give the folder of a run, or the one its checkpoints lie in.")
        if run.checkpoints_path.exists():
            return CheckpointManager(open_store(run.checkpoints_path))
    return CheckpointManager(open_store(path))


def check_store(run: Run, url: object) -> None:
    """Refuse a store that a ``run.toml`` names, where opening it may do more than read what is the caller's own.

    Whoever opens a store does so with their own keys. One that is made of several (``reference::...``) may run code.
    """
    if url is None or (isinstance(url, str) and "://" not in url):
        return
    whose = another_user(run.settings_path)
    if not isinstance(url, str) or "::" in url or whose:
        belongs = f", which belongs to {whose}," if whose else ""
        raise WrongUse(
            f"{run.settings_path}{belongs} keeps its checkpoints at {url}, which is not opened for that. Give it "
            "yourself if you know it: phalanx verify URL, or --checkpoints URL."
        )


shelf_of = manager_of  # as it was documented first


def verify(path: str, progress: Progress | None = None) -> Verdict:
    """Whether every checkpoint there is whole, and the final weights are those of the last."""
    try:
        return _verify(path, progress)
    except OSError as error:
        advice = "Mount it, or see that you may read it."
        raise CannotHere(f"{error.filename or path} cannot be read: {error.strerror or error}. {advice}") from None


def _verify(path: str, progress: Progress | None) -> Verdict:
    manager, run = manager_of(path), Run(path)
    wrong: list[Damaged] = []
    lines: list[str] = []
    whole: dict[int, Manifest] = {}
    steps = manager.steps()
    for step in steps:
        damages = _check(manager, run, step, progress)
        if isinstance(damages, Checkpoint):
            found = whole[step] = damages.manifest
            lines.append(
                f"step {step:>8}  whole    {found.size:>15,} bytes  {len(found.tensors)} tensors  "
                f"written as {found.facts['layout']}  weights {found.hash()[:16]}"
            )
            if found.frozen:
                origin = found.facts["frozen"]["from"]
                lines[-1] += f"  {many(len(found.frozen), 'frozen weight')} left to {origin}"
            lines += [f"step {step:>8}  note     {damages.caution}"] if damages.caution else []
        else:
            wrong += damages
            by_file: dict[str, list[Damaged]] = {}
            for damage in damages:
                by_file.setdefault(damage.file, []).append(damage)
            for own in by_file.values():
                more = f", and {len(own) - 1} more there" if len(own) > 1 else ""
                lines.append(f"step {step:>8}  DAMAGED  {own[0]}{more}")
    lines += [f"unfinished: {name}; it is no checkpoint, and goes when the run goes on" for name in manager.leftovers()]
    lines += [f"set aside: {name}, found damaged when the run went on" for name in manager.damaged()]
    newest = whole.get(max(whole, default=0))
    differs = _final(run, whole)
    wrong += differs
    lines += [f"{damage.file}: {damage.reason}" for damage in differs]
    left = whole.get(run.final_step() or -1)
    if left is not None and not differs and run.weights_path.exists():
        which = "the last checkpoint" if left is newest else f"step {left.step}, the best"
        lines.append(f"{run.weights_path}: the weights of {which}")
    if not steps:
        return Verdict(False, f"there is no checkpoint in {manager.store.url}", lines,
                       next="Give a run's folder, or train with --save-steps.")  # fmt: skip
    if wrong:
        good = f"The run can go on from step {newest.step}" if newest else "None of them can be gone on from"
        return Verdict(False, f"{len(wrong)} damages in {len(steps)} checkpoints", lines, next=f"{good}.")
    return Verdict(True, f"{len(whole)} of {len(steps)} checkpoints are whole", lines)


def check_committed(run: Run, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with other weights than the run's events say were committed for its step."""
    manifest = checkpoint.manifest
    noted, found = run.committed().get(manifest.step), manifest.hash()
    if noted is not None and noted != found:
        raise Damaged(
            checkpoint.where,
            f"is not what {run.path} has saved: its weights are {found[:16]}, and those that the run's events tell "
            f"of step {manifest.step} were {noted[:16]}",
        )


def _check(manager: CheckpointManager, run: Run, step: int, progress: Progress | None) -> Checkpoint | list[Damaged]:
    try:
        checkpoint = manager.open(step)
        checkpoint.manifest.check_facts(checkpoint.where)
        check_committed(run, checkpoint)
    except Damaged as damage:
        return [damage]
    done = 0

    def advanced(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(f"step {step}", done, checkpoint.manifest.size)

    return list(checkpoint.verify(advanced)) or checkpoint


def _final(run: Run, whole: dict[int, Manifest]) -> list[Damaged]:
    """What final weights, their certificate and the checkpoint of that step say differently."""
    certified, path = run.certified_hash(), run.weights_path
    saved = whole.get(run.final_step() or -1)
    if saved is not None and certified not in (None, saved.hash()):
        words = f"certifies weights {str(certified)[:16]}, and step {saved.step} has {saved.hash()[:16]}"
        return [Damaged(str(run.certificate_path), words)]
    if not path.exists() or (saved is None and certified is None):
        return []
    if saved is not None:
        return final_differs(path, saved)
    try:
        found = _hash_of_file(path)
    except (SafetensorError, OSError) as error:
        return [Damaged(str(path), f"is not a whole safetensors file: {error}")]
    if found != certified:
        return [Damaged(str(path), f"has weights {found[:16]}, and its certificate is of {str(certified)[:16]}")]
    return []


def _hash_of_file(path: Path) -> str:
    """What `Manifest.hash` is for the weights in a file."""
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if 0 not in file.get_slice(name).get_shape()]  # noqa: SIM118

        def one(name: str) -> tuple[str, str, tuple[int, ...], int]:
            tensor = file.get_tensor(name)
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            return f"model/{name}", dtype, shape, hashed(tensor, Box.whole(tensor), shape) % (1 << 64)

        return joined(map(one, names))


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
