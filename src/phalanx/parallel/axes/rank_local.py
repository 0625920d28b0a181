"""Options of torch's modules that look at a rank's own samples, or change weights in forward: refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from phalanx.errors import WrongUse
from phalanx.layout import Layout


def check_modules(model: nn.Module, layout: Layout) -> None:
    """Refuse modules that would train otherwise under a layout than on one device."""
    for name, module in model.named_modules():
        for option, why in _wrong(module, layout):
            raise WrongUse(f"{option} of {name} ({type(module).__name__}) {why}")


def _wrong(module: nn.Module, layout: Layout) -> Iterator[tuple[str, str]]:
    """Options that are wrong under a layout, and why, with what to do."""
    cut = layout.batch_ranks > 1 or layout.micro_batch is not None
    if getattr(module, "max_norm", None) is not None and layout.world > 1:
        yield (
            f"max_norm={module.max_norm}",
            "changes weights in forward, those of a rank's own samples alone. Leave it out, and give the module "
            "normalised rows in forward, or shorten them in a callback after each step.",
        )
    if getattr(module, "scale_grad_by_freq", False) and cut:
        yield (
            "scale_grad_by_freq=True",
            "divides by how often a row occurs among a rank's own samples of a micro-batch. Leave it out, or weigh the "
            "loss by counts over the data.",
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats and layout.batch_ranks > 1:
        yield (
            "track_running_stats=True",
            "remembers means over a rank's own samples. Leave it out, so that evaluation normalises each sample by its "
            "own statistics, or use nn.BatchNorm, whose statistics are those of all ranks.",
        )
