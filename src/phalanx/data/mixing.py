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

from phalanx.data.columns import column_of
from phalanx.errors import WrongUse, closest
from phalanx.traces import described


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

    def column(self, name: str) -> Any:
        """A column of all samples as they are before they are mixed."""
        return column_of(self.data, name)

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
                f"{type(self).__name__} cannot mix {name!r}, which is {one.dtype}. {self._instead(name, one)}"
            )
        if one.shape != two.shape:
            raise WrongUse(
                f"{type(self).__name__} cannot mix {name!r} of shapes {tuple(one.shape)} and {tuple(two.shape)}. Make "
                "samples alike, or leave it as it is with keep."
            )
        return share * one + (1 - share) * two

    def _instead(self, name: str, value: Tensor) -> str:
        """What to write for a column of whole numbers."""
        if value.numel() == 1:
            return (
                f"Name it in labels with its number of classes, labels={{{name!r}: 10}}, or leave it as it is, "
                f"keep=[{name!r}]."
            )
        if value.ndim > 1:
            return (
                "If it is a mask of classes, give it as their probabilities, real numbers [classes, height, width]; or "
                f"paste instead of mixing: CutMix(..., masks=[{name!r}])."
            )
        return f"Leave it as it is, keep=[{name!r}], or give real numbers."

    def _probabilities(self, name: str, label: Any, share: float) -> Tensor:
        if (many := torch.as_tensor(label)).numel() != 1:
            raise WrongUse(
                f"labels names {name!r}, which is no class but {described(label)}. {self._instead(name, many)}"
            )
        classes, number = self.labels[name], int(label)
        if not 0 <= number < classes:
            raise WrongUse(f"a {name!r} of {number} is none of the {classes} classes that labels says. Set it right.")
        return share * torch.nn.functional.one_hot(torch.tensor(number), classes).float()


class CutMix(Mixup):
    """Every image with a box of another's pasted in; ``image`` is the column, ``[..., height, width]``.

    ``masks`` are columns of the image's height and width that say something of each pixel: the same box of the other's
    is pasted into them. The share of the sample itself is what is left of its area. Other columns are mixed as by
    `Mixup`, by that share.
    """

    def __init__(
        self,
        data: Any,
        *,
        image: str,
        alpha: float = 1.0,
        labels: Mapping[str, int] | None = None,
        keep: Collection[str] = (),
        masks: Collection[str] = (),
    ) -> None:
        super().__init__(data, alpha=alpha, labels=labels, keep=keep)
        self.image, self.masks = image, tuple(masks)

    def mixed(self, own: dict[str, Any], other: dict[str, Any], share: float) -> dict[str, Any]:
        for what, name in (("an image", self.image), *(("a mask", name) for name in self.masks)):
            if name not in own:
                raise WrongUse(f"CutMix is told of {what} {name!r}; {closest(name, own)}")
        height, width = self._size(own, other)
        tall, wide = (round(size * math.sqrt(1 - share)) for size in (height, width))
        top, left = np.random.randint(height - tall + 1), np.random.randint(width - wide + 1)
        box = (..., slice(top, top + tall), slice(left, left + wide))
        pasted = {}
        for name in (self.image, *self.masks):
            pasted[name] = torch.as_tensor(own[name]).clone()
            pasted[name][box] = torch.as_tensor(other[name])[box]
        rest = {name: value for name, value in own.items() if name not in pasted}
        return {**pasted, **super().mixed(rest, other, 1 - tall * wide / (height * width))}

    def _size(self, own: dict[str, Any], other: dict[str, Any]) -> tuple[int, int]:
        """Height and width of the image; columns of the same are masks, and must be said to be."""
        shape = torch.as_tensor(own[self.image]).shape
        for name in (self.image, *self.masks):
            one, two = torch.as_tensor(own[name]).shape, torch.as_tensor(other[name]).shape
            if len(one) < 2 or one != two or one[-2:] != shape[-2:]:
                raise WrongUse(
                    f"CutMix cannot cut {name!r} of shapes {tuple(one)} and {tuple(two)}. Give images of one size, "
                    "[..., height, width], and masks of that height and width."
                )
        height, width = shape[-2:]
        for name, value in own.items():
            told = name in (self.image, *self.masks, *self.labels, *self.keep)
            if not told and tuple(getattr(value, "shape", ())[-2:]) == (height, width):
                raise WrongUse(
                    f"CutMix would paste {self.image!r} and not {name!r}, which has the same height and width. If it "
                    f"says something of each pixel, paste it, too: masks=[{name!r}]. If not: keep=[{name!r}]."
                )
        return height, width
