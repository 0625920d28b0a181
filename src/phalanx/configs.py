"""What a model's configuration says, read in one place: None wherever it does not say.

Configurations of Hugging Face's name one size in several ways, hold configurations of parts (text, vision, audio),
compute some attributes, and raise where an attribute differs between layers. Nothing else in Phalanx reads sizes off
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
HEAD_WIDTHS = ("head_dim", "d_kv", "attention_head_size", "kv_channels")
FULL_ATTENTION = "full_attention"


def read(config: Any, *names: str) -> Any:
    """The first of these attributes that a configuration has; None if it has none of them.

    An attribute that raises counts as absent: it may differ between layers, or be computed from what is not there.
    """
    for name in names:
        try:
            value = getattr(config, name)
        except Exception:  # AttributeError, or an error of the configuration's own
            continue
        if value is not None:
            return value
    return None


def number(config: Any, *names: str) -> int | None:
    """The first of these attributes that is a whole number."""
    found = (read(config, name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def is_config(value: Any) -> bool:
    """Whether this is a configuration, as Hugging Face's are."""
    return hasattr(type(value), "model_type") and callable(getattr(value, "to_dict", None))


def parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The configurations inside a configuration, such as those of text and vision, with the names they have there."""
    held = getattr(config, "__dict__", {})
    yield from ((name, value) for name, value in held.items() if is_config(value))


def with_parts(config: Any) -> Iterator[Any]:
    """A configuration, and all that are inside it, outermost first."""
    yield config
    for _, part in parts(config):
        yield from with_parts(part)


def text(config: Any) -> Any:
    """The part of a configuration that is about text; the configuration itself where there is one part alone."""
    find = read(config, "get_text_config")
    if find is None:
        return config
    try:
        return find(decoder=True)
    except Exception:  # several parts are about text
        return read(config, "text_config", "decoder", "text_encoder") or config


def _of_text(config: Any, names: tuple[str, ...]) -> int | None:
    found = number(text(config), *names)
    return number(config, *names) if found is None else found


def vocabulary(config: Any) -> int | None:
    """How many tokens a model's text has."""
    return _of_text(config, ("vocab_size",))


def hidden(config: Any) -> int | None:
    """How wide the residual stream is."""
    return _of_text(config, WIDTHS)


def layers(config: Any) -> int | None:
    """How many blocks there are."""
    return _of_text(config, LAYERS)


def heads(config: Any) -> int | None:
    """How many attention heads a block has."""
    return _of_text(config, HEADS)


def head_width(config: Any) -> int | None:
    """How many features an attention head has; None where heads of some layers are wider than those of others."""
    own = text(config)
    if (width := number(own, *HEAD_WIDTHS)) is not None:
        return width
    if set(HEAD_WIDTHS) & set(read(own, "per_layer_attributes") or ()):
        return None
    total, count = hidden(config), heads(config)
    return total // count if total and count else None


def positions(config: Any) -> int | None:
    """How many positions a model has; None where any number will do, or it does not say."""
    return _of_text(config, ("max_position_embeddings",))


def attention_differs(config: Any) -> bool:
    """Whether attention is not over all earlier positions in every block: windows, chunks, or layers of other kinds."""
    own = text(config)
    by_layer = set(read(own, "per_layer_attributes") or ())
    if by_layer & {"sliding_window", "attention_chunk_size", "layer_types"}:
        return True
    if read(own, "sliding_window") or read(own, "attention_chunk_size"):
        return True
    return any(kind != FULL_ATTENTION for kind in read(own, "layer_types") or ())


def scores_are_changed(config: Any) -> bool:
    """Whether attention caps its scores, or computes them in another order than torch's attention does."""
    return bool(read(text(config), "attn_logit_softcapping", "reorder_and_upcast_attn"))


def is_causal(config: Any) -> bool:
    """Whether attention looks at earlier positions alone, as a configuration has it; True where it does not say."""
    return read(text(config), "is_causal") is not False


def named_classes(config: Any) -> list[str]:
    """The classes of models that a configuration was saved by."""
    return list(read(config, "architectures") or [])
