"""SpecAugment of Hugging Face's speech models, keyed: spans that they mask by draws of numpy's, such as wav2vec2's.

These models call a function of their module, `_compute_mask_indices`, for a whole micro-batch. It is led through here,
and called once for each sample, with numpy's generator seeded by the sample's key and put back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from phalanx import counter
from phalanx.parallel.randomness.draws import Randomness

NAME = "_compute_mask_indices"
MASK = 0xFFFFFFFF

computing: list[Randomness] = []
"""Of the models that compute now, the innermost last."""


def key_masked_spans(model: nn.Module) -> None:
    """Have modules of a model's classes draw spans by keys while the model computes."""
    for name in {type(module).__module__ for module in model.modules()}:
        source = sys.modules.get(name)
        own = getattr(source, NAME, None)
        if own is not None and not hasattr(own, "keyed"):
            keyed = functools.wraps(own)(functools.partial(_spans, own))
            keyed.keyed = True  # type: ignore[attr-defined]
            setattr(source, NAME, keyed)


def _spans(
    own: Callable[..., np.ndarray], shape: tuple[int, int], *args: Any, attention_mask: Any = None, **kwargs: Any
) -> np.ndarray:
    """Which places of which samples are masked."""
    randomness = computing[-1] if computing else None
    if randomness is None or shape[0] != len(randomness.moment.slots):
        return own(shape, *args, attention_mask=attention_mask, **kwargs)
    randomness.asked = True
    randomness.calls += 1
    key = counter.key(randomness.seed, "spans", randomness.moment.step, randomness.name, randomness.calls)
    attention_mask = None if attention_mask is None else attention_mask.cpu()  # which each call would ask a GPU for
    before, found = np.random.get_state(), []
    try:
        for row, slot in enumerate(randomness.moment.slots):
            np.random.seed(counter.key(key, "sample", int(slot)) & MASK)
            mask = None if attention_mask is None else attention_mask[row : row + 1]
            found.append(own((1, *shape[1:]), *args, attention_mask=mask, **kwargs))
    finally:
        np.random.set_state(before)
    return np.concatenate(found)
