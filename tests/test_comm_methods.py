"""What is known of methods."""

from __future__ import annotations

from phalanx.comm import Comm
from phalanx.comm_methods import CANDIDATES, TOLERANCE, allowed


def test_methods_are_ordered_and_known() -> None:
    sizes = [method.bytes for method in CANDIDATES]
    assert sizes == sorted(sizes, reverse=True)
    assert CANDIDATES[0].name == "exact"
    assert all(Comm.parse(method.name) is not None for method in CANDIDATES[1:])
    assert all(method.seen for method in CANDIDATES)


def test_exact_is_always_allowed_and_int4_by_default() -> None:
    assert [method.name for method in allowed(0.0)] == ["exact", "bf16", "int8"]
    assert [method.name for method in allowed(TOLERANCE)][-1] == "int4"
