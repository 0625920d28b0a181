"""Activation checkpointing by the model itself: ``torch.utils.checkpoint``, reentrant or not.

What backward recomputes must draw the same numbers, see the same shards and count nothing twice. torch restores its own
generators for that, which keyed draws do not use. So while a model computes, `ModelCheckpoints` decides how a call of
``torch.utils.checkpoint`` runs, however the model imported it:

- Around whole blocks, as ``gradient_checkpointing_enable()`` of Hugging Face's models and ``set_grad_checkpointing()``
  of timm's do it, each of these blocks is recomputed as by ``recompute=full``: inside of what shards the stream,
  gathers weights and cuts pipeline stages.
- Around anything else, the function is called again in the state in which it was called first.

Reentrant calls run without reentrant autograd: the gradients are the same, and those of weights are not lost where no
input requires one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from phalanx.parallel.randomness.draws import Randomness, Replay
from phalanx.parallel.torch_private import CheckpointAnswers, Checkpointed

Function = Callable[..., Any]
DEPTH = 4
"""How many functions that hold each other are looked into."""


class ModelCheckpoints(CheckpointAnswers):
    """Decides, while a model computes, how its calls of ``torch.utils.checkpoint`` run."""

    def __init__(self, randomness: Randomness, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__(self._answer)
        self.randomness, self._blocks = randomness, frozenset(blocks)
        words = [name.split(".") for name in blocks]
        above = {".".join(each[:length]) for each in words for length in range(len(each) + 1)}
        self._hold_blocks = {id(model.get_submodule(name)) for name in above}
        """Blocks, and all modules that have blocks in them."""

    def _answer(self, function: Function) -> Checkpointed:
        inside = self.randomness.name.partition(" ")[0] in self._blocks
        if not inside and any(id(module) in self._hold_blocks for module in called_modules(function)):
            return Checkpointed(during=self._recomputing_blocks())
        return Checkpointed(again=partial(_again, self.randomness.replayed(), function))

    @contextmanager
    def _recomputing_blocks(self) -> Iterator[None]:
        outer, self.randomness.recomputes_blocks = self.randomness.recomputes_blocks, True
        try:
            yield
        finally:
            self.randomness.recomputes_blocks = outer


class RunOnce(CheckpointAnswers):
    """Runs what a model would checkpoint once, and recomputes nothing: what its results are held against."""

    def __init__(self) -> None:
        super().__init__(lambda function: Checkpointed())


def _again(state: Replay, function: Function, *args: Any, **kwargs: Any) -> Any:
    with state:
        return function(*args, **kwargs)


def called_modules(function: Any, depth: int = DEPTH) -> Iterator[nn.Module]:
    """The modules that a function can be seen to call: itself, what it is a method of, what its closure holds.

    Of a module whose children the function names, as ``lambda x: self.norm(x)`` does, those children.
    """
    if depth < 0:
        return
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, MethodType):
        yield from _named_by(function.__func__, function.__self__, depth)
    elif isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        for held in (*cells, *(function.__defaults__ or ())):
            yield from (
                _named_by(function, held, depth) if isinstance(held, nn.Module) else called_modules(held, depth - 1)
            )
    else:
        for part in _parts(function):
            yield from called_modules(part, depth - 1)


def _parts(holder: Any) -> Iterable[Any]:
    if isinstance(holder, partial):
        return holder.func, *holder.args, *holder.keywords.values()
    if isinstance(holder, dict):
        return holder.values()
    return holder if isinstance(holder, (list, tuple)) else ()


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _named_by(function: Any, owner: Any, depth: int) -> Iterator[nn.Module]:
    """Of a module that a function works with, the children that its code names, by way of methods too; else itself."""
    if not isinstance(owner, nn.Module):
        return
    found = list(_children_named(function, owner, depth))
    yield from found or [owner]


def _children_named(function: Any, owner: nn.Module, depth: int) -> Iterator[nn.Module]:
    if depth < 0:
        return
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        each = None if hasattr(nn.Module, name) else getattr(owner, name, None)
        if isinstance(each, nn.Module):
            yield each
        elif isinstance(each, MethodType) and each.__self__ is owner:
            yield from _children_named(each.__func__, owner, depth - 1)
