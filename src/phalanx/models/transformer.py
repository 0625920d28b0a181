"""A transformer in the manner of Llama, decoder or encoder: RMSNorm, rotary positions, grouped queries, SwiGLU.

Shapes: B batch, T time, D width, H heads, K kv heads, C head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.attention import are_starts, kept_apart, packed_attention
from phalanx.errors import WrongUse
from phalanx.key_values import KeyValues
from phalanx.logits import Logits
from phalanx.models.experts import MixtureOfExperts

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TransformerConfig:
    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    hidden: int | None = None
    bias: bool = False
    """Of the linears in blocks."""
    dropout: float = 0.0
    tied: bool = False
    causal: bool = True
    """Tokens look back alone; else, as an encoder's do, to both sides."""
    rope_base: float = 10_000.0
    experts: int = 0
    """Of each block's feed-forward; 0: one feed-forward for all tokens."""
    experts_chosen: int = 2
    """Experts that each token goes to."""
    capacity: float | None = None
    """How many times its even share of a sequence's tokens an expert takes at most; None: all that choose it."""
    balance: float = 0.01
    flatness: float = 0.001
    """Weights of the penalties for uneven load and for large logits of the router."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise WrongUse(
                f"width={self.width} does not divide into heads={self.heads}. Make width a multiple of heads."
            )
        if self.width // self.heads % 2:
            raise WrongUse(
                f"width/heads={self.width // self.heads} is odd, and rotary positions turn pairs. Make it even."
            )
        if self.heads % (self.kv_heads or self.heads):
            raise WrongUse(
                f"heads={self.heads} does not divide into kv_heads={self.kv_heads}. Make heads a multiple of kv_heads."
            )
        if self.experts and not 1 <= self.experts_chosen <= self.experts:
            raise WrongUse(
                f"experts_chosen={self.experts_chosen} of experts={self.experts} cannot be. "
                f"Choose from 1 to {self.experts}."
            )
        if self.capacity is not None and not self.capacity > 0:
            raise WrongUse(f"capacity={self.capacity} leaves experts no room. Set it above 0, or leave it out.")


class Attention(nn.Module):
    """Attention with rotary positions and fewer key-value heads than query heads, if asked."""

    packed_attention = staticmethod(packed_attention)
    """Of queries, keys, values and where documents begin; ``cp`` has its own."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_width, self.causal = config.width // config.heads, config.causal
        kv_width = (config.kv_heads or config.heads) * self.head_width
        self.q_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.k_proj = nn.Linear(config.width, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.width, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(
        self, x_BTD: Tensor, rotation: Rotation, mask: Tensor | None, key_values: KeyValues | None = None
    ) -> Tensor:
        q_BTHC, k_BTKC, v_BTKC = (
            projection(x_BTD).unflatten(-1, (-1, self.head_width))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHTC, k_BKTC = rotate(q_BTHC, rotation).transpose(1, 2), rotate(k_BTKC, rotation).transpose(1, 2)
        v_BKTC = v_BTKC.transpose(1, 2)
        if key_values is not None:
            k_BKTC, v_BKTC = key_values.extended(self, k_BKTC, v_BKTC)
        if are_starts(mask):
            out_BHTC = self.packed_attention(q_BHTC, k_BKTC, v_BKTC, mask, self.causal)
        else:
            out_BHTC = F.scaled_dot_product_attention(
                q_BHTC, k_BKTC, v_BKTC, attn_mask=mask, is_causal=mask is None and self.causal,
                enable_gqa=q_BHTC.shape[1] != k_BKTC.shape[1],
            )  # fmt: skip
        return self.o_proj(out_BHTC.transpose(1, 2).flatten(2))


def hidden_width(config: TransformerConfig) -> int:
    return config.hidden or (8 * config.width // 3 + 15) // 16 * 16


class FeedForward(nn.Module):
    """SwiGLU: one branch gates the other."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden = hidden_width(config)
        self.gate_proj = nn.Linear(config.width, hidden, bias=config.bias)
        self.up_proj = nn.Linear(config.width, hidden, bias=config.bias)
        self.down_proj = nn.Linear(hidden, config.width, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the stream after."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = (
            MixtureOfExperts(
                config.width, hidden_width(config), config.experts, config.experts_chosen, config.capacity,
                config.balance, config.flatness,
            )
            if config.experts
            else FeedForward(config)
        )  # fmt: skip
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation,
        mask: Tensor | None,
        valid_BT1: Tensor | None = None,
        key_values: KeyValues | None = None,
    ) -> Tensor:
        kept = () if key_values is None else (key_values,)  # attention of one's own need not know of them
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), rotation, mask, *kept))
        normed_BTD = self.feed_forward_norm(x_BTD)
        if isinstance(self.feed_forward, MixtureOfExperts):
            return x_BTD + self.dropout(self.feed_forward(normed_BTD, valid_BT1))
        return x_BTD + self.dropout(self.feed_forward(normed_BTD))


class Head(nn.Linear):
    """The last projection, to the vocabulary, left to the loss to compute."""

    def forward(self, x_BTD: Tensor) -> Logits:  # type: ignore[override]
        return Logits(x_BTD, self.weight, self.bias)


class Transformer(nn.Module):
    """Tokens in, lazy logits out. With ``documents``, attention and positions stay inside each packed document.

    ``valid`` says which tokens count for a mixture's penalties and capacity; with ``documents``, those that are in one.
    ``key_values``: of the tokens before these, which go on from there. They need ``positions`` and ``documents``.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = Head(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.head_width = config.width // config.heads
        self.rates: Tensor
        rates = config.rope_base ** (-torch.arange(0, self.head_width, 2).float() / self.head_width)
        self.register_buffer("rates", rates, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim >= 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                nn.init.normal_(weight, std=0.02 / (2 * self.config.layers) ** 0.5 if last else 0.02)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        key_values: KeyValues | None = None,
    ) -> Logits:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        angles_BTC = positions.unsqueeze(-1) * self.rates
        x_BTD = self.dropout(self.embedding(tokens))
        rotation = angles_BTC.cos().unsqueeze(1).to(x_BTD.dtype), angles_BTC.sin().unsqueeze(1).to(x_BTD.dtype)
        mask = None
        if documents is not None and key_values is not None:
            mask = key_values.mask(documents)
        elif documents is not None:
            mask = kept_apart(documents, x_BTD, self.head_width, self.config.causal)
        valid = documents >= 0 if valid is None and documents is not None else valid
        kept = () if key_values is None else (key_values,)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation, mask, None if valid is None else valid.unsqueeze(-1), *kept)
        return self.head(self.norm(x_BTD))


def rotate(x_BTHC: Tensor, rotation_B1TC: Rotation) -> Tensor:
    """Turn each pair of features by an angle that grows with the position.

    A position's heads stay neighbours in memory, and so are those that attention gives: nothing is copied after it.
    """
    cos, sin = (angles.transpose(1, 2) for angles in rotation_B1TC)
    first, second = x_BTHC.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
