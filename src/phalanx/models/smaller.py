"""A configuration of the same kind with small sizes: which field is a size is told by its name.

Sizes that are equal stay equal, whichever part of a model has them, and lists with an entry a layer keep one for each
layer that is left. What a field's name does not tell stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx import configs

HEAD_WIDTH, CHUNK = 8, 8
TOKENS = re.compile(r"(token_id|token_index|token_ids)$")
"""Names of fields that hold tokens."""


@dataclass(frozen=True)
class Sizes:
    """How small a configuration is made."""

    blocks: int
    heads: int
    vocabulary: int
    head_width: int = HEAD_WIDTH
    keep: str = ""
    """A pattern of fields that stay as they are."""
    pixels: int = 0
    """How large pictures are; 0: as the configuration says, and what else says what samples look like is kept too."""
    patch: int = HEAD_WIDTH
    positions: int = 0
    """How many positions there are at most; 0: as the configuration says."""

    @property
    def width(self) -> int:
        """Of the residual stream, and of all that is as wide."""
        return self.heads * self.head_width


def ways(config: Any, blocks: int, heads: int, vocabulary: int) -> Iterator[Sizes]:
    """In which a configuration may be made small, one after another until one works; where sizes hang together
    otherwise than by their names, more of them are kept."""
    heads = max(4, heads)
    yield Sizes(blocks, heads, vocabulary)
    yield Sizes(blocks, heads, vocabulary, head_width=2 * HEAD_WIDTH)
    yield Sizes(blocks, heads, vocabulary, keep=r"window|chunk|group|intermediate|ffn")
    yield Sizes(blocks, heads, vocabulary, keep=r"head_dim|head_size|lora|rank")
    if (own := configs.heads(config) or 0) > heads:
        yield Sizes(blocks, own, vocabulary)


Rule = Callable[[int, Sizes], int]


def _most(size: int) -> Rule:
    return lambda value, sizes: min(value, size)


def _wide(numerator: int, denominator: int = 1) -> Rule:
    return lambda value, sizes: min(value, sizes.width * numerator // denominator)


def _same(value: int, sizes: Sizes) -> int:
    return value


def _heads(value: int, sizes: Sizes) -> int:
    """As many, or a power of two."""
    return sizes.heads if value >= sizes.heads else 1 << (value.bit_length() - 1)


def _blocks(value: int, sizes: Sizes) -> int:
    return min(value, sizes.blocks)


def _input(size: Callable[[Sizes], int]) -> Rule:
    """What says how large inputs are, where that is not given."""
    return lambda value, sizes: min(value, size(sizes)) if sizes.pixels else value


NUMBERS: tuple[tuple[str, Rule], ...] = (
    (r"vocab_size", lambda value, sizes: min(value, sizes.vocabulary)),
    (r"type_vocab|num_labels|pretraining_tp|batch_size", _same),
    (r"max_position|^n_positions$|^n_ctx$|max_seq|context_length|position_embedding_size|_positions$|max_2d|pos_emb",
     lambda value, sizes: min(value, sizes.positions or value)),
    (r"shared_experts?$|num_shared|n_shared", _most(1)),
    (r"(_period|_interval|_pattern|_frequency|_step|_freq|every_n\w*|_nth\w*)$", _blocks),
    (r"_layer_offset$", lambda value, sizes: min(value, sizes.blocks - 1)),
    (r"experts_per_tok|top_?k|moe_k$|experts_top|num_selected", _most(2)),
    (r"n_group$|topk_group", _most(2)),
    (r"experts?$|expert_num", _most(8)),
    (r"num_(encoder_|decoder_)?blocks$|depth$|(^|_)n?_?(hidden_)?layers?$|repeats$", _blocks),
    (r"heads$|n_head$", _heads),
    (r"lora_rank$", _most(2 * HEAD_WIDTH)),
    (r"head_(dim|size|hidden|width)|d_kv$|d_head$|dim_head|rope_head|nope_head|rotary_dim|kv_channels",
     lambda value, sizes: min(value, sizes.head_width)),
    (r"(image|img|crop|spec)_size|resolution$", _input(lambda sizes: sizes.pixels)),
    (r"patch_size|patch_length", _input(lambda sizes: sizes.patch)),
    (r"mel_bins|mel_dim|feature_size|num_bins", _input(lambda sizes: 16)),
    (r"num_frames|num_images", _input(lambda sizes: 4)),
    (r"(num|in|input|stem_num|audio|image)_channels$", _same),
    (r"kernel|stride|padding|scale|factor|rate|ratio|multipl|offset|expand|buckets|bins|levels|dilation|merge|tubelet|"
     r"sampl|hop|fft|chunk_size_feed|_freqs?$|downsampl", _same),
    (r"window|attention_chunk|context_size|local_attention|block_size", _most(8)),
    (r"state_size$|d_state$|state_dim$|laurel_rank|time_step_rank|dt_rank", _most(8)),
    (r"moe_\w*(intermediate|ffn)|shared\w*intermediate|expert\w*_dim", lambda value, sizes: min(value, 3 * HEAD_WIDTH)),
    (r"intermediate|ffn|^d_ff$|mlp_dim|n_inner|d_inner|feedforward|mlp_hidden",
     lambda value, sizes: min(value, 6 * sizes.head_width)),
    (r"num_(queries|query\w*|latents|detection\w*|denoising|prompts|global_tokens)|n_latents", _most(8)),
    (r"groups$", _most(4)),
    (r"hidden|d_model|n_embd|embd?|embed|dim$|dims$|dim_|width|channels?|units|filters|features$", _wide(1)),
)  # fmt: skip
"""By name, the first that fits, how small a number becomes."""
COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in NUMBERS)
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers", "decoder_layers")
HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KEY_HEADS = re.compile(r"(key_value|kv)_?(attention_)?heads$|num_kv_heads$")
NUMBERED = re.compile(r"index|indices|idx|_layers?$")
"""Names of lists that name layers by their numbers."""
FIRST, LAST = ("first_k_dense_replace", "num_dense_layers"), ("num_kv_shared_layers",)
"""Fields by which so many of the first layers, or of the last, are of another kind."""
STAGES = re.compile(r"^(\w+_)?depths?$|^layers$|^num_blocks$")
"""Lists with a number of blocks for each stage: layers that are counted beside them are stages."""
COUNTS = re.compile(r"depths?$|layers$|blocks$|repeats$")
WIDTHS = re.compile(r"hidden|dim|embed|width|channels|sizes$|filters|intermediate|ffn")
LEFT = frozenset(
    ["transformers_version", "architectures", "id2label", "label2id", "dtype", "torch_dtype", "model_type"]
)
Values = dict[str, Any]


def made_smaller(config: Any, sizes: Sizes) -> Any:
    """The configuration of a model of the same kind, with small sizes; raises what its class raises of them."""
    values = _given(config, copy.deepcopy(config.to_dict()))
    small = _Smaller(sizes, folded(special_tokens(config), sizes.vocabulary)).values(values)
    if hasattr(config, "from_dict"):
        return type(config).from_dict(small)
    made = copy.deepcopy(config)
    for name, value in small.items():
        if value != values.get(name):
            setattr(made, name, value)
    return made


def _given(config: Any, values: Values) -> Values:
    """What a configuration is made of, without the sizes that its constructor works out of others."""
    fields = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set(values)
    parts = dict(configs.parts(config))
    return {
        name: _given(parts[name], value) if name in parts else value
        for name, value in values.items()
        if name in fields or type(value) not in (int, list, tuple)
    }


def smaller(config: Any, blocks: int, heads: int, vocabulary: int) -> Any:
    """The configuration of a model of the same kind, with small sizes and so many words."""
    return made_smaller(config, next(ways(config, blocks, heads, vocabulary)))


def shorter_chunks(config: Any, length: int) -> list[str]:
    """Have chunks that sequences are padded to no longer than sequences are: only work grows with them. Says which."""
    notes = []
    for own in configs.with_parts(config):
        for name, size in list(vars(own).items()):
            padded = name.endswith("chunk_size") and not name.startswith("attention")
            if padded and type(size) is int and size > max(CHUNK, length):
                notes.append(f"{name} {size} -> {CHUNK}")
                setattr(own, name, CHUNK)
    return notes


def special_tokens(config: Any) -> list[int]:
    """The tokens that mean something to a model, such as padding or the place of a picture."""
    found: list[int] = []
    for own in configs.with_parts(config):
        for name in (name for name in vars(own) if TOKENS.search(name)):
            value = configs.read(own, name)
            found += [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
    return list(dict.fromkeys(each for each in found if each >= 0))


def folded(tokens: list[int], vocabulary: int) -> dict[int, int]:
    """Which token each becomes in a smaller vocabulary, no two the same one."""
    found = {token: token for token in tokens if token < vocabulary}
    for token in tokens:
        place = token % vocabulary
        while token not in found and place in found.values() and len(found) < vocabulary:
            place = (place + 1) % vocabulary
        found.setdefault(token, place)
    return found


@dataclass
class _Smaller:
    sizes: Sizes
    tokens: dict[int, int]
    kept: list[int] = field(default_factory=list)
    """Of the configuration that is made smaller now, which layers are left."""
    layers: int = 0

    def values(self, values: Values) -> Values:
        """One configuration's fields, those of its parts with them."""
        in_stages = any(STAGES.search(name) and isinstance(value, (list, tuple)) for name, value in values.items())
        counts = [name for name in LAYER_COUNTS if type(values.get(name)) is int]
        layers = values[counts[0]] if counts and not in_stages else 0
        own = _Smaller(self.sizes, self.tokens, self._layers_kept(values, layers), layers)
        found = {name: own.value(name, value, values) for name, value in values.items()}
        if in_stages:
            found |= {name: values[name] for name in counts}
            found |= {name: max(1, found[name] // 2) for name in ("embed_dim",) if type(found.get(name)) is int}
        self._fit_heads(values, found)
        return found

    def _fit_heads(self, values: Values, found: Values) -> None:
        """Those of keys divide those of queries; those of a state space make up its stream."""
        whole = next((name for name in HEAD_COUNTS if type(values.get(name)) is int), None)
        for name in filter(KEY_HEADS.search, values):
            if whole is not None and type(values[name]) is int and found[whole] != values[whole]:
                found[name] = max(1, found[whole] * values[name] // values[whole])
        expand = next((values[name] for name in ("mamba_expand", "expand") if type(values.get(name)) is int), 0)
        for name in ("mamba_n_heads", "mamba_num_heads", *(["num_heads"] if "expand" in values else [])):
            if expand and found.get(name) != values.get(name):
                found[name] = expand * self.sizes.heads
        if "mamba_d_ssm" in values and "mamba_n_heads" in values:
            found["mamba_d_ssm"] = found["mamba_n_heads"] * self.sizes.head_width

    def _layers_kept(self, values: Values, layers: int) -> list[int]:
        """Which layers are left: the first ones, or others too such that each kind of layer is among them."""
        own = [v for v in values.values() if isinstance(v, (list, tuple)) and layers > 1 and len(v) == layers]
        kinds: list[Any] = [each for each in own if isinstance(each[0], str)]
        kinds += [[n < values[name] for n in range(layers)] for name in FIRST if type(values.get(name)) is int]
        kinds += [[n >= layers - values[name] for n in range(layers)] for name in LAST if type(values.get(name)) is int]
        by_layer = {int(layer): str(other) for layer, other in (values.get("per_layer_config") or {}).items()}
        kinds += [[by_layer.get(n) for n in range(layers)]] if by_layer else []
        rows = [str(row) for row in zip(*kinds, strict=True)]
        first = sorted({rows.index(row) for row in rows})[: self.sizes.blocks]
        rest = [layer for layer in range(layers) if layer not in first]
        return sorted([*first, *rest[: max(0, self.sizes.blocks - len(first))]])

    def value(self, name: str, value: Any, beside: Values) -> Any:
        """A field's value; ``beside`` it are the others of its configuration."""
        if name in LEFT or value is None or isinstance(value, (bool, str, float)):
            return value
        if self.sizes.keep and re.search(self.sizes.keep, name):
            return value
        if TOKENS.search(name):
            return [self.tokens.get(v, v) for v in value] if isinstance(value, list) else self.tokens.get(value, value)
        if name == "per_layer_config" and isinstance(value, dict):
            own = {
                int(layer): {n: self._of_layer(n, v, beside) for n, v in other.items()}
                for layer, other in value.items()
            }
            return {place: own[layer] for place, layer in enumerate(self.kept) if layer in own}
        if name in FIRST and self.layers:
            return sum(n < value for n in self.kept)
        if name in LAST and self.layers:
            return sum(n >= self.layers - value for n in self.kept)
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            return value
        if isinstance(value, dict):
            return self._rotations(value, beside) if name.startswith("rope_") else self.values(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._list(name, list(value)))
        return self._number(name, value) if isinstance(value, int) else value

    def _number(self, name: str, value: int) -> int:
        return next((rule(value, self.sizes) for pattern, rule in COMPILED if pattern.search(name)), value)

    def _of_layer(self, name: str, value: Any, beside: Values) -> Any:
        """What one layer has otherwise than the rest, as many times as large as before."""
        whole = beside.get(name)
        if type(value) is not int or type(whole) is not int or not whole:
            return self.value(name, value, beside)
        return max(1, self.value(name, whole, beside) * value // whole)

    def _list(self, name: str, value: list[Any]) -> list[Any]:
        whole = bool(value) and all(type(each) is int for each in value)
        if self.layers > 1 and len(value) == self.layers:
            if whole and value in (list(range(self.layers)), list(range(1, self.layers + 1))):
                return value[: len(self.kept)]
            return [self._number(name, value[n]) if whole and WIDTHS.search(name) else value[n] for n in self.kept]
        if not whole:
            return [self.values(each) if isinstance(each, dict) else each for each in value]
        least = min(value)
        if NUMBERED.search(name) and len(self.kept) < self.layers and least >= 0 and max(value) < self.layers:
            return [self.kept.index(each) for each in value if each in self.kept] or [len(self.kept) - 1]
        if COUNTS.search(name):
            return [min(each, self.sizes.blocks) for each in value]
        if name.endswith("heads"):
            return [max(1, min(2, least) * each // least) for each in value]
        if WIDTHS.search(name) and least >= 2 * HEAD_WIDTH:
            base = min(least, self.sizes.width // 2)
            return [base * min(8, max(1, round(each / least))) for each in value]
        return [self._number(name, each) if re.search(r"_sizes?$", name) else each for each in value]

    def _rotations(self, value: Values, beside: Values) -> Values:
        """Rotary positions in sections have as many features as they had of half a head."""
        found = {name: self._rotations(own, beside) if isinstance(own, dict) else own for name, own in value.items()}
        section = value.get("mrope_section")
        if isinstance(section, (list, tuple)):
            width = beside.get("head_dim") or beside.get("hidden_size", 0) // (beside.get("num_attention_heads") or 1)
            total = max(len(section), self.sizes.head_width * sum(section) // (width or 2 * sum(section)))
            each = [max(1, total * part // sum(section)) for part in section]
            found["mrope_section"] = [*each[:-1], total - sum(each[:-1])]
        return found
