"""``compile=blocks``: a block's own forward as one program of torch.compile's, the same for all that are alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from phalanx.parallel.blocks.probe import Probe
from phalanx.parallel.forward.wrapper import Forward, Layer
from phalanx.parallel.randomness.draws import Randomness


class Compile(Layer):
    """The rest compiled, with the keys of its draws made before it runs. What is only tried runs as it is."""

    title = "compile"

    def __init__(self, randomness: Randomness, probe: Probe) -> None:
        self.randomness, self.probe = randomness, probe

    def __call__(self, plain: Forward, program: Forward, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if self.randomness.may_draw:
            self.randomness.keys()
        return (plain if self.probe.trying else program)(*args, **kwargs)

    def over(self, rest: Forward) -> Forward:
        return partial(self, rest, torch.compile(rest))


class Uncompiled(Layer):
    """The rest as it is, inside of a compiled block: how many rows each expert gets is known only when it runs."""

    title = "uncompiled"

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        return rest(*args, **kwargs)

    def over(self, rest: Forward) -> Forward:
        return torch.compiler.disable(rest)
