"""Spread models under a checker of types: what every tensor is on tp and cp, and what its gradient will be.

Weights are what `Placement` says of them: cut, or the same on all ranks, with a gradient that is summed over the axis
(replicated) or is the same already (invariant). Said otherwise of any of them, the model does not pass.

Of the known bugs the checker finds those that leave a tensor of one kind where another is needed:
``norms_not_summed_over_tp``, ``shared_keys_not_summed_over_tp`` (where all ranks share the keys; with two heads of keys
on four ranks a weight varies over some and is the same over others, which its types cannot say),
``part_taken_for_the_whole`` and ``cp_attention_keeps_own_keys_gradient``.

It does not find what changes numbers and no types. Of linears, heads and positions: ``row_bias_added_on_every_rank`` as
it is planted, by a multiple of the bias after the sum (a bias added before the sum is found, see
`tests.parallel.communication.test_spmd_types`), ``vocabulary_masks_off_by_one``, ``tp_parts_drawn_alike``,
``heads_cut_against_each_other``, ``cp_labels_roll_within_chunks``, ``positions_count_from_the_chunk``, and dropout's.
Of what is done with a loss or with gradients outside of the model: ``cp_scales_loss_twice``,
``gradients_summed_without_cp``, ``tied_embedding_not_summed_over_pp``, ``norm_counts_replicas_twice``, and all bugs of
micro-batches, dp, fsdp, data, optimizer, resuming and stopping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import losses
from phalanx.layout import Layout
from phalanx.models.transformer import Attention, Transformer, TransformerConfig
from phalanx.parallel.axes import overlap, tensor
from phalanx.parallel.axes.pipeline import StageEnds
from phalanx.parallel.axes.schedules import Action
from phalanx.parallel.axes.transfers import Part
from phalanx.parallel.blocks import boundary
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import own_run
from phalanx.parallel.spread import Spread
from phalanx.prove.bugs.known import planted
from tests.spmd import BATCH, TIME, Axes, I, R, S, V, annotate, checking, given, spmd, spread, state, varying

WIDTH, VOCABULARY = 16, 32
TP = Layout(tp=2)
CP = ["cp=2,zero=1", "cp=2,zero=1,cp_kind=ulysses"]


def transformer(**how: Any) -> Transformer:
    sizes = {"width": WIDTH, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 32, "bias": True}
    return Transformer(TransformerConfig(VOCABULARY, **sizes | how))


class Tempered(Attention):
    """Attention with a weight that belongs to no head, so that heads are gathered."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, rotation: Any, mask: Tensor | None) -> Tensor:
        return super().forward(x * self.temperature, rotation, mask)


class Scale(nn.Module):
    """A weight on the stream that is no norm's, so that the stream is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


def tempered() -> Transformer:
    model = transformer()
    for block in model.blocks:
        block.attention = Tempered(model.config)
    return model


def scaled(model: Transformer) -> Transformer:
    for block in model.blocks:
        block.dropout = Scale()
    return model


SHARDED: dict[str, Callable[[], nn.Module]] = {
    "sequence-parallel": transformer,
    "tied": lambda: transformer(tied=True),
    "one key-value head": lambda: transformer(kv_heads=1),
    "gathered": tempered,
}
ON_EVERY_RANK: dict[str, Callable[[], nn.Module]] = {
    "stream on every rank": lambda: scaled(transformer()),
    "gathered, stream on every rank": lambda: scaled(tempered()),
}
MODELS = SHARDED | ON_EVERY_RANK


States = dict[str, dict[str, Any]]
"""By axis: what the stream is after the first block and after the last, what the head is given, and the loss."""


def assumed(made: Spread) -> States:
    """By our code."""
    states = {
        "cp": {"first": V, "last": R, "hidden": R, "loss": R},
        "tp": {"first": V if made.plan.sequence_parallel else I, "last": I, "hidden": I, "loss": I},
    }
    return {axis: states[axis] for axis in ("cp", "tp") if made.mesh.size(axis) > 1}


def through(made: Spread, axes: Axes) -> dict[str, Tensor]:
    """From tokens to the loss."""
    streams: list[Tensor] = []
    for block in made.model.blocks:
        block.register_forward_hook(lambda module, given, output: streams.append(output))
    tokens = given(torch.arange(BATCH * TIME).view(BATCH, TIME), axes)
    logits = made.model(tokens)
    if made.context is not None:
        made.context.share_loss(logits)
        varying(logits.sequence.own.keywords["index"], axes)
    loss = losses.cross_entropy(logits, tokens).total
    return {"first": streams[0], "last": streams[-1], "hidden": logits.hidden, "loss": loss}


def check(build: Callable[[], nn.Module], layout: Layout, others: dict[str, Any] | None = None) -> States:
    """Everything must have the state that our code assumes. ``others``: of some weights, what to take them for."""
    with spread(build, layout) as made, checking(layout, whole=False) as axes:
        annotate(made, axes, others)
        seen, states = through(made, axes), assumed(made)
        for axis, wanted in states.items():
            for what, state in wanted.items():
                spmd.assert_type(seen[what], {axes.named[axis]: state})
        return states


@pytest.mark.parametrize("kind", MODELS)
def test_tensor_parallel_model(kind: str) -> None:
    """From tokens through the vocabulary's parts of embedding, head and loss."""
    stream = V if kind in SHARDED else I
    assert check(MODELS[kind], TP) == {"tp": {"first": stream, "last": I, "hidden": I, "loss": I}}


def test_logits_that_are_looked_at() -> None:
    """Every rank computes its part of the vocabulary, and all do the same with the whole of it."""
    with spread(transformer, TP) as made, checking(TP, whole=False) as axes:
        annotate(made, axes)
        logits = made.model(given(torch.arange(BATCH * TIME).view(BATCH, TIME), axes))
        spmd.assert_type(logits.softmax(-1), {axes.named["tp"]: I})


def check_blocks(kind: str) -> None:
    """With dims: a product over sharded features is partial until it is summed."""
    with spread(MODELS[kind], TP) as made, checking(TP, whole=True) as axes:
        annotate(made, axes)
        stream = given(torch.randn(BATCH, TIME, WIDTH, requires_grad=True), axes, tp=I)
        rotation = tuple(given(torch.randn(BATCH, 1, TIME, WIDTH // 8), axes) for _ in range(2))
        between = made.model.blocks[0](stream, rotation, None)
        spmd.assert_type(between, {axes.named["tp"]: S(1) if kind in SHARDED else I})
        spmd.assert_type(made.model.blocks[1](between, rotation, None), {axes.named["tp"]: I})


@pytest.mark.parametrize("kind", MODELS)
def test_tensor_parallel_blocks(kind: str) -> None:
    check_blocks(kind)


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_that_compute_while_they_sum(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "LEAST_BYTES", 0)
    monkeypatch.setattr(overlap, "chunks_of", lambda *of: 2)
    check_blocks(kind)


@pytest.mark.parametrize("text", CP)
def test_context_parallel_model(text: str) -> None:
    """Every rank has the whole loss, and counts for a part of it: the loss is replicated, its gradient partial."""
    assert check(transformer, Layout.parse(text)) == {"cp": {"first": V, "last": R, "hidden": R, "loss": R}}


@pytest.mark.parametrize("text", CP)
def test_context_and_tensor_parallel_model(text: str) -> None:
    found = check(transformer, Layout.parse(f"tp=2,{text}"))
    assert found["cp"] == {"first": V, "last": R, "hidden": R, "loss": R}
    assert found["tp"] == {"first": V, "last": I, "hidden": I, "loss": I}


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_partial_where_they_are_summed_over_tp(kind: str) -> None:
    """Of each weight that is not cut, the other state is refused: no sum too few, and none too many."""
    with spread(MODELS[kind], TP) as made:
        states = {name: state(made, name, "tp") for name, _ in made.model.named_parameters()}
        for name, own in states.items():
            assert (own is R) == ("tp" in made.placement.summed_over(name)), name
    for name in [name for name, own in states.items() if own in (R, I)]:
        with pytest.raises(spmd.SpmdTypeError):
            check(MODELS[kind], TP, {name: I if states[name] is R else R})


@pytest.mark.parametrize("text", CP)
def test_gradients_are_partial_on_cp(text: str) -> None:
    for name, _ in transformer().named_parameters():
        with pytest.raises(spmd.SpmdTypeError):
            check(transformer, Layout.parse(text), {name: I})


# Pipelines


def stage(rank: int, entry: Any = None) -> tuple[Any, Any]:
    """What a stage sends on, and of the last its loss, where it was given a stream that is ``entry`` on tp."""
    layout = Layout(pp=2, tp=2)
    with spread(transformer, layout, rank) as made, checking(layout, whole=False) as axes:
        annotate(made, axes)
        tokens = given(torch.arange(BATCH * TIME).view(BATCH, TIME), axes)
        part, pipeline = Part(rank // 2), made.pipeline
        received = given(torch.randn(BATCH, TIME // 2, WIDTH), axes, tp=entry) if entry is not None else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline.transfers, "received", lambda action: received)
            patch.setattr(pipeline.transfers, "items", lambda part: 0)
            patch.setattr(pipeline.transfers, "signature", lambda part: None)
            pipeline.enter(part, Action("forward", part.stage, 0))
            try:
                loss = losses.cross_entropy(made.model(tokens), tokens).total
            except StageEnds as ended:
                return spmd.get_axis_local_type(ended.stream, axes.named["tp"]), None
            return None, spmd.get_axis_local_type(loss, axes.named["tp"])


def test_stages_agree_on_the_stream() -> None:
    """Under sequence parallelism a stage sends its shard, and the next takes it for that and for nothing else."""
    assert stage(0) == (V, None)
    assert stage(2, V) == (None, I)
    for other in (R, I):
        with pytest.raises(spmd.SpmdTypeError):
            stage(2, other)


# Bugs


KNOWN = {
    "norms_not_summed_over_tp": transformer,
    "shared_keys_not_summed_over_tp": lambda: transformer(kv_heads=1),
    "part_taken_for_the_whole": transformer,
    "cp_attention_keeps_own_keys_gradient": transformer,
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_bugs(name: str) -> None:
    layout = Layout.parse(CP[0]) if name.startswith("cp") else TP
    check(KNOWN[name], layout)
    with planted(name), pytest.raises(spmd.SpmdTypeError):
        check(KNOWN[name], layout)


UNSEEN = {
    "row_bias_added_on_every_rank": "tp=2",
    "vocabulary_masks_off_by_one": "tp=2",
    "tp_parts_drawn_alike": "tp=2",
    "heads_cut_against_each_other": "tp=2",
    "norm_counts_replicas_twice": "tp=2",
    "positions_count_from_the_chunk": CP[0],
    "cp_scales_loss_twice": CP[0],
    "gradients_summed_without_cp": CP[0],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_bugs_that_leave_types_as_they_are(name: str) -> None:
    """So nobody takes the checker for a proof."""
    with planted(name):
        check(transformer, Layout.parse(UNSEEN[name]))


def left_out(x: Tensor, *how: Any, **to: Any) -> Tensor:
    return x


def not_gathered(x: Tensor, dim: int, total: int, group: Communicator, *, to: str, **_: Any) -> Tensor:
    return torch.cat([x] * group.size, dim)


def not_summed(x: Tensor, dim: int, group: Communicator, *_: Any) -> Tensor:
    return own_run(x, dim, group)


FORGOTTEN = [
    ("stream on every rank", tensor, "all_reduce", left_out),
    ("stream on every rank", tensor, "replicate", left_out),
    ("gathered", tensor, "shard", own_run),
    ("gathered", tensor, "replicate", left_out),
    ("gathered", tensor, "all_gather", not_gathered),
    ("sequence-parallel", tensor, "reduce_scatter", not_summed),
    ("sequence-parallel", tensor, "all_gather", not_gathered),
    ("sequence-parallel", boundary, "shard", own_run),
    ("sequence-parallel", boundary, "all_gather", not_gathered),
]


@pytest.mark.parametrize(("kind", "module", "collective", "instead"), FORGOTTEN)
def test_forgotten_collectives(
    kind: str, module: Any, collective: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of those that tensor parallelism says from block to block: shapes are as they were, and nobody speaks."""
    monkeypatch.setattr(module, collective, instead)
    with pytest.raises(spmd.SpmdTypeError):
        check_blocks(kind)


def test_doubled_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tensor.all_reduce
    monkeypatch.setattr(tensor, "all_reduce", lambda x, group, to, **_: plain(plain(x, group, to=to), group, to=to))
    with pytest.raises(spmd.SpmdTypeError, match="expects its input to be"):
        check(MODELS["stream on every rank"], TP)
