"""Hooks around a model's modules for one step: how long each takes, forward and backward, and what it gives.

Forward is seen by hooks of modules. What autograd notes while a module runs belongs to it, and hooks of these nodes see
backward; no gradient passes through anything of ours. What is computed again in backward counts as backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd.graph import Node

from phalanx.parallel.communication.instants import Instant, elapsed, now
from phalanx.trees import leaves

FORWARD, BACKWARD = "forward", "backward"
ACCUMULATES = "AccumulateGrad"
"""The node of a weight, which outlives a step."""


@dataclass
class ModuleCalls:
    """What was seen of one module, and of those inside it, in one step."""

    calls: int = 0
    recomputed: int = 0
    spans: list[tuple[str, int, Instant, Instant]] = field(default_factory=list)
    """Forward or backward; 1, or -1 where another has that time; from when to when."""
    flops: dict[str, int] = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0})
    output_bytes: int = 0

    def seconds(self, what: str) -> float:
        return max(0.0, sum(sign * elapsed(begun, ended) for kind, sign, begun, ended in self.spans if kind == what))


@cache
def around(name: str) -> tuple[str, ...]:
    """A module's name, and those of the modules that it is a part of."""
    words = name.split(".") if name else []
    return tuple(".".join(words[:n]) for n in range(len(words), -1, -1))


class ModuleHooks:
    """While it is entered. ``phase`` must be told which phase of the step runs."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], cuda: bool) -> None:
        self.modules, self.cuda = list(modules), cuda
        self.found: dict[str, ModuleCalls] = {name: ModuleCalls() for name, _ in self.modules}
        self.outside = ModuleCalls()
        """FLOPs of no module, such as a loss's."""
        self._phase = ""
        self._stack: list[tuple[str, Instant]] = []
        """Modules whose forward runs."""
        self._nodes: dict[Node, str] = {}
        """By node of the graph: the innermost module that made it."""
        self._running: tuple[str, Instant] | None = None
        """The module of the node whose backward runs."""
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self.modules:
            before = module.register_forward_pre_hook(partial(self._enters, name), prepend=True)
            after = module.register_forward_hook(partial(self._leaves, name), with_kwargs=True, always_call=True)
            self._undo.callback(before.remove)
            self._undo.callback(after.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._nodes.clear()

    def phase(self, phase: str) -> None:
        """Modules that are still running are those that the end of a pipeline's stage has left."""
        while self._stack:
            name, begun = self._stack.pop()
            self.found[name].calls += 1
            self.found[name].spans.append((FORWARD, 1, begun, now(self.cuda)))
        self._phase, self._running = phase, None

    def counted(self, flops: int) -> None:
        """Add to the module that is being computed, and to those that it is a part of."""
        what = BACKWARD if self._phase == BACKWARD else FORWARD
        inside = self._stack[-1] if self._stack else self._running
        for own in [self.outside] if inside is None else self._around(inside[0]):
            own.flops[what] += flops

    def _around(self, name: str) -> Iterator[ModuleCalls]:
        return (self.found[each] for each in around(name) if each in self.found)

    def _enters(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append((name, now(self.cuda)))

    def _leaves(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        while self._stack:  # also those that an error has left
            top, begun = self._stack.pop()
            if top == name:
                break
        else:
            return
        own, ended = self.found[name], now(self.cuda)
        if self._phase == BACKWARD:
            own.recomputed += 1
            self._computed_again(name, begun, ended)
            return
        own.calls += 1
        own.spans.append((FORWARD, 1, begun, ended))
        given = [] if output is None else list(leaves(output, Tensor))
        own.output_bytes += sum(tensor.numel() * tensor.element_size() for tensor in given)
        self._claim(name, given, list(leaves((args, kwargs), Tensor)))

    def _computed_again(self, name: str, begun: Instant, ended: Instant) -> None:
        """Inside the backward of a node, which is another module's perhaps."""
        if self._stack:
            self.found[name].spans.append((BACKWARD, 1, begun, ended))
            return
        for own in self._around(name):
            own.spans.append((BACKWARD, 1, begun, ended))
        for own in self._around(self._running[0]) if self._running is not None else ():
            own.spans.append((BACKWARD, -1, begun, ended))

    def _claim(self, name: str, given: list[Tensor], taken: list[Tensor]) -> None:
        """The nodes between what a module took and gave are its own, but for those of modules inside it."""
        seen = {tensor.grad_fn for tensor in taken if tensor.grad_fn is not None}
        waiting = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            owner = self._nodes.get(node)
            if node in seen or node.name().endswith(ACCUMULATES) or not (owner is None or name in around(owner)[1:]):
                continue
            seen.add(node)
            if owner is None:
                self._nodes[node] = name
                node.register_prehook(partial(self._begins, name))
                node.register_hook(partial(self._ends, name))
            waiting += [following for following, _ in node.next_functions if following is not None]

    def _begins(self, name: str, gradients: Any) -> None:
        self._running = name, now(self.cuda)

    def _ends(self, name: str, gradients: Any, outputs: Any) -> None:
        if self._running is not None and self._running[0] == name:
            begun, ended = self._running[1], now(self.cuda)
            for own in self._around(name):
                own.spans.append((BACKWARD, 1, begun, ended))
        self._running = None
