"""AdamW with narrow moments: the same bits under every layout, kept as they are, and it learns as with wide ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import WrongUse
from phalanx.adamw import KEPT
from phalanx.kernels.moments import Moments, widened
from phalanx.optim import AdamW
from phalanx.recipes.gpt import GPT
from phalanx.train.engine import Engine
from tests.checkpoints import contents, newest, trained
from tests.parity import HostileLanguage, Mixture
from tests.ranks import RankFailed, Ranks
from tests.train.test_exact import Hostile, Outcome, digest

NARROW: tuple[Moments, ...] = ("bfloat16", "float8")
DOWN = "blocks.0.feed_forward.down_proj.weight"
LAYOUTS = {
    2: ("dp=2", "fsdp=2", "fsdp=2,zero=1", "fsdp=2,zero=2,micro_batch=4", "tp=2", "pp=2,micro_batch=8"),
    3: ("fsdp=3", "fsdp=3,zero=1"),
    4: ("fsdp=2,tp=2", "dp=2,fsdp=2,offload=params"),
}


def stepped(weight: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int) -> None:
    source = torch.Generator().manual_seed(1)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=source, dtype=weight.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_moments_are_torchs_own(dtype: torch.dtype) -> None:
    own, other = (nn.Parameter(torch.linspace(-1, 1, 35, dtype=dtype).view(7, 5)) for _ in range(2))
    mine, theirs = AdamW([own], weight_decay=0.1, moments="float32"), torch.optim.AdamW([other], weight_decay=0.1)
    stepped(own, mine, 5)
    stepped(other, theirs, 5)
    assert torch.equal(own, other)
    for key in KEPT:
        assert torch.equal(mine.state[own][key], theirs.state[other][key])


@pytest.mark.parametrize("moments", NARROW)
def test_narrow_moments_follow_wide_ones(moments: Moments) -> None:
    """Also those that change by less in a step than two neighbours of a narrow number are apart."""
    own, other = (nn.Parameter(torch.zeros(20, 500)) for _ in range(2))
    mine, theirs = AdamW([own], moments=moments), torch.optim.AdamW([other])
    for size in (1.0, 0.03):
        for weight, optimizer in ((own, mine), (other, theirs)):
            weight.grad = torch.full_like(weight, size)
            for _ in range(300):
                optimizer.step()
    first, second = widened(*(mine.state[own][key] for key in KEPT), torch.float64)
    assert mine.state[own]["exp_avg"].element_size() == (2 if moments == "bfloat16" else 1)
    assert float(first.mean()) == pytest.approx(float(theirs.state[other]["exp_avg"].mean()), rel=0.02)
    assert float(second.mean()) == pytest.approx(float(theirs.state[other]["exp_avg_sq"].mean()), rel=0.02)
    assert float(own.detach().mean()) == pytest.approx(float(other.detach().mean()), rel=0.03)


@pytest.mark.parametrize("moments", NARROW)
def test_draws_follow_from_seed_name_and_update_alone(moments: Moments) -> None:
    def kept(seed: int, name: str, chunk: int | None = None) -> list[Tensor]:
        weight = nn.Parameter(torch.ones(41, 7))
        weight.logical_name = name  # type: ignore[attr-defined]
        optimizer = AdamW([weight], moments=moments, seed=seed)
        with pytest.MonkeyPatch.context() as patch:
            if chunk is not None:
                patch.setitem(phalanx.counter.CHUNK, "cpu", chunk)
            stepped(weight, optimizer, 3)
        return [optimizer.state[weight][key] for key in KEPT]

    once = kept(0, "a")
    for same in (kept(0, "a"), kept(0, "a", chunk=10), kept(0, "a", chunk=1)):
        assert all(map(torch.equal, once, same))
    for other in (kept(1, "a"), kept(0, "b")):
        assert not any(map(torch.equal, once, other))


def held(task: phalanx.Task, layout: str, folder: Path) -> list[float]:
    return trained(task, layout, folder / layout.replace(",", " "), None, task.steps)


def check_same(found: dict[str, Tensor], wanted: dict[str, Tensor], layout: str) -> None:
    """Narrow moments to the bit; what is wide but for its rounding."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        if name.startswith("optimizer/"):
            assert want.dtype in (torch.bfloat16, torch.uint8)
            assert torch.equal(found[name], want), f"{layout}: {name}"
        else:
            assert torch.allclose(found[name], want, rtol=1e-9, atol=1e-12), f"{layout}: {name}"


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("moments", NARROW)
def test_layouts_keep_what_one_device_keeps(ranks: Ranks, moments: Moments, world: int, tmp_path: Path) -> None:
    task = HostileLanguage(moments=moments, heads=4, kv_heads=2)
    ranks(1, held, task, "dp=1", tmp_path)
    one = contents(tmp_path / "dp=1")
    assert sum(name.startswith("optimizer/") for name in one) > 20
    for layout in LAYOUTS[world]:
        ranks(world, held, task, layout, tmp_path)
        check_same(contents(tmp_path / layout.replace(",", " ")), one, layout)


@pytest.mark.parametrize(
    ("kind", "layout"), [(Mixture, "fsdp=2,cp=2,ep=2"), (HostileLanguage, "pp=2,tp=2,micro_batch=8")]
)
def test_experts_and_tied_weights_too(ranks: Ranks, kind: type[HostileLanguage], layout: str, tmp_path: Path) -> None:
    task = kind(moments="float8")
    ranks(1, held, task, "dp=1", tmp_path)
    ranks(4, held, task, layout, tmp_path)
    check_same(contents(tmp_path / layout.replace(",", " ")), contents(tmp_path / "dp=1"), layout)


def blind(layout: str, folder: Path) -> None:
    """Shards that do not know where they lie draw by their own places."""
    with Engine(HostileLanguage(moments="bfloat16", steps=1), layout, device="cpu") as engine:
        for shard in engine.spread.shards():
            del shard.logical_boxes
        for batch in engine.batches():
            engine.step(batch)
        rows = engine.spread.weights[DOWN]
        torch.save((rows.first, engine.optimizer.state[rows.shard]["exp_avg"]), folder / str(engine.rank))


def test_draws_by_a_shards_own_places_would_be_noticed(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, held, HostileLanguage(moments="bfloat16", steps=1), "dp=1", tmp_path)
    ranks(2, blind, "fsdp=2", tmp_path)
    whole = contents(tmp_path / "dp=1")[f"optimizer/exp_avg/{DOWN}"]
    for rank in range(2):
        first, rows = torch.load(tmp_path / str(rank))
        assert torch.equal(rows, whole[first : first + len(rows)]) == (rank == 0)


@pytest.mark.parametrize("moments", NARROW)
def test_another_layout_goes_on_to_the_same_bits(ranks: Ranks, moments: Moments, tmp_path: Path) -> None:
    task = HostileLanguage(moments=moments, steps=6)
    ranks(1, trained, task, "dp=1", tmp_path / "one device", None, 6)
    start = None
    for world, layout in ((2, "fsdp=2"), (2, "tp=2"), (3, "fsdp=3,zero=1")):
        ranks(world, trained, task, layout, tmp_path / layout, start, 2)
        if start is not None:  # and what is read is what was written
            ranks(world, trained, task, layout, tmp_path / f"{layout} again", start, 0)
            check_same(contents(tmp_path / f"{layout} again"), contents(start), layout)
        start = tmp_path / layout
    assert start is not None
    assert newest(start).manifest.facts["step"] == 6
    check_same(contents(start), contents(tmp_path / "one device"), "resumed")


def exactly(task: phalanx.Task, layout: str) -> Outcome:
    with Engine(task, layout, device="cpu") as engine:
        steps = [(m.loss.hex(), m.grad_norm.hex(), m.skipped) for m in map(engine.step, engine.batches())]
        return Outcome(digest(engine.whole_weights()), steps, {})


@pytest.mark.parametrize("moments", NARROW)
def test_exact_sums_give_the_same_bits_at_any_number_of_ranks(ranks: Ranks, moments: Moments) -> None:
    task = HostileLanguage(moments=moments, precision="fp32")
    alone = ranks(1, exactly, task, "exact=8")[0]
    for world, layout in ((2, "fsdp=2"), (4, "dp=2,fsdp=2,zero=2")):
        assert ranks(world, exactly, task, f"{layout},exact=8") == [alone] * world, layout


@pytest.mark.parametrize("moments", NARROW)
def test_a_step_that_is_skipped_leaves_moments_alone(moments: Moments) -> None:
    with Engine(Hostile(moments=moments, precision="fp32"), "dp=1", device="cpu") as engine:
        before, skips = copy.deepcopy(list(engine.optimizer.state.values())), 0
        for batch in engine.batches():
            skipped = engine.step(batch).skipped
            after = copy.deepcopy(list(engine.optimizer.state.values()))
            same = [torch.equal(a[key], b[key]) for a, b in zip(before, after, strict=False) for key in (*KEPT, "step")]
            assert all(same) == skipped or not before
            before, skips = after, skips + skipped
        assert 0 < skips < engine.task.steps


def test_a_gradient_that_is_no_number_is_not_forgotten() -> None:
    for moments in NARROW:
        weight = nn.Parameter(torch.ones(3))
        optimizer = AdamW([weight], moments=moments)
        for gradient in ([1.0, float("nan"), float("inf")], [1.0, 1.0, 1.0]):
            weight.grad = torch.tensor(gradient)
            optimizer.step()
        assert weight.isfinite().tolist() == [True, False, False], moments


def losses(moments: Moments, steps: int = 150) -> float:
    task = GPT(moments=moments, width=32, layers=1, heads=2, length=32, global_batch=8, megabytes=0.3, steps=steps)
    with Engine(task, "dp=1", device="cpu") as engine:
        last = [engine.step(batch).loss for batch in engine.batches()][-50:]
    return sum(last) / len(last)


@pytest.mark.parametrize("moments", NARROW)
def test_it_learns_as_with_wide_moments(moments: Moments) -> None:
    assert losses(moments) == pytest.approx(losses("float32"), rel=0.01)


def changed(before: Moments, after: Moments, folder: Path) -> None:
    trained(HostileLanguage(moments=before, precision="fp32"), "dp=1", folder, None, 1)
    trained(HostileLanguage(moments=after, precision="fp32"), "dp=1", folder / "next", folder, 1)


def test_a_run_goes_on_with_narrower_moments_but_not_with_torchs_own_from_narrow_ones(
    ranks: Ranks, tmp_path: Path
) -> None:
    for number, (before, after) in enumerate((("float32", "bfloat16"), ("bfloat16", "float8"), ("float8", "bfloat16"))):
        ranks(1, changed, before, after, tmp_path / str(number))
        kept = newest(tmp_path / str(number) / "next").manifest.tensors[f"optimizer/exp_avg/{DOWN}"]
        assert kept.dtype == {"bfloat16": "bfloat16", "float8": "uint8"}[after]
    with pytest.raises(RankFailed, match=r"keeps exp_avg of .* in bfloat16, and AdamW keeps it as wide as the weight"):
        ranks(1, changed, "bfloat16", "float32", tmp_path / "refused")


class Plain(HostileLanguage):
    def optimizer(self, params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1)


def test_what_cannot_be_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(WrongUse, match=r"moments='int4' is not known\. Choose one of: float32, bfloat16, float8"):
        AdamW([weight], moments="int4")  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match=r"betas in \[0, 1\)"):
        AdamW([weight], betas=(0.9, 1.0))
    with pytest.raises(WrongUse, match="moments='half' is not known"):
        HostileLanguage(moments="half").check()  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match=r"moments=float8 has no effect: Plain.optimizer makes another optimizer"):
        Engine(Plain(moments="float8"), "dp=1", device="cpu")


@pytest.mark.parametrize("moments", NARROW)
def test_torchs_own_way_to_save_keeps_the_bits(moments: Moments) -> None:
    weight = nn.Parameter(torch.ones(5, 3))
    optimizer = AdamW([weight], moments=moments)
    stepped(weight, optimizer, 2)
    again = AdamW([weight], moments=moments)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key in KEPT:
        assert torch.equal(again.state[weight][key], optimizer.state[weight][key])


def test_weights_in_another_order_of_memory() -> None:
    plain = nn.Parameter(torch.ones(4, 3, 2, 2))
    turned = nn.Parameter(torch.ones(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    for moments in NARROW:
        kept = []
        for weight in (plain, turned):
            optimizer = AdamW([weight], moments=moments)
            stepped(weight, optimizer, 3)
            kept.append([optimizer.state[weight][key] for key in KEPT])
        assert all(map(torch.equal, *kept)), moments


def test_groups_may_be_kept_in_their_own_way() -> None:
    wide, narrow = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AdamW([{"params": [wide], "moments": "float32"}, {"params": [narrow]}], moments="float8")
    for weight in (wide, narrow):
        weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[wide]["exp_avg"].dtype == torch.float32
    assert optimizer.state[narrow]["exp_avg"].dtype == torch.uint8
