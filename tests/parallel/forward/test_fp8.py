"""A linear in 8 bits: near its own forward, and its own where 8 bits are switched off or do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from phalanx.logits import Logits
from phalanx.parallel.forward.fp8 import Fp8Linear, Switch, is_plain, narrow_logits, product
from phalanx.parallel.forward.wrapper import Around, wrap
from tests.kernels.test_fp8 import off


def linear(wide: int = 32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(wide, 48, bias=bias).bfloat16()


def given(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def narrow(module: nn.Linear, rowwise: bool = False) -> tuple[Fp8Linear, Switch]:
    switch = Switch()
    layer = Fp8Linear(module, None if rowwise else torch.zeros(3, requires_grad=True), switch)
    wrap(module, layer)
    return layer, switch


@pytest.mark.parametrize("rowwise", [False, True])
def test_it_is_near_its_own_forward(rowwise: bool) -> None:
    module, x = linear(), given(2, 5, 32)
    expected = module(x).detach()
    narrow(module, rowwise)
    found = module(x)
    assert found.shape == expected.shape
    assert 0 < off(found, expected.float()) < 0.05


@pytest.mark.parametrize(("wide", "rows"), [(31, 4), (32, 0)])
def test_what_does_not_fit_is_done_as_it_is(wide: int, rows: int) -> None:
    module, x = linear(wide), given(rows, wide)
    expected = module(x)
    narrow(module)
    assert torch.equal(module(x), expected)


def test_it_can_be_switched_off() -> None:
    module, x = linear(), given(4, 32)
    expected = module(x)
    _, switch = narrow(module)
    switch.on = False
    assert torch.equal(module(x), expected)


def test_maxima_alone_make_no_graph() -> None:
    module = linear()
    narrow(module)
    assert module(given(4, 32)).requires_grad
    module.requires_grad_(False)
    assert not module(given(4, 32)).requires_grad


def test_a_rank_that_adds_the_bias_later_has_the_product() -> None:
    module, x = linear(), given(4, 32)
    assert torch.equal(product(module, x), F.linear(x, module.weight))
    layer, _ = narrow(module)
    assert torch.equal(product(module, x), layer.product(x))
    assert not torch.equal(product(module, x), F.linear(x, module.weight))


def test_lazy_logits_are_marked_and_others_left() -> None:
    head, other = linear(bias=False), linear()
    wrap(head, Around("lazy", lambda rest, x: Logits(x, head.weight)))
    for module in (head, other):
        wrap(module, Around("fp8 gradients", narrow_logits))
    logits = head(given(4, 32))
    assert isinstance(logits, Logits)
    assert logits.narrow
    assert logits[:2].narrow
    assert isinstance(other(given(4, 32)), torch.Tensor)


def test_only_plain_linears_are() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    replaced = linear()
    replaced.forward = lambda x: x  # type: ignore[method-assign,assignment]
    frozen = linear()
    frozen.weight = nn.Parameter(torch.ones(48, 32, dtype=torch.int8), requires_grad=False)
    assert is_plain(linear())
    assert not any(map(is_plain, [nn.ReLU(), Own(4, 4), replaced, frozen, parametrizations.weight_norm(linear())]))
