"""What torch itself raises is told apart by the table: each text is one that some version says."""

from __future__ import annotations

import pytest
import torch

from phalanx.torch_errors import About, is_about, matches


def raised(function: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()  # type: ignore[operator]
    return caught.value


def again() -> None:
    loss = (torch.ones(2, requires_grad=True) ** 2).sum()
    loss.backward()
    loss.backward()


def in_place() -> None:
    y = torch.ones(2, requires_grad=True).exp()
    y += 1
    y.sum().backward()


def test_errors_of_the_torch_that_is_here() -> None:
    assert is_about(raised(again), About.BACKWARD_AGAIN)
    assert is_about(raised(in_place), About.IN_PLACE)
    assert is_about(raised(lambda: torch.ones(2, 3) @ torch.ones(2, 3)), About.SIZES)
    assert is_about(raised(lambda: torch.ones(2) + torch.ones(3)), About.SIZES)
    assert is_about(raised(lambda: torch.ones(1 << 46)), About.MEMORY)
    assert matches(raised(lambda: torch.ones(2, 2) @ torch.ones(2, 2).double()), About.DTYPES) > 1


def test_no_error_is_about_what_it_does_not_say() -> None:
    assert not is_about(KeyError("x"), *About)
    assert not is_about(raised(again), About.IN_PLACE, About.GONE, About.WAITED)
    assert is_about("Connection reset by peer", About.WAITED, About.GONE)
    assert matches("", About.GONE) == 0
