"""Numbers that an optimizer changes as it goes, in its groups and attributes: noted by weight, and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import optim

from phalanx.train.optimizers import attributes, set_attribute


class Numbers:
    """Those of one optimizer, against what it was made with."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._options = [_numbers(group) for group in optimizer.param_groups]
        self._attributes = _numbers(attributes(optimizer))

    def facts(self) -> dict[str, Any]:
        """What has changed, to be saved."""
        options: dict[str, dict[str, Any]] = {}
        for group, before in zip(self.optimizer.param_groups, self._options, strict=True):
            changed = _changed(group, before)
            options |= {p.logical_name: changed for p in group["params"] if changed}
        return {"options": options, "attributes": _changed(attributes(self.optimizer), self._attributes)}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Put back what was saved."""
        for group, before in zip(self.optimizer.param_groups, self._options, strict=True):
            for name in _numbers(group).keys() - before:
                group.pop(name)  # it came later than what is put back
            named = [p.logical_name for p in group["params"] if p.logical_name in facts["options"]]
            kept = facts["options"][named[0]] if named else {}
            group.update({name: _like(group.get(name), value) for name, value in kept.items()})
        for name, value in facts["attributes"].items():
            set_attribute(self.optimizer, name, _like(attributes(self.optimizer).get(name), value))


def plain_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's options that text can keep: numbers, words, and lists of them."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in options.items()
        if all(isinstance(item, plain) for item in (value if isinstance(value, (tuple, list)) else [value]))
    }


def _numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps beside its state, or for a group; not the schedule's rate."""
    return {n: v for n, v in plain_values(options).items() if n not in ("lr", "params") and not n.startswith("_")}


def _changed(options: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in _numbers(options).items() if n not in before or before[n] != v}


def _like(before: Any, value: Any) -> Any:
    """What was kept as a list, as the tuple that it was."""
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value
