"""Which linears of a model's blocks compute in 8 bits, and how large their numbers were in the step before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

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
        routing = tuple(f"{name.rpartition('.')[0]}." for name in anatomy.experts)
        found: dict[str, nn.Linear] = {}
        for block in anatomy.blocks:
            for name, module in model.get_submodule(block).named_modules(prefix=block):
                if not is_plain(module) or name.startswith(routing):
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
        self._heads: list[Any] = []
        for name in anatomy.after:
            if anatomy.splits.get(name) == "vocabulary":
                self._heads.append(model.get_submodule(name))
                if not fits(*self._heads[-1].weight.shape):
                    self.wide[name] = self._heads[-1].weight.shape
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
        self._steps, self.programs = 0, 0
        """Steps that counted; how often linears have begun to compute otherwise."""
        self._use([False] * len(found), list(range(len(found))))

    def wrap_heads(self) -> None:
        """After whatever makes logits lazy."""
        for head in self._heads:
            wrap(head, Around("fp8 gradients", narrow_logits))

    @torch.no_grad()
    def advance(self) -> None:
        """After a step that counts, on all ranks: what was largest in it, anywhere, is known from now on."""
        if not self.keeps:
            return
        self.world.all_reduce_max(self._found)
        self._steps += 1
        if self._steps <= 2 or (self._unknown and self._steps & (self._steps - 1) == 0):  # the device is waited for
            self._look()
        own = torch.maximum(self._found, self.maxima * FADING)
        found = own.where(self._found > 0, self.maxima)  # a linear that saw nothing stays as it is
        found[:, 0] = (found[:, 0] * self._alike).amax(1)
        self.maxima.copy_(found)
        self.forget()

    def forget(self) -> None:
        """What a step that does not count has noted."""
        self._found.zero_()

    def _look(self) -> None:
        """Which linears have been computed with by now, and need not look for themselves any more.

        Linears of a module whose inputs were as large in both of the first two steps are taken to have the same input.
        """
        rows = self._found.tolist()
        known = [layer.known or all(row) for layer, row in zip(self.layers, rows, strict=True)]
        leaders, first = list(range(len(rows))), dict[tuple[str, int, float], int]()
        for number, name in enumerate(self.names if self._steps <= 2 else ()):
            together = self._leaders[number] if self._steps == 2 else 0
            leaders[number] = first.setdefault((name.rpartition(".")[0], together, rows[number][0]), number)
        self._use(known, leaders if self._steps <= 2 else self._leaders)

    def _use(self, known: list[bool], leaders: list[int]) -> None:
        """``leaders``: for each linear, the one whose scale of the input it uses, so that it is cast once."""
        self._leaders, self._unknown = leaders, not all(known)
        self.programs += 1
        for layer, seen, leader in zip(self.layers, known, leaders, strict=True):
            layer.known, layer.of_x = seen, self.layers[leader].maxima
        numbers = torch.tensor(leaders)
        self._alike = (numbers.unsqueeze(0) == numbers.unsqueeze(1)).to(self.maxima)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Meanwhile linears compute as one device would that has no 8 bits."""
        self.switch.on = False
        try:
            yield
        finally:
            self.switch.on = True

    def state(self) -> dict[str, Any]:
        """For a checkpoint. By linear: what was largest, whether that is used, and whose scale its input has."""
        rows = zip(self.names, self.maxima.tolist(), self.layers, self._leaders, strict=True)
        linears = {name: [*row, float(layer.known), self.names[leader]] for name, row, layer, leader in rows}
        return {"steps": self._steps, "linears": linears}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with these; linears that they do not have measure first."""
        linears, self._steps = state.get("linears", {}), state.get("steps", 0)
        rows = [linears.get(name, [0.0] * (MAXIMA + 1) + [name]) for name in self.names]
        self.maxima.copy_(torch.tensor([row[:MAXIMA] for row in rows]))
        self.forget()
        places = {name: number for number, name in enumerate(self.names)}
        self._use([bool(row[MAXIMA]) for row in rows], [places[row[-1]] for row in rows])


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
