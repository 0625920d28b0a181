"""Known bugs of attention and positions: heads, chunks of sequences, labels that belong to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.logits import Sequence
from phalanx.prove.bugs import seams
from phalanx.prove.bugs.planting import bug
from phalanx.prove.bugs.seams import Replace


@bug(9, "cp=2", "loss", "cp")
def cp_labels_roll_within_chunks(replace: Replace) -> None:
    """Labels are shifted within a rank's chunk, so the last token of one gets its first token's label."""
    plain = seams.SHARE_LOSS.plain

    def share_loss(self: Any, output: Any) -> None:
        plain(self, output)
        places = output.sequence.own.keywords["index"]
        shifted = torch.cat([places[:-1], places[:1]])

        def own(x: Tensor) -> Tensor:
            return x.index_select(1, places if x.is_floating_point() else shifted)

        output.sequence = Sequence(own, output.sequence.all_reduce)

    replace(seams.SHARE_LOSS, share_loss)


@bug(10, "cp=2", "gradients", "cp")
def cp_attention_keeps_own_keys_gradient(replace: Replace) -> None:
    """Attention gathers keys and values forward, and backward keeps what this rank's queries gave to its own keys."""

    def own_alone(x: Tensor, whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
        each = x.shape[dim]
        return whole.detach().slice_scatter(x, dim, rank * each, (rank + 1) * each)

    seams.gathering(replace, seams.CP_GATHER, own_alone, state="replicated")


@bug(0, "cp=2", "attention|blocks.0", "cp")
def positions_count_from_the_chunk(replace: Replace) -> None:
    """Rotary positions begin at 0 on every rank of cp, instead of where its part of the sequence lies."""

    def prepare(block: Any) -> None:
        whole: dict[str, Any] = {}

        def forward(plain: Any, x: Tensor, rotation: Any, *rest: Any) -> Any:
            own = x.shape[1]
            return plain(x, tuple(angles.narrow(-2, 0, own) for angles in whole["rotation"]), *rest)

        block.register_forward_pre_hook(lambda module, given: whole.update(rotation=given[1]))
        seams.planted_around(block, forward)

    seams.on_blocks_of_cp(replace, prepare)


@bug(44, "tp=2", "attention", "tp")
def heads_cut_against_each_other(replace: Replace) -> None:
    """Queries are cut in one order of heads and keys in another, so heads meet strangers."""
    plain = seams.HEAD_SPANS.plain

    def spans(name: str, *sizes: Any) -> Any:
        found = plain(name, *sizes)
        return found[::-1] if name.endswith("q_proj") else found

    replace(seams.HEAD_SPANS, spans)
