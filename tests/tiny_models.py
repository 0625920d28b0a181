"""A tiny model of any architecture of transformers', and a task that trains it: by rule, and by trial on plain torch.

Sizes are made small by the names of a configuration's fields (`phalanx.models.smaller`), in a few ways, and inputs are
made of the forward's parameters, in a few shapes: the first that gives gradients on one device is taken.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import phalanx
from phalanx import configs
from phalanx.models.smaller import Sizes, made_smaller, shorter_chunks, special_tokens

HEADS = (
    "CAUSAL_LM", "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CTC",
)  # fmt: skip
"""Which of its models is taken, by what they are for; else its body."""
SAMPLES, TIME, WORDS, TRIED = 40, 10, 96, 6
LARGEST = 8_000_000
"""Weights of a model that still counts as tiny."""
Make = Callable[[torch.Generator], Tensor]
"""One input of one sample."""


def _sizes(blocks: int = 2, heads: int = 4, **more: Any) -> Sizes:
    return Sizes(blocks, heads, WORDS, **{"pixels": 32, "positions": 64, **more})


WAYS: tuple[Sizes, ...] = (
    _sizes(),
    _sizes(pixels=64),
    _sizes(patch=4),
    _sizes(head_width=16),
    _sizes(head_width=16, pixels=64),
    _sizes(keep="head_dim|head_size"),
    _sizes(keep="intermediate|ffn|window|chunk|groups"),
    _sizes(blocks=4),
    _sizes(keep="index|layers", blocks=12),
    _sizes(heads=12),
    _sizes(heads=20, head_width=4),
    _sizes(keep="channels|hidden_sizes|dims", pixels=64),
    _sizes(keep="channels|dim|sizes|heads|embed", pixels=64),
    _sizes(pixels=224),
    _sizes(keep="hidden_size|heads|intermediate"),
    _sizes(keep="."),
)
"""In which sizes are made small, one after another until one works."""


class NotTiny(Exception):
    """No way was found to make an architecture tiny; in words, why each was none."""


@dataclass
class Tiny:
    """A tiny model, what a sample of it is, and which of its outputs the loss is of."""

    kind: str
    model: type[nn.Module]
    config: Any
    inputs: dict[str, Make]
    output: str = ""
    folded: frozenset[str] = frozenset()
    """Inputs whose rows are not samples: each sample has several."""
    weights: int = 0

    def build(self) -> nn.Module:
        return self.model(copy.deepcopy(self.config))

    def sample(self, index: int) -> dict[str, Tensor]:
        return {name: make(torch.Generator().manual_seed(index)) for name, make in self.inputs.items()}

    def call(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return model(**self.arguments(batch))

    def arguments(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.flatten(0, 1) if name in self.folded else value for name, value in batch.items()}

    def rows(self, output: Any, samples: int) -> Tensor:
        """The output that the loss is of, a row a sample."""
        for name in self.output.split(".") if self.output else ():
            output = output[int(name)] if isinstance(output, (list, tuple)) else output[name]
        return by_sample(output.tensor() if isinstance(output, phalanx.Logits) else output, samples)


def by_sample(rows: Tensor, samples: int) -> Tensor:
    """Rows by sample, where each has several."""
    return rows if len(rows) == samples or len(rows) % samples else rows.unflatten(0, (samples, -1))


def architectures() -> list[str]:
    """All model types that transformers has a configuration for."""
    return list(CONFIG_MAPPING_NAMES)


def model_class(kind: str) -> type[nn.Module] | None:
    """The model that is trained of an architecture; None where transformers has none, or lacks a package for it."""
    own = CONFIG_MAPPING[kind]
    heads = [f"MODEL_FOR_{head}" for head in HEADS]
    if getattr(own, "is_encoder_decoder", False):
        heads = ["MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", *heads]
    others = [name.removesuffix("_MAPPING_NAMES") for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")]
    for head in dict.fromkeys([*heads, "MODEL", *others]):
        names = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(kind, ())
        for name in [names] if isinstance(names, str) else names:
            try:
                found = getattr(transformers, name, None)
                fits = isinstance(found, type) and issubclass(found, PreTrainedModel)
                fits = fits and issubclass(own, getattr(found, "config_class", None) or own)
            except ImportError:
                continue
            if fits:
                return found  # type: ignore[no-any-return]
    return None


def tiny_config(kind: str, model: type[nn.Module], sizes: Sizes) -> Any:
    """A small configuration of an architecture: its default one with small sizes, and what that leaves unsaid."""
    own = CONFIG_MAPPING[kind]
    config = made_smaller(own(prediction_length=4) if hasattr(own, "prediction_length") else own(), sizes)
    shorter_chunks(config, TIME)
    in_sections = "mrope_section" in inspect.getsource(sys.modules[model.__module__])
    text = configs.text(config)
    if hasattr(text, "vocab_size") and text.vocab_size is None:
        text.vocab_size = WORDS
    for own in configs.with_parts(config):
        for place, name in enumerate(name for name in vars(own) if re.search(r"_token_(id|index)$", name)):
            if configs.read(own, name) is None and not name.startswith(("forced", "bos", "eos", "sep", "cls")):
                setattr(own, name, 0 if name.startswith("pad") else WORDS - 20 + place)
        if configs.read(own, "num_experts_per_tok", "num_experts") and configs.read(own, "num_experts_per_tok") is None:
            own.num_experts_per_tok = 2
        if in_sections and isinstance(rope := configs.read(own, "rope_parameters"), dict) and "rope_theta" in rope:
            half = int(sizes.head_width * rope.get("partial_rotary_factor", 1)) // 2
            rope.setdefault("mrope_section", [half // 4, half // 4, half - 2 * (half // 4)])
        own.use_cache = False if configs.read(own, "use_cache") else configs.read(own, "use_cache")
    return config


@dataclass
class Inputs:
    """What a model's forward may be called with, by the names of its parameters."""

    model: nn.Module
    config: Any
    pictures: int = 0
    """Tokens of text that stand for a picture or a sound."""
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        found = inspect.signature(self.model.forward).parameters.values()
        self.names = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.required = [p.name for p in found if p.name in self.names and p.default is inspect.Parameter.empty]

    def read(self, *names: str) -> Any:
        found = (configs.read(own, *names) for own in configs.with_parts(self.config))
        return next((value for value in found if value is not None), None)

    def number(self, *names: str, default: int) -> int:
        value = self.read(*names)
        value = value[-1] if isinstance(value, (list, tuple)) and value else value
        return value if type(value) is int and value > 0 else default

    def sets(self) -> Iterator[list[str]]:
        """Names of inputs that are tried together, those that use most of a model first."""
        main = getattr(self.model, "main_input_name", "input_ids")
        base = [name for name in [main if isinstance(main, str) else main[0], *self.required] if name in self.names]
        grids = [name for name in ("image_grid_thw", "grid_thw", "mm_token_type_ids") if name in self.names]
        extra = [*grids, *(name for name in ("bbox", "decoder_input_ids") if name in self.names)]
        text = "input_ids" in self.names
        for media in ("pixel_values", "input_features"):
            if text and media in self.names:
                yield list(dict.fromkeys([*base, "input_ids", media, *extra]))
        yield list(dict.fromkeys([*base, *extra]))
        yield list(dict.fromkeys(base))
        if text:
            yield list(dict.fromkeys([*base, "input_ids", *(n for n in extra if n not in grids)]))
            yield ["input_ids"]

    def makers(self) -> Iterator[tuple[dict[str, Make], frozenset[str]]]:
        """Inputs that are tried, each with which of them are folded."""
        seen = set()
        for names in self.sets():
            if tuple(names) in seen:
                continue
            seen.add(tuple(names))
            choices = [self.choices(name, names) for name in names]
            for chosen in itertools.islice(itertools.product(*choices), 12):
                grid = any(name.endswith("grid_thw") for name in names)
                folded = {
                    n for n in names if n.endswith("grid_thw") or (grid and n in ("pixel_values", "hidden_states"))
                }
                yield dict(zip(names, chosen, strict=True)), frozenset(folded)

    def choices(self, name: str, beside: Sequence[str]) -> list[Make]:
        """What an input may be; none: it is not known."""
        shapes = self.shapes(name, any(other.endswith("grid_thw") for other in beside))
        if name in ("input_ids", "decoder_input_ids", "input"):
            return [self.tokens(self.pictures if name == "input_ids" else 0)]
        if name == "mm_token_type_ids":
            tokens, place = self.tokens(self.pictures), self.place
            return [lambda draw: (tokens(draw) == place).int()]
        if name.endswith("grid_thw"):
            each = 2 * self.number("spatial_merge_size", default=1)
            return [lambda draw: torch.tensor([[1, each, each]])]
        if name == "bbox":
            return [lambda draw: torch.zeros(TIME, 4, dtype=torch.long), lambda draw: torch.zeros(TIME, 8)]
        if name in ("attention_mask", "input_features_mask", "feature_attention_mask"):
            length = shapes[0][0] if shapes else TIME
            return [lambda draw: torch.ones(length, dtype=torch.long)]
        return [_normal(shape) for shape in shapes]

    @property
    def place(self) -> int:
        """The token that stands for a picture, or for a sound where there is none."""
        names = [f"{what}_token_{how}" for what in ("image", "audio", "video") for how in ("id", "index")]
        return self.number(*names, default=-1)

    def tokens(self, pictures: int) -> Make:
        size = self.number("vocab_size", "codebook_size", default=32)
        special = set(special_tokens(self.config))
        words = torch.tensor([n for n in range(size) if n not in special] or [0])
        before = torch.full((pictures,), self.place)

        def made(draw: torch.Generator) -> Tensor:
            return torch.cat([before, words[torch.randint(0, len(words), (TIME,), generator=draw)]])

        return made

    def shapes(self, name: str, in_grid: bool) -> list[tuple[int, ...]]:
        """Shapes that an input of numbers may have, of one sample."""
        pixels = self.read("image_size", "img_size", "crop_size", "spec_size") or 32
        height, width = (pixels if isinstance(pixels, (list, tuple)) else (pixels, pixels))[-2:]
        channels = self.number("num_channels", "in_channels", "input_channels", default=3)
        patch, times = self.number("patch_size", default=8), self.number("temporal_patch_size", default=1)
        frames = self.number("num_frames", default=2)
        mel = self.number("num_mel_bins", "feature_size", "input_feat_per_channel", "mel_dim", "input_dim",
                          "model_in_dim", "input_feat_size", default=80)  # fmt: skip
        long = 2 * self.number("max_source_positions", default=32)
        hidden = self.number("hidden_size", "d_model", "embed_dim", default=32)
        context = self.number("context_length", "seq_len", default=32)
        if in_grid and name in ("pixel_values", "hidden_states"):
            count = (2 * self.number("spatial_merge_size", default=1)) ** 2
            return [(count, channels * times * patch * patch), (count, hidden)]
        known: dict[str, list[tuple[int, ...]]] = {
            "pixel_values": [
                (channels, height, width), (frames, channels, height, width), (channels, frames, height, width),
                (16, channels * patch * patch), (1, channels, height, width),
            ],
            "pixel_values_videos": [(frames, channels, height, width)],
            "input_features": [(mel, long), (long, mel), (1, long, mel), (long,)],
            "input_values": [
                (1600,), (1, 1600), (self.number("max_length", default=long), mel), (mel, long), (6000,), (long, mel),
                (1, long, mel),
            ],
            "audio_values": [(long, mel), (1, long, mel)],
            "past_values": [(context,), (context, self.number("num_input_channels", default=1))],
            "inputs_embeds": [(TIME, hidden)], "hidden_states": [(TIME, hidden)],
            "encoder_hidden_states": [(TIME, self.number("encoder_hidden_size", default=hidden))],
            "query_embeds": [(4, hidden)],
        }  # fmt: skip
        return known.get(name, [])


def _normal(shape: tuple[int, ...]) -> Make:
    return lambda draw: torch.randn(shape, generator=draw)


def tiny(kind: str, seconds: float = 20.0) -> Tiny:
    """The first way that works, tried for so many seconds of a processor; raises NotTiny, or what a package lacks."""
    kept, began, why = model_class(kind), time.process_time(), ["no model class"]
    if kept is None:
        raise NotTiny(f"{kind}: transformers has no model for it here")
    for sizes in WAYS:
        if time.process_time() - began > seconds:
            why.append("out of time")
            break
        try:
            config = tiny_config(kind, kept, sizes)
            with torch.device("meta"):
                weights = _weights(kept(copy.deepcopy(config)))
        except ImportError:
            raise
        except Exception as error:
            why.append(f"{type(error).__name__}: {error}")
            continue
        if weights > LARGEST:
            why.append(f"{weights:,} weights")
            continue
        try:
            return _tried(Tiny(kind, kept, config, {}, weights=weights), why)
        except NotTiny:
            continue
    raise NotTiny(f"{kind}: " + "; ".join(dict.fromkeys(str(each).splitlines()[0][:150] for each in why[1:])))


def _weights(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _tried(found: Tiny, why: list[str]) -> Tiny:
    """The same with inputs that it takes, and an output that has gradients."""
    torch.manual_seed(0)
    try:
        model = found.build()
    except Exception as error:
        why.append(f"{type(error).__name__}: {error}")
        raise NotTiny from error
    pictures = [0]
    for count in pictures:
        for makers, folded in Inputs(model, found.config, count).makers():
            found.inputs, found.folded = makers, folded
            try:
                if (output := _output(found, model)) is not None:
                    found.output = output
                    return found
                why.append(f"no output with gradients of {', '.join(makers)}")
            except Exception as error:
                why.append(f"{type(error).__name__}: {error}")
                if count == 0 and len(pictures) < 4 and "input_ids" in makers and "feature" in str(error).lower():
                    asked = [int(number) // TRIED for number in re.findall(r"\d+", str(error))]
                    pictures += [each for each in asked if 0 < each <= 64 and each not in pictures]
    raise NotTiny


def _output(found: Tiny, model: nn.Module) -> str | None:
    """The first output with gradients and a row a sample, if there is one that no other sample has part in."""
    samples = [found.sample(index) for index in range(TRIED)]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    output = _by_name(found.call(model.train(), batch), TRIED)
    rows = [name for name, x in output.items() if x.requires_grad and x.ndim and len(x) == TRIED]
    if not rows:
        return None
    model.eval()
    with torch.no_grad():
        whole = _by_name(found.call(model, batch), TRIED)
        half = _by_name(found.call(model, {name: x[: TRIED // 2] for name, x in batch.items()}), TRIED // 2)
    apart = [
        name for name in rows
        if name in half and half[name].shape == whole[name][: TRIED // 2].shape
        and torch.allclose(half[name], whole[name][: TRIED // 2], atol=1e-4, rtol=1e-3)
    ]  # fmt: skip
    chosen = (apart or rows)[0]
    _off_a_wave(output[chosen]).total.backward()
    return chosen


def _by_name(output: Any, samples: int) -> dict[str, Tensor]:
    return {name: by_sample(x, samples) if x.ndim else x for name, x in _tensors(output)}


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield name, output
    elif hasattr(output, "items") or isinstance(output, (list, tuple)):
        for key, value in output.items() if hasattr(output, "items") else enumerate(output):
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _off_a_wave(rows: Tensor) -> phalanx.Loss:
    """How far each sample's numbers are from a fixed wave, so that none is at its best already."""
    flat = rows.flatten(1) if rows.ndim > 1 else rows.unsqueeze(1)
    wave = torch.arange(flat.shape[1], device=flat.device).to(flat.dtype).cos()
    return phalanx.Loss((flat - wave).square().mean(1).sum(), len(flat))


FOUND: dict[str, Tiny] = {}
"""What tasks of this process train, by architecture; ranks are forked with it."""


class Samples:
    def __init__(self, found: Tiny) -> None:
        self.found = found

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.found.sample(index)


@dataclass
class Architecture(phalanx.Task):
    """Trains a tiny model of an architecture that `FOUND` has."""

    kind: str = ""
    global_batch: int = 8
    steps: int = 2

    @property
    def found(self) -> Tiny:
        return FOUND[self.kind]

    def model(self) -> nn.Module:
        return self.found.build()

    def data(self) -> Samples:
        return Samples(self.found)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.found.arguments({name: batch[name] for name in self.found.inputs})

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        samples = len(next(iter(batch.values())))
        return _off_a_wave(self.found.rows(output, samples))
