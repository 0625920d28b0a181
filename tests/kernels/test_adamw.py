"""Adam in one pass against torch's own, interpreted: odd sizes and places, every dtype, weights at different steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from phalanx import adamw
from phalanx.kernels import choice
from phalanx.kernels.adamw import KERNEL, Hyperparameters, OnePass, Updated
from phalanx.kernels.moments import DTYPES
from phalanx.parallel.weights.boxes import Box, ShardBox, segments
from tests.kernels.apart import runs

SIZES = (1, 16, 33, 1024, 8192, 20_000)
BETAS, TINY, FACTOR = (0.9, 0.9999), 1e-6, 0.37


def compare(device: str) -> None:
    """Kernels on a device and torch's Adam in float64, on fresh random numbers."""
    seed = torch.seed()
    choice.interpreted = device == "cpu"
    assert KERNEL.works(torch.device(device))
    for dtype, copied, decoupled in product((torch.float32, torch.bfloat16), (True, False), (True, False)):
        told = seed, dtype, copied, decoupled
        weights = [torch.randn(size, device=device) for size in SIZES]
        moments = [torch.zeros(2, size, device=device) for size in SIZES]
        copies = [weight.bfloat16() if copied else None for weight in weights]
        twins = [nn.Parameter(weight.double()) for weight in weights]
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer, one_pass = kind(twins, lr=0.02, betas=BETAS, eps=TINY, weight_decay=0.1), OnePass()
        for step in range(1, 4):
            flat = torch.randn(sum(SIZES) + 1, device=device).mul_(50).to(dtype)[step % 2 :]
            gradients = flat[: sum(SIZES)].split(SIZES)
            for twin, gradient in zip(twins, gradients, strict=True):
                twin.grad = gradient.double() * FACTOR
            optimizer.step()
            numbers = Hyperparameters(step, 0.02, BETAS, TINY, 0.1, decoupled)
            lots = zip(weights, gradients, moments, copies, strict=True)
            one_pass.prepared([Updated(w, g, m[0], m[1], c) for w, g, m, c in lots])(numbers, FACTOR)
        for weight, twin, moment, copy in zip(weights, twins, moments, copies, strict=True):
            assert torch.allclose(weight.double(), twin, rtol=1e-4, atol=1e-6), told
            kept = optimizer.state[twin]
            assert torch.allclose(moment[0].double(), kept["exp_avg"], rtol=1e-4, atol=1e-4), told
            assert torch.allclose(moment[1].double(), kept["exp_avg_sq"], rtol=1e-4, atol=1e-4), told
            rounding = 2**-7 if choice.interpreted else 2**-8  # which interpreted is down
            assert copy is None or torch.allclose(copy.float(), weight, rtol=rounding, atol=0), told


def compare_narrow(device: str) -> None:
    """Narrow moments, of weights that are cut in every way, against the optimizer itself: rounded by the same draws."""
    seed = torch.seed()
    choice.interpreted = device == "cpu"
    assert adamw.KERNEL.works(torch.device(device))
    parts = {
        "whole": (torch.Size([33, 16]), [ShardBox(Box((0, 0), (33, 16)), 0, 0)]),
        "rows": (torch.Size([70, 5]), [ShardBox(Box((3, 0), (61, 5)), 0, 0)]),
        "columns": (torch.Size([9, 40]), [ShardBox(Box((2, 7), (7, 30)), 1, 0)]),
        "joined": (torch.Size([9, 41]), [ShardBox(Box((2, 7), (3, 11)), 1, 0), ShardBox(Box((2, 20), (3, 6)), 1, 11)]),
    }
    for moments, dtype in (("bfloat16", torch.float32), ("float8", torch.bfloat16)):
        twins, updates = [], []
        for name, (shape, boxes) in parts.items():
            size = (*boxes[0].box.sizes[:-1], sum(place.box.sizes[-1] for place in boxes))
            twin = nn.Parameter(torch.randn(size, device=device))
            vars(twin).update(logical_name=name, logical_boxes=boxes, logical_shape=shape)
            kept = torch.zeros(2, *size, dtype=DTYPES[moments], device=device)
            twins.append(twin)
            places = tuple(segments(size, boxes, shape))
            updates.append((twin.detach().clone(), kept, twin.detach().bfloat16(), places))
        optimizer = adamw.AdamW(twins, lr=0.02, betas=BETAS, eps=TINY, weight_decay=0.1, moments=moments, seed=3)
        one_pass, flips = OnePass(), 0
        for step in (1, 2):
            updated = []
            for twin, (weight, kept, copy, places) in zip(twins, updates, strict=True):
                gradient = torch.randn_like(twin).to(dtype)
                twin.grad = gradient.float() * FACTOR
                key = adamw.key(optimizer.defaults, twin)
                updated.append(Updated(weight, gradient, kept[0], kept[1], copy, key, places))
            one_pass.prepared(updated)(Hyperparameters(step, 0.02, BETAS, TINY, 0.1, True), FACTOR)
            optimizer.step()
        for twin, (weight, kept, copy, _) in zip(twins, updates, strict=True):
            assert torch.allclose(weight, twin, rtol=1e-4, atol=1e-5), (seed, moments, twin.logical_name)
            assert torch.allclose(copy.float(), weight, rtol=2**-7, atol=0)
            own = zip(kept, (optimizer.state[twin][name] for name in adamw.KEPT), strict=True)
            flips += sum(int((mine != theirs).sum()) for mine, theirs in own)
        assert flips <= 4, (seed, moments, flips)  # which another rounding of the sum puts on the other side of a draw


def test_the_kernel_is_its_twin() -> None:
    runs("import tests.kernels.test_adamw as test; test.compare('cpu')", TRITON_INTERPRET="1")


def test_narrow_moments_are_rounded_as_by_the_twin() -> None:
    runs("import tests.kernels.test_adamw as test; test.compare_narrow('cpu')", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_kernel_is_its_twin_on_a_gpu() -> None:
    compare("cuda")
    compare_narrow("cuda")
