"""Recompute: a block keeps its inputs, or its costly results alone, and does the rest again in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.parallel.randomness.draws import Moment

aten = torch.ops.aten
COSTLY = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Results that ``recompute=selective`` keeps: matrix products, convolutions and attention."""


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(forward: Callable[..., Any], moment: Moment, selective: bool) -> Callable[..., Any]:
    """``forward`` that is run again in backward. Its randomness is keyed, so torch's need not be stored."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        again = moment.recompute(dict(vars(moment)))
        if not selective:
            return nullcontext(), again
        keep, reuse = create_selective_checkpoint_contexts(_policy)
        return keep, _both(reuse, again)

    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Any:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
