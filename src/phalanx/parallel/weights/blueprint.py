"""A model built without its weights, and how to fill each of them alone.

The constructor runs as the user wrote it, but tensors it creates are only described (fake): every operation on them is
noted down. A weight is then made by replaying the operations that lead to it, with randomness keyed by (seed, the
draw's number). So a constructor's own initialisation is kept, weights do not depend on the layout, and no rank ever
holds a whole model. torch's meta device forgets what a constructor did, and `nn.init` skips work on it: hence this.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx import counter
from phalanx.errors import WrongUse
from phalanx.parallel.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    converting_in_place,
    mutates,
    storage_id,
)
from phalanx.parallel.weights import keras
from phalanx.trees import leaves, mapped

aten = torch.ops.aten
FACTORIES = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
}
NORMAL_FACTORIES = {aten.randn.default, aten.randn.generator}
RANDOM_FACTORIES = NORMAL_FACTORIES | {aten.rand.default, aten.rand.generator}
DRAWS = {aten.uniform_.default, aten.normal_.default} | RANDOM_FACTORIES
"""Draws of which each element's is numbered by its place."""
NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class Ref:
    """A view of described memory."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Operation:
    """One noted call; its results are refs, and so are its described arguments."""

    func: Any
    args: Any
    kwargs: Any
    results: list[Ref]
    draw: int
    """Its number among the constructor's draws, from 1; 0 if it draws nothing."""


@dataclass
class Constant:
    """A real tensor that a noted operation reads."""

    tensor: Tensor


class _Recorder(TorchDispatchMode):
    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.blueprint.observe(func, args, kwargs or {})


class _Assigned(TorchFunctionMode):
    """Describes a real tensor that a constructor assigns to the ``data`` of a described one, such as a file's."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and self.blueprint.described(args[0]) and not self.blueprint.described(args[1]):
            args = args[0], torch.empty(args[1].shape, dtype=args[1].dtype).copy_(args[1])
        return func(*args, **(kwargs or {}))


def _generator(args: Any, kwargs: Any) -> Any:
    return kwargs.get("generator", next((arg for arg in args if isinstance(arg, torch.Generator)), None))


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Blueprint:
    """A model whose tensors are described, and the operations that make them."""

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        self.seed = seed
        seeded = keras.imported()
        self._describe(build)
        if not seeded and keras.imported():  # by this constructor, whose draws were therefore others than they will be
            self._describe(build)
        if not isinstance(self.model, nn.Module):
            whose = getattr(build, "__qualname__", "Task.model")
            raise WrongUse(f"{whose} returned a {type(self.model).__name__}. Return an nn.Module.")
        lazy = [n for n, p in self.model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
        if lazy:
            raise WrongUse(
                f"the shape of {lazy[0]} is not known before the first batch. Use a layer that states its sizes."
            )
        keras.check_built(self.model)

    def _describe(self, build: Callable[[], nn.Module]) -> None:
        self._operations: list[Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._alive: dict[int, Tensor] = {}  # so that no storage's identity is reused while it is described
        self._constants: dict[int, list[Constant]] = {}
        self._drawn, self._random = 0, 0
        self._seed_before = 0
        self.reseeded: int | None = None
        """What the constructor has seeded torch's global generator with, before it drew."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

        def make() -> nn.Module:
            self._seed_before = torch.initial_seed()  # which Keras' may just have changed
            return build()

        with warnings.catch_warnings(), _Recorder(self), _Assigned(self), converting_in_place():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # deepcopy does
            self.model = keras.build(make, self.seed)

    def observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run or note one operation of the constructor."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random and isinstance(given := _generator(args, kwargs), torch.Generator):
            return self._drawn_by(given, func, args, kwargs)
        if random and torch.initial_seed() != self._seed_before:
            self.reseeded = torch.initial_seed()
        if self._constants and mutates(func) and isinstance(_target(args, kwargs), Tensor):
            self._about_to_change(_target(args, kwargs))
        if not any(self.described(t) for t in leaves((args, kwargs))):
            if (func in FACTORIES and math.prod(args[0])) or (random and not mutates(func)):
                return self._note(func, args, kwargs)
            return self._draw(func, args, kwargs, self._ad_hoc()) if random else func(*args, **kwargs)
        reads = NEEDS_VALUES.intersection(func.tags) or func is aten._local_scalar_dense.default
        if reads or (mutates(func) and not self.described(_target(args, kwargs))):
            real = mapped(lambda t: self._replay(t, "cpu") if self.described(t) else t, (args, kwargs))
            return func(*real[0], **real[1])
        return self._note(func, args, kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run on descriptions alone, and remember what was run unless it only looked."""
        if mutates(func) and torch.Tag.inplace_view not in func.tags and func.__name__.partition(".")[0].endswith("_"):
            result = args[0]  # an in-place operation gives its target, whose description stays as it is
        elif func in FACTORIES:
            result = FakeTensor(self._fake, func(*args, **kwargs | {"device": "meta"}), torch.device("cpu"))
        else:
            with self._fake:
                result = func(*args, **kwargs)
        results = list(leaves(result))
        known = {storage_id(t) for t in leaves((args, kwargs))}
        if not mutates(func) and all(storage_id(t) in known for t in results):
            return result
        for tensor in results:
            self._alive.setdefault(storage_id(tensor), tensor)
        written = results or [_target(args, kwargs)]
        noted_args, noted_kwargs = mapped(lambda t: _ref(t) if self.described(t) else self._keep(t), (args, kwargs))
        for storage in {storage_id(t) for t in written}:
            self._writers.setdefault(storage, []).append(len(self._operations))
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._random += random
        operation = Operation(func, noted_args, noted_kwargs, [_ref(t) for t in results], self._random if random else 0)
        self._operations.append(operation)
        return result

    def _keep(self, tensor: Tensor) -> Constant:
        constant = Constant(tensor.detach())
        self._constants.setdefault(storage_id(tensor), []).append(constant)
        return constant

    def _about_to_change(self, tensor: Tensor) -> None:
        """What was noted keeps the values it had."""
        for constant in self._constants.pop(storage_id(tensor), ()):
            constant.tensor = constant.tensor.clone()

    def described(self, tensor: Tensor) -> bool:
        """Whether a tensor of the constructor's is described, and has no memory."""
        return isinstance(tensor, FakeTensor) and storage_id(tensor) in self._alive

    def _drawn_by(self, generator: torch.Generator, func: Any, args: Any, kwargs: Any) -> Any:
        """What a generator of the constructor's own draws: the same as without us."""
        if not mutates(func):
            return func(*args, **kwargs)
        target = _target(args, kwargs)
        if not self.described(target):
            return func(*args, **kwargs)
        real = torch.empty(target.shape, dtype=target.dtype)
        func(real, *args[1:], **kwargs)
        return self._note(aten.copy_.default, (target, real), {})

    def _ad_hoc(self) -> int:
        self._drawn += 1
        return counter.key(self.seed, "init", "constructor", self._drawn)

    def value(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """The real tensor for a described one; a tensor the constructor made for real is moved as it is."""
        if not self.described(tensor):
            return tensor.detach().to(device)
        return self._replay(tensor, device)

    def _replay(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        made: dict[int, Tensor] = {}

        def real(value: Any) -> Any:
            if isinstance(value, Ref):
                return made[value.storage].as_strided(value.size, value.stride, value.offset)
            return value.tensor.to(device) if value.tensor.ndim else value.tensor

        with torch.no_grad():
            for operation in self._leading_to(storage_id(tensor)):
                args, kwargs = mapped(real, (operation.args, operation.kwargs), (Ref, Constant))
                if "device" in kwargs or not any(True for _ in leaves(args)):
                    kwargs["device"] = torch.device(device)
                if operation.draw:
                    result = self.draw(operation, operation.func, args, kwargs)
                else:
                    result = operation.func(*args, **kwargs)
                for ref, out in zip(operation.results, leaves(result), strict=True):
                    if ref.storage not in made:
                        made[ref.storage] = _whole_storage(out, ref)
        return real(_ref(tensor))

    def draw(self, operation: Operation, func: Any, args: Any, kwargs: Any, place: counter.Place | None = None) -> Any:
        """Answer a noted draw; what is drawn may be a box of the whole."""
        return self._draw(func, args, kwargs, counter.key(self.seed, "init", operation.draw), place)

    def leading_to(self, tensor: Tensor) -> tuple[Ref | None, list[Operation]]:
        """The operations that make a described tensor that is all of its memory, in order; None for others."""
        if not self.described(tensor) or not tensor.is_contiguous() or not tensor.ndim or not tensor.numel():
            return None, []
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            return None, []
        return _ref(tensor), list(self._leading_to(storage_id(tensor)))

    def _leading_to(self, storage: int) -> Iterator[Operation]:
        """The noted operations that this memory's contents depend on, in order."""
        needed: set[int] = set()
        wanted, seen = [storage], {storage}
        while wanted:
            for index in self._writers.get(wanted.pop(), ()):
                if index not in needed:
                    needed.add(index)
                    operation = self._operations[index]
                    read = {ref.storage for ref in leaves((operation.args, operation.kwargs), Ref)}
                    wanted += read - seen
                    seen |= read
        return (self._operations[index] for index in sorted(needed))

    @staticmethod
    def _draw(func: Any, args: Any, kwargs: Any, stream: int, place: counter.Place | None = None) -> Any:
        """Answer a random operation from the counter-based generator; a rare one from torch's, seeded by the stream.

        A generator that the constructor made for itself has gone on since, and is not asked.
        """
        args = [None if isinstance(arg, torch.Generator) else arg for arg in args]
        kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Generator)}
        if func is aten.uniform_.default:
            return counter.fill_uniform(args[0], stream, *_two(args, kwargs, ("from", "to"), (0.0, 1.0)), place)
        if func is aten.normal_.default:
            return counter.fill_normal(args[0], stream, *_two(args, kwargs, ("mean", "std"), (0.0, 1.0)), place)
        if func in RANDOM_FACTORIES:
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
            target = torch.empty(args[0], **kwargs)
            fill = counter.fill_normal if func in NORMAL_FACTORIES else counter.fill_uniform
            return fill(target, stream, 0.0, 1.0, place)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream & 0x7FFFFFFFFFFFFFFF)  # torch.manual_seed looks for every device
            return _on_cpu(func, args, kwargs)


def _on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on the CPU, whatever device its tensors are on: another has a generator of its own."""
    devices = [t.device for t in leaves((args, kwargs))] + [torch.device(kwargs.get("device") or "cpu")]
    if all(device.type == "cpu" for device in devices):
        return func(*args, **kwargs)
    there = mapped(Tensor.cpu, (args, kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})))
    result = func(*there[0], **there[1])
    if mutates(func):
        return _target(args, kwargs).copy_(_target(*there))
    return mapped(lambda tensor: tensor.to(kwargs.get("device") or devices[0]), result)


def _two(args: Any, kwargs: Any, names: tuple[str, str], default: tuple[float, float]) -> tuple[float, float]:
    first = args[1] if len(args) > 1 else kwargs.get(names[0], default[0])
    second = args[2] if len(args) > 2 else kwargs.get(names[1], default[1])
    return first, second


def _target(args: Any, kwargs: Any) -> Tensor:
    """The tensor an in-place operation writes to."""
    return args[0] if args else kwargs.get("self", kwargs.get("out"))


def _ref(tensor: Tensor) -> Ref:
    return Ref(storage_id(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _whole_storage(tensor: Tensor, ref: Ref) -> Tensor:
    """All memory behind a new tensor, flat, laid out as its description says: kernels may choose other strides."""
    if tensor.stride() != ref.stride or tensor.storage_offset() != ref.offset:
        fitting = torch.empty_strided(ref.size, ref.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = fitting.copy_(tensor)
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
