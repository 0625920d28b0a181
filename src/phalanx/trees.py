"""Trees: lists, tuples, dicts and dataclasses, however nested, with tensors or other things at their ends.

One walker for what tasks, models and modules take and give. It looks into subclasses too: namedtuples, Hugging Face's
outputs, frozen dataclasses. What encloses itself is not followed a second time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

ENDS = {type(None), bool, int, float, str}
"""Nothing is in these; most of what modules are called with are tensors and these."""
PLAIN = {list, tuple, dict}
"""Containers that are made anew, and looked into without asking what else they may be."""
ABSENT = object()
DEPTH = 8
"""How deep objects that nobody knows are looked into."""


def mapped(change: Callable[[Any], Any], tree: Any, kind: Any = Tensor) -> Any:
    """The same tree with every item of a kind changed.

    Lists, tuples and dicts are made anew; other containers are copied if they hold such an item and kept if not.

    >>> mapped(lambda number: -number, {"a": [1, (2, "b")]}, int)
    {'a': [-1, (-2, 'b')]}
    """
    return _mapped(change, tree, kind, ())


def leaves(tree: Any, kind: Any = Tensor) -> Iterator[Any]:
    """Every item of a kind in a tree, in order.

    >>> list(leaves({"a": [1, (2, "b")]}, int))
    [1, 2]
    """
    return _leaves(tree, kind, ())


def ends(tree: Any) -> Iterator[Any]:
    """Everything in a tree that is no container."""
    inside = branches(tree)
    if inside is None:
        yield tree
    else:
        for item in inside:
            yield from ends(item)


def reachable(value: Any) -> list[Tensor]:
    """Tensors in a tree, and in attributes of objects in it, but for modules and classes."""
    found: list[Tensor] = []
    _reach(value, DEPTH, found)
    return found


def _reach(value: Any, depth: int, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif depth > 0 and type(value) in PLAIN:
        for item in value.values() if type(value) is dict else value:
            if isinstance(item, Tensor):
                found.append(item)
            elif type(item) not in ENDS:
                _reach(item, depth - 1, found)
    elif depth > 0 and isinstance(value, (list, tuple, Mapping)):
        for item in branches(value) or ():
            if type(item) not in ENDS:
                _reach(item, depth - 1, found)
    elif depth > 1 and not isinstance(value, (nn.Module, type)):
        for item in _attributes(value):
            if type(item) not in ENDS:
                _reach(item, depth - 2, found)


def branches(tree: Any) -> list[Any] | None:
    """What a container holds; None: it is none."""
    if isinstance(tree, (list, tuple)):
        return list(tree)
    if isinstance(tree, Mapping):
        return list(tree.values())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, name) for name in _fields(tree)]
    return None


def _mapped(change: Callable[[Any], Any], tree: Any, kind: Any, above: tuple[int, ...]) -> Any:
    if isinstance(tree, kind):
        return change(tree)
    of = type(tree)
    if of in ENDS or id(tree) in above:
        return tree
    known = of in PLAIN
    inside = (tree.values() if of is dict else tree) if known else branches(tree)
    if inside is None or (not known and next(_leaves(tree, kind, above), None) is None):
        return tree
    above = (*above, id(tree))
    items = [
        change(item) if isinstance(item, kind) else item if type(item) in ENDS else _mapped(change, item, kind, above)
        for item in inside
    ]
    if not known:
        return _like(tree, items)
    if of is tuple:
        return tuple(items)
    return items if of is list else dict(zip(tree, items, strict=True))


def _leaves(tree: Any, kind: Any, above: tuple[int, ...]) -> Iterator[Any]:
    if isinstance(tree, kind):
        yield tree
    elif (inside := branches(tree)) is not None and id(tree) not in above:
        above = (*above, id(tree))
        for item in inside:
            yield from _leaves(item, kind, above)


def _like(tree: Any, items: list[Any]) -> Any:
    """A container of the same class with other items; whatever else it has is as it was."""
    if isinstance(tree, tuple):
        return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return type(tree)(dict(zip(tree, items, strict=True)))  # type: ignore[call-arg]
    made = copy.copy(tree)
    if isinstance(made, list):
        made[:] = items
    elif isinstance(made, MutableMapping):
        for name, item in zip(tree, items, strict=True):  # Hugging Face's outputs refuse update()
            made[name] = item
    else:
        for name, item in zip(_fields(tree), items, strict=True):
            object.__setattr__(made, name, item)  # it may be frozen
    return made


def _fields(tree: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(tree) if _get(tree, field.name, ABSENT) is not ABSENT]


def _attributes(value: Any) -> list[Any]:
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return [_get(value, name, None) for name in [*slots, *getattr(value, "__dict__", ())]]


def _get(value: Any, name: str, otherwise: Any) -> Any:
    """An attribute; one that is not set, or raises in some other way where it is read, counts as not there."""
    try:
        return getattr(value, name)
    except Exception:  # as Hugging Face's configurations do, where layers differ
        return otherwise
