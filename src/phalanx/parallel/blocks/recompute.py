"""Recompute: a block keeps its inputs, or its costly results alone, and does the rest again in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.parallel.forward.wrapper import Forward, Layer
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.torch_private import ATTENTION, GROUPED_PRODUCT, PACKED_ATTENTION, SCALED_PRODUCT, AsTorchDoes

aten = torch.ops.aten
COSTLY = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    GROUPED_PRODUCT,
    SCALED_PRODUCT,
    *ATTENTION,
}
"""Results that ``recompute=selective`` keeps: matrix products, convolutions and attention."""


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    costly = operation in COSTLY or str(operation) == PACKED_ATTENTION
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


class Recompute(Layer):
    """The rest is run again in backward. Its randomness is keyed, so torch's need not be stored."""

    def __init__(self, randomness: Randomness, kind: str) -> None:
        self.randomness, self.selective = randomness, kind == "selective"
        self.title = f"recompute {kind}"

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            rest, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts, **kwargs
        )

    def over(self, rest: Forward) -> Forward:
        return partial(self, AsTorchDoes(rest))

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        again = self.randomness.replayed()
        if not self.selective:
            return nullcontext(), again
        keep, reuse = create_selective_checkpoint_contexts(_policy)
        return keep, _both(reuse, again)


class RecomputeIfAsked(Recompute):
    """The same, where the model asks for it by activation checkpointing of its own."""

    def __init__(self, randomness: Randomness) -> None:
        super().__init__(randomness, "full")
        self.title = "recompute if the model asks"

    def __call__(self, rest: Forward, *args: Any, **kwargs: Any) -> Any:
        if not self.randomness.recomputes_blocks:
            return rest(*args, **kwargs)
        return super().__call__(rest, *args, **kwargs)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Any:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
