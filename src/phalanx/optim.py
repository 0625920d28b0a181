"""Optimizers of our own: AdamW with narrow moments (`adamw`), and SOAP, which updates whole matrices.

SOAP is Adam in a basis where the gradient's coordinates hardly correlate.
Beside a weight's moments it keeps averages of ``G Gᵀ`` and ``Gᵀ G`` and, for each side, an orthonormal basis that is
brought nearer to their eigenvectors every few steps by one round of orthogonal iteration (Vyas et al., 2024). Rounds
begin from the unit matrix and are damped, so that a basis is a smooth function of the gradients: eigenvectors
themselves are not, and two layouts that differ by a rounding would choose different ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, optim

from phalanx.adamw import AdamW

__all__ = ["SOAP", "AdamW"]

SIDES = (-2, -1)


class SOAP(optim.Optimizer):
    """Adam in the gradient's own basis. Weights of 2 dims, and each of those stacked in 3, are matrices; others have
    Adam's update.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
        largest: int = 4096,
        damping: float = 1e-2,
    ) -> None:
        """``every``: steps between two rounds. ``largest``: longer sides keep their own basis, as of an embedding.

        ``damping``: added to a covariance before a round, as a share of its mean variance.
        """
        if every < 1 or damping <= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"every={every}, damping={damping}, betas={betas}: from 1 on, above 0, and in [0, 1)")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"every": every, "largest": largest, "damping": damping})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight] or self._begin(weight, group)
        state["step"] += 1
        number = int(state["step"])
        sides = [side for side in SIDES if _basis(side) in state]
        for side in sides:
            matrices = gradient if side == -1 else gradient.mT
            state[_covariance(side)].lerp_(matrices.mT @ matrices, 1 - group["betas"][1])
        if number % group["every"] == 1 or group["every"] == 1:
            for side in sides:
                self._turn(state, side, group["damping"])
        for side in sides:
            gradient = _times(gradient, state[_basis(side)], side)
        update = _adam(state, gradient, number, group)
        for side in sides:
            update = _times(update, state[_basis(side)].mT, side)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])

    def _begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[weight]
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        for side in SIDES if weight.ndim in (2, 3) else ():
            size = weight.shape[side]
            if size <= group["largest"]:
                unit = torch.eye(size, dtype=weight.dtype, device=weight.device)
                state[_basis(side)] = unit.expand(*weight.shape[:-2], size, size).clone()
                state[_covariance(side)] = torch.zeros_like(state[_basis(side)])
        return state

    def _turn(self, state: dict[str, Any], side: int, damping: float) -> None:
        """One round of orthogonal iteration; the first moment goes along with its basis."""
        covariance, before = state[_covariance(side)], state[_basis(side)]
        variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        tiny = torch.finfo(covariance.dtype).tiny
        product = covariance @ before + (damping * variance + tiny) * before
        basis, triangle = torch.linalg.qr(product)
        signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
        basis *= (signs + (signs == 0)).unsqueeze(-2)
        state["exp_avg"] = _times(state["exp_avg"], before.mT @ basis, side)
        state[_basis(side)] = basis.contiguous()


def _adam(state: dict[str, Any], gradient: Tensor, number: int, group: dict[str, Any]) -> Tensor:
    first, second = group["betas"]
    state["exp_avg"].lerp_(gradient, 1 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    scale = (state["exp_avg_sq"] / (1 - second**number)).sqrt_().add_(group["eps"])
    return state["exp_avg"] / scale.mul_(1 - first**number)


def _times(matrix: Tensor, other: Tensor, side: int) -> Tensor:
    """Columns, or rows, in another basis."""
    return matrix @ other if side == -1 else other.mT @ matrix


def _basis(side: int) -> str:
    return "left" if side == -2 else "right"


def _covariance(side: int) -> str:
    return f"{_basis(side)}_covariance"
