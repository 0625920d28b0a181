"""Samples mixed with others: mixup and cutmix, whose pairs do not depend on who computes which sample.

Partner and share are drawn where the sample is read, by the generators that the loader seeds with (seed, epoch,
sample): the same at any number of ranks, others in every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import WrongUse, closest


class Mixup:
    """Every sample mixed with another of the data set: ``share`` of it, and the rest of its partner.

    Real numbers are mixed. ``labels`` says which columns are classes, and of how many: they become the probability of
    each, which `phalanx.losses.cross_entropy` takes as targets. Columns in ``keep`` stay the sample's own. The share is
    drawn from Beta(alpha, alpha): 0.2 mixes most samples a little, 1 gives every share alike.
    """

    def __init__(
        self, data: Any, *, alpha: float = 0.2, labels: Mapping[str, int] | None = None, keep: Collection[str] = ()
    ) -> None:
        if not 0 < alpha < math.inf:
            raise WrongUse(f"alpha={alpha} draws no shares. Give a number above 0, such as 0.2.")
        self.data, self.alpha, self.labels, self.keep = data, alpha, dict(labels or {}), frozenset(keep)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        partner, share = np.random.randint(len(self.data)), float(np.random.beta(self.alpha, self.alpha))
        own, other = self.data[index], self.data[partner]
        for name in (*self.labels, *self.keep):
            if name not in own:
                raise WrongUse(f"{type(self).__name__} is told of {name!r}; {closest(name, own)}")
        return self.mixed(own, other, share)

    def mixed(self, own: dict[str, Any], other: dict[str, Any], share: float) -> dict[str, Any]:
        """One sample, of which ``share`` is ``own``."""
        return {name: self._column(name, value, other[name], share) for name, value in own.items()}

    def _column(self, name: str, own: Any, other: Any, share: float) -> Any:
        if name in self.keep:
            return own
        if name in self.labels:
            return self._probabilities(name, own, share) + self._probabilities(name, other, 1 - share)
        one, two = torch.as_tensor(own), torch.as_tensor(other)
        if not one.is_floating_point():
            raise WrongUse(
                f"{type(self).__name__} cannot mix {name!r}, which is {one.dtype}. Name it in labels with its number "
                f"of classes, labels={{{name!r}: 10}}, or leave it as it is, keep=[{name!r}]."
            )
        if one.shape != two.shape:
            raise WrongUse(
                f"{type(self).__name__} cannot mix {name!r} of shapes {tuple(one.shape)} and {tuple(two.shape)}. Make "
                "samples alike, or leave it as it is with keep."
            )
        return share * one + (1 - share) * two

    def _probabilities(self, name: str, label: Any, share: float) -> Tensor:
        classes, number = self.labels[name], int(label)
        if not 0 <= number < classes:
            raise WrongUse(f"a {name!r} of {number} is none of the {classes} classes that labels says. Set it right.")
        return share * torch.nn.functional.one_hot(torch.tensor(number), classes).float()


class CutMix(Mixup):
    """Every image with a box of another's pasted in; ``image`` is the column, ``[..., height, width]``.

    The share of the sample itself is what is left of its area. Other columns are mixed as by `Mixup`, by that share.
    """

    def __init__(
        self,
        data: Any,
        *,
        image: str,
        alpha: float = 1.0,
        labels: Mapping[str, int] | None = None,
        keep: Collection[str] = (),
    ) -> None:
        super().__init__(data, alpha=alpha, labels=labels, keep=keep)
        self.image = image

    def mixed(self, own: dict[str, Any], other: dict[str, Any], share: float) -> dict[str, Any]:
        if self.image not in own:
            raise WrongUse(f"CutMix is told of an image {self.image!r}; {closest(self.image, own)}")
        picture, pasted = torch.as_tensor(own[self.image]).clone(), torch.as_tensor(other[self.image])
        if picture.ndim < 2 or picture.shape != pasted.shape:
            raise WrongUse(
                f"CutMix cannot cut {self.image!r} of shapes {tuple(picture.shape)} and {tuple(pasted.shape)}. Give "
                "images of one size, [..., height, width]."
            )
        height, width = picture.shape[-2:]
        tall, wide = (round(size * math.sqrt(1 - share)) for size in (height, width))
        top, left = np.random.randint(height - tall + 1), np.random.randint(width - wide + 1)
        box = (..., slice(top, top + tall), slice(left, left + wide))
        picture[box] = pasted[box]
        rest = {name: value for name, value in own.items() if name != self.image}
        return {self.image: picture, **super().mixed(rest, other, 1 - tall * wide / (height * width))}
