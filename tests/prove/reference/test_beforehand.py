"""A proof also covers what is known of samples before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.prove.proof import prove
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.prove.reference.loop import Reference
from tests.train.test_beforehand import FromWhereItBegan


def test_one_device_knows_it_by_a_plain_loop() -> None:
    reference = Reference(hostile(FromWhereItBegan(), Trial(2)))
    with torch.no_grad():
        for index in (0, 5):
            sample = reference.data[index]
            assert torch.allclose(reference.model(sample["x"].double()), sample["began"], atol=1e-12)
    assert len(reference.known["began"]) == 7


@dataclass
class OtherOnEachRank(FromWhereItBegan):
    """Knows other things of a sample on another rank."""

    def beforehand(self) -> Callable[[Any, dict[str, Any]], Mapping[str, Tensor]]:
        own = dist.get_rank() if dist.is_initialized() else 0
        return lambda output, batch: {"began": output + own}


def test_layouts_hold_and_a_mistake_in_it_is_seen() -> None:
    assert prove(FromWhereItBegan(), ["dp=2", "fsdp=2"], check=False).holds
    assert not prove(OtherOnEachRank(), ["dp=2"], check=False).holds
