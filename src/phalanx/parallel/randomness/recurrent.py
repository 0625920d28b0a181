"""Dropout between the layers of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, keyed like any other draw.

torch's and cuDNN's kernels draw it inside, from a state of their own. So where it is asked for, layers run one by one,
with a keyed dropout between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from phalanx.parallel.randomness.draws import Randomness

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def recurrent(draw: Randomness, func: Callable[..., Any], *args: Any) -> Any:
    """Answers ``torch.lstm``, ``torch.gru`` and ``torch.rnn_*``, of padded and of packed sequences."""
    if not draws_between_layers(args):
        return func(*args)
    packed = _packed(args)
    x, sizes = args[0], args[1]
    hidden, weights, bias, layers, p, training, both_ways, *rest = args[2:] if packed else args[1:]

    def dropped(x: Tensor) -> Tensor:
        if packed:
            return _dropped_rows(draw, x, sizes, p)
        return draw.dropped(x, p) if rest[0] else draw.dropped(x.transpose(0, 1), p).transpose(0, 1)

    states = hidden if isinstance(hidden, (list, tuple)) else (hidden,)
    begin, ends = ((sizes,) if packed else ()), []
    for layer in range(layers):
        own = [_share(state, layers, layer) for state in states]
        given = tuple(own) if isinstance(hidden, (list, tuple)) else own[0]
        part = _share(weights, layers, layer)
        x, *end = func(dropped(x) if layer else x, *begin, given, part, bias, 1, 0.0, training, both_ways, *rest)
        ends.append(end)
    return x, *(torch.cat(each) for each in zip(*ends, strict=True))


def draws_between_layers(args: Sequence[Any]) -> bool:
    """Whether a call of them drops anything: in training, between several layers."""
    layers, p, training = args[5:8] if _packed(args) else args[4:7]
    return bool(p and training and layers > 1)


def _packed(args: Sequence[Any]) -> bool:
    """Whether it is called with the rows of a packed sequence, and how many there are at each time."""
    return isinstance(args[3], (list, tuple))  # the weights, which come after these sizes


def _share(of_all: Any, layers: int, layer: int) -> Any:
    """One layer's part of weights or states that lie one layer after another."""
    each = len(of_all) // layers
    return of_all[layer * each : (layer + 1) * each]


def _dropped_rows(draw: Randomness, x: Tensor, sizes: Tensor, p: float) -> Tensor:
    """Of a packed sequence: a row is a sample's at a time, samples in the order in which they were sorted."""
    samples, times = int(sizes[0]), len(sizes)
    keep = draw.dropped(x.new_ones(samples, times, x.shape[1]), p)
    order = draw.packed_order
    rows = torch.cat([torch.arange(size) for size in sizes.tolist()]).to(x.device)
    at = torch.arange(times).repeat_interleave(sizes.cpu()).to(x.device)
    return x * keep[rows if order is None else order[rows], at]


def follow_packed(model: nn.Module, randomness: Randomness) -> None:
    """Have recurrent modules with dropout tell in which order the samples of a packed sequence are."""

    def note(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        randomness.packed_order = given.sorted_indices if isinstance(given, PackedSequence) else None

    for module in model.modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            module.register_forward_pre_hook(note, with_kwargs=True)
