"""Which linears of a model's blocks compute in 8 bits, and how large their numbers were in the step before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.errors import CannotHere, WrongUse
from phalanx.kernels.fp8 import MAXIMA, MULTIPLE, Scaling, fits
from phalanx.layout import Layout
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.forward.fp8 import Fp8Linear, Switch, is_plain, narrow_logits
from phalanx.parallel.forward.wrapper import Around, wrap
from phalanx.parallel.weights.placement import Placement

FADING = 0.97
"""What was largest before the last step counts for so much of itself a step: one quiet step is forgotten slowly."""
CAPABILITY = 8, 9
"""Of GPUs that multiply in 8 bits, from Ada and Hopper on."""


class Fp8:
    """A model's linears in 8 bits. All ranks have the same scales, and go on with them after a resume."""

    def __init__(
        self, model: nn.Module, placement: Placement, scaling: Scaling, device: torch.device, world: Communicator
    ) -> None:
        """Before anything else is put around linears: this is what computes."""
        check(placement.layout, device)
        anatomy, self.keeps = placement.anatomy, scaling == "tensorwise"
        """Whether a step uses what the step before it has found."""
        self.world, self.switch = world, Switch()
        self.wide: dict[str, torch.Size] = {}
        """Linears of blocks that stay as they are, and the shapes of this rank's parts of them."""
        routing = {name.rpartition(".")[0] for name in anatomy.experts}
        found: dict[str, nn.Linear] = {}
        for block in anatomy.blocks:
            for name, module in model.get_submodule(block).named_modules(prefix=block):
                if not is_plain(module) or name.rpartition(".")[0] in routing:
                    continue
                if fits(module.out_features, module.in_features):  # on all ranks alike
                    found[name] = module
                if not fits(*module.weight.shape):
                    self.wide[name] = module.weight.shape
        if not found:
            raise WrongUse(
                f"precision=fp8 finds no linear in the model's {len(anatomy.blocks)} blocks whose sizes are multiples "
                f"of {MULTIPLE}. Use precision=bf16."
            )
        self._heads = [model.get_submodule(n) for n in anatomy.after if anatomy.splits.get(n) == "vocabulary"]
        self.names = list(found)
        self.maxima = torch.zeros(len(found), MAXIMA, device=device)
        self._found = torch.zeros_like(self.maxima)
        self.layers: list[Fp8Linear] = []
        for module, known, noted in zip(found.values(), self.maxima, self._found, strict=True):
            leaf = known.detach().requires_grad_() if self.keeps else None
            if leaf is not None:
                leaf.register_post_accumulate_grad_hook(partial(_note, noted))
            self.layers.append(Fp8Linear(module, leaf, self.switch))
            wrap(module, self.layers[-1])
        self._alike = torch.eye(len(found), device=device)
        """Which linears of a module were given inputs that were as large: the same, by all that is known."""
        self._unknown = self.keeps

    def wrap_heads(self) -> None:
        """After whatever makes logits lazy."""
        for head in self._heads:
            wrap(head, Around("fp8 gradients", narrow_logits))

    @torch.no_grad()
    def advance(self, step: int) -> None:
        """After a step, on all ranks: what was largest in it, anywhere, is known from now on."""
        if not self.keeps:
            return
        self.world.all_reduce_max(self._found)
        found = self._found.where(self._found.isfinite(), 0)  # such a step is skipped, or will be told of
        found = torch.maximum(found, self.maxima * FADING)
        found[:, 0] = (found[:, 0] * self._alike).amax(1)
        self.maxima.copy_(found)
        self.forget()
        if self._unknown and step & (step + 1) == 0:  # after 1, 2, 4, 8 ... steps, since the device is waited for
            rows = self.maxima.tolist()
            self._use([all(row) for row in rows], [row[0] for row in rows])

    def forget(self) -> None:
        """What a backward that does not count has noted."""
        self._found.zero_()

    def _use(self, known: list[bool], of_x: list[float]) -> None:
        """Linears that have been computed with by now need not look for themselves any more."""
        first: dict[tuple[str, float], Tensor | None] = {}
        for name, layer, seen, largest in zip(self.names, self.layers, known, of_x, strict=True):
            layer.known = seen
            layer.of_x = first.setdefault((name.rpartition(".")[0], largest), layer.maxima) if seen else layer.maxima
        self._unknown = not all(known)
        leaves = torch.tensor([id(layer.of_x) for layer in self.layers])
        self._alike = (leaves.unsqueeze(0) == leaves.unsqueeze(1)).to(self.maxima)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Meanwhile linears compute as one device would that has no 8 bits."""
        self.switch.on = False
        try:
            yield
        finally:
            self.switch.on = True

    def state(self) -> dict[str, list[float]]:
        """By linear, for a checkpoint: what was largest, and whether that is used."""
        rows = zip(self.names, self.layers, self.maxima.tolist(), strict=True)
        return {name: [*row, float(layer.known)] for name, layer, row in rows}

    @torch.no_grad()
    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Go on with these; a linear that they do not have measures first."""
        rows = torch.tensor([state.get(name, [0.0] * (MAXIMA + 1)) for name in self.names])
        self.maxima.copy_(rows[:, :MAXIMA])
        self.forget()
        if self.keeps:
            self._use(rows[:, MAXIMA].bool().tolist(), rows[:, 0].tolist())


@torch.no_grad()
def _note(noted: Tensor, leaf: Tensor) -> None:
    assert leaf.grad is not None
    torch.maximum(noted, leaf.grad, out=noted)
    leaf.grad = None


def check(layout: Layout, device: torch.device) -> None:
    """Refuse what 8 bits cannot be had with; a processor computes what a GPU would give."""
    if layout.pp > 1 and layout.schedule == "zb":
        raise WrongUse(
            "schedule=zb leaves gradients of weights for later, which linears in 8 bits make at once. Use "
            "schedule=interleaved or 1f1b with precision=fp8."
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise CannotHere(
            f"precision=fp8 needs a GPU that multiplies in 8 bits (Hopper, Ada or newer), and this is a "
            f"{torch.cuda.get_device_name(device)}. Use precision=bf16."
        )
