"""Numbers that an optimizer changes as it goes are noted by weight, and put back as what they were."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.train.numbers import Numbers


def made() -> torch.optim.Optimizer:
    found = []
    for name in ("a", "b"):
        weight = nn.Parameter(torch.zeros(2))
        weight.logical_name = name  # type: ignore[attr-defined]
        found.append({"params": [weight], "betas": (0.9, 0.99)})
    return torch.optim.Adam(found, lr=0.1)


def test_what_has_changed_is_noted_and_put_back() -> None:
    first = made()
    numbers = Numbers(first)
    assert numbers.facts() == {"options": {}, "attributes": {}}
    first.param_groups[1] |= {"betas": (0.5, 0.6), "lr": 3.0, "tried": 7}
    facts = numbers.facts()
    assert facts["options"] == {"b": {"betas": (0.5, 0.6), "tried": 7}}, "a schedule sets the rate"
    then = made()
    facts["options"]["b"]["betas"] = [0.5, 0.6]  # as JSON has it
    Numbers(then).restore(facts)
    assert then.param_groups[1]["betas"] == (0.5, 0.6)
    assert then.param_groups[1]["tried"] == 7
    assert then.param_groups[0]["betas"] == (0.9, 0.99)
