"""The residual network: shapes, and batch-norm where it should be."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.models.resnet import ResNet


def test_it_halves_the_image_a_stage_and_classifies() -> None:
    model = ResNet(classes=7, widths=(4, 8, 16), depth=2)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 7)
    assert model.blocks(model.stem(torch.randn(2, 3, 16, 16))).shape == (2, 16, 4, 4)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 1 + 2 * 6 + 2
