"""A product of low rank is cut with its linear: the sum over ranks of what they compute is the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx import Anatomy, Layout, WrongUse
from phalanx.models.lora import FOUR_BITS, Lora, LoraKind, attach
from phalanx.models.nf4 import Divided, FourBits, dequantised
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.parallel.axes.cuts import Plan, gather_inside, make_plan
from tests.parity import PRIME, TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
from tests.ranks import Ranks

F64 = torch.float64


def model(kind: LoraKind = "lora") -> nn.Module:
    made = Transformer(TransformerConfig(vocabulary=31, width=16, layers=2, heads=4, kv_heads=2))
    attach(made, Lora(3, 6.0, kind))
    return made


def plan(kind: LoraKind = "lora") -> tuple[nn.Module, Plan]:
    made = model(kind)
    return made, make_plan(made, Anatomy.of(made), 2)


def test_one_of_the_two_is_cut_and_the_other_has_parts_of_a_gradient() -> None:
    made, found = plan()
    assert found.sequence_parallel
    for name in found.columns:
        assert found.cuts[f"{name}.lora_B.weight"].dim == 0
        assert found.cuts[f"{name}.lora_B.weight"].spans == found.cuts[f"{name}.weight"].spans
        assert f"{name}.lora_A.weight" in found.partial
        assert f"{name}.lora_A.weight" not in found.cuts
    for name in found.rows:
        assert found.cuts[f"{name}.lora_A.weight"].dim == 1
        assert f"{name}.lora_B.weight" in found.partial
        weights = dict(made.named_parameters())
        x = torch.randn(5, weights[f"{name}.lora_A.weight"].shape[1])
        cut = found.cuts[f"{name}.lora_A.weight"]
        parts = [
            torch.cat([x[:, a:b] for a, b in cut.spans[rank]], 1) @ cut.take(weights[f"{name}.lora_A.weight"], rank).T
            for rank in range(2)
        ]
        assert torch.allclose(sum(parts), x @ weights[f"{name}.lora_A.weight"].T, atol=1e-5)


class WithLora(HostileLanguage):
    def model(self) -> nn.Module:
        made = super().model()
        attach(made, Lora(3, 6.0, dropout=0.2), ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
        return made


class FeedForwardsAlone(WithLora):
    """Attention is whole on every rank, and so is the stream."""

    def anatomy(self, model: nn.Module) -> Anatomy:
        return Anatomy.of(model, splits={"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"})


def run_all(task: WithLora, layouts: list[str]) -> list[Trace]:
    return [spread_run(task, Layout.parse(layout)) for layout in layouts]


@pytest.mark.parametrize("task", [WithLora(steps=2), FeedForwardsAlone(steps=2)], ids=lambda task: type(task).__name__)
def test_it_trains_like_one_device(ranks: Ranks, task: WithLora) -> None:
    expected = reference(task, 1)
    for trace in ranks(2, run_all, task, ["tp=2", "fsdp=2"])[0]:
        error, where = difference(trace, expected)
        assert error < TOLERANCE, where


def test_a_gathered_container_keeps_their_parts() -> None:
    _, found = plan()
    name = next(iter(found.containers))
    before = {weight for weight in found.partial if "lora" in weight}
    gather_inside(found, name, "it was seen to fix sizes")
    assert before <= found.partial


def test_lengths_of_rows_that_are_cut_are_refused() -> None:
    with pytest.raises(WrongUse, match="is cut by its input, and lora_kind=dora needs the length of whole rows"):
        plan("dora")


class WithFourBits(HostileLanguage):
    """Rows of an odd width, which are not whole blocks: every rank has all bits."""

    width = 0

    def model(self) -> nn.Module:
        made = super().model() if not self.width else Transformer(
            TransformerConfig(vocabulary=PRIME, width=self.width, layers=2, heads=4, kv_heads=2)
        )  # fmt: skip
        attach(made, Lora(3, 6.0), four_bit=True)
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
        return made


class InBlocks(WithFourBits):
    """Rows of whole blocks, cut between ranks where a linear is cut by its output."""

    width = 64


@pytest.mark.parametrize("task", [WithFourBits(steps=2), InBlocks(steps=2)], ids=lambda task: type(task).__name__)
def test_weights_in_4_bits_train_like_one_device(ranks: Ranks, task: WithFourBits) -> None:
    expected = reference(task, 1)
    (trace,) = ranks(2, run_all, task, ["tp=2"])[0]
    error, where = difference(trace, expected)
    assert error < TOLERANCE, where


def test_whole_blocks_are_cut_with_their_linear() -> None:
    made = InBlocks().model()
    found, weights = make_plan(made, Anatomy.of(made), 2), dict(made.named_parameters())
    name = next(name for name in found.columns if name.endswith("up_proj"))
    linear = made.get_submodule(name)
    whole = dequantised(FourBits(*_bits(weights, name)), (linear.out_features, 64), F64)
    for rank in range(2):
        cuts = [found.cuts.get(f"{name}.{part}") for part in FOUR_BITS]
        own = [w if cut is None else cut.take(w, rank) for cut, w in zip(cuts, _bits(weights, name), strict=True)]
        assert own[0].numel() == weights[f"{name}.weight_packed"].numel() // 2
        spans = found.cuts[f"{name}.weight"].spans[rank]
        part = Divided(0, spans, cut=True).of(FourBits(*own), (linear.out_features, 64), F64)
        assert torch.equal(part, torch.cat([whole[a:b] for a, b in spans]))
    rows = next(iter(found.rows))
    assert f"{rows}.weight_packed" not in found.cuts


def _bits(weights: dict[str, nn.Parameter], name: str) -> list[nn.Parameter]:
    return [weights[f"{name}.{part}"] for part in FOUR_BITS]
