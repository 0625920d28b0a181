"""SOAP: what its words say, on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.optim import SOAP


def gradients(shape: tuple[int, ...], steps: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(steps)]


def updated(shape: tuple[int, ...], given: list[torch.Tensor], **options: Any) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    optimizer = SOAP([weight], lr=0.1, weight_decay=0.0, **options)
    for gradient in given:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight


def test_against_a_loop_by_hand() -> None:
    """Adam in the bases that orthogonal iteration gives, every third step, moments turned with them."""
    given, (first, second) = gradients((5, 3), 7), (0.9, 0.95)
    weight = torch.ones(5, 3, dtype=torch.float64)
    bases = [torch.eye(5, dtype=torch.float64), torch.eye(3, dtype=torch.float64)]
    sums = [torch.zeros(5, 5, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)]
    moment, squares = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(given, 1):
        sums[0] = second * sums[0] + (1 - second) * gradient @ gradient.T
        sums[1] = second * sums[1] + (1 - second) * gradient.T @ gradient
        if step in (1, 4, 7):
            unturned = bases[0] @ moment @ bases[1].T
            for side in range(2):
                damped = sums[side] + 1e-2 * sums[side].trace() / len(sums[side]) * torch.eye(len(sums[side]))
                basis, triangle = torch.linalg.qr(damped @ bases[side])
                bases[side] = basis * triangle.diagonal().sign()
            moment = bases[0].T @ unturned @ bases[1]
        turned = bases[0].T @ gradient @ bases[1]
        moment = first * moment + (1 - first) * turned
        squares = second * squares + (1 - second) * turned**2
        update = (moment / (1 - first**step)) / ((squares / (1 - second**step)).sqrt() + 1e-8)
        weight = weight - 0.1 * bases[0] @ update @ bases[1].T
    found = updated((5, 3), given, betas=(first, second), every=3)
    assert torch.allclose(found, weight, rtol=1e-12)


def test_without_bases_it_is_adam() -> None:
    for shape, options in (((7,), {}), ((5, 3), {"largest": 2}), ((2, 3, 2, 2), {})):
        weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))
        adam = torch.optim.Adam([weight], lr=0.1, betas=(0.95, 0.95))
        given = gradients(shape, 4)
        for gradient in given:
            weight.grad = gradient.clone()
            adam.step()
        assert torch.allclose(updated(shape, given, **options), weight, rtol=1e-10)


def test_stacked_matrices_are_updated_each_by_itself() -> None:
    given = gradients((3, 4, 5), 5)
    stacked = updated((3, 4, 5), given, every=2)
    for index in range(3):
        assert torch.allclose(stacked[index], updated((4, 5), [g[index] for g in given], every=2), rtol=1e-10)


def test_a_quadratic_that_is_turned_is_no_harder() -> None:
    """Its own basis is found: it gets where Adam, on coordinates that correlate, does not."""
    draw = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(12, 12, generator=draw))[0]
    scales = turn @ torch.diag(torch.logspace(-2, 1, 12)) @ turn.T
    start = torch.randn(12, 12, generator=draw)

    def left(kind: Any, **options: Any) -> float:
        weight = nn.Parameter(start.clone())
        optimizer = kind([weight], betas=(0.9, 0.95), weight_decay=0.0, **options)
        for step in range(200):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 200)
            weight.grad = scales @ weight.detach()
            optimizer.step()
        return float((weight * (scales @ weight)).sum().detach())

    assert left(SOAP, every=5) < 1e-2 * left(torch.optim.AdamW)


def test_its_state_goes_on() -> None:
    given = gradients((4, 6), 6)
    whole = updated((4, 6), given, every=2)
    weight = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    optimizer = SOAP([weight], lr=0.1, weight_decay=0.0, every=2)
    for number, gradient in enumerate(given):
        if number == 3:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = SOAP([weight], lr=0.1, weight_decay=0.0, every=2)
            optimizer.load_state_dict(state)
        weight.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(weight, whole)


def test_no_gradient_or_a_gradient_of_zeros_does_no_harm() -> None:
    weight, still = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2))
    optimizer = SOAP([weight, still], weight_decay=0.0)
    weight.grad = torch.zeros(3, 3)
    optimizer.step()
    assert torch.equal(weight, torch.ones(3, 3))
    assert still not in optimizer.state


@pytest.mark.parametrize("options", [{"every": 0}, {"damping": 0.0}, {"betas": (1.0, 0.9)}])
def test_wrong_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"every=.* damping=.* betas="):
        SOAP([nn.Parameter(torch.ones(2, 2))], **options)
