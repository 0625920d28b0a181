"""Every private name of torch that Phalanx touches, each with a test that fails clearly when torch moves."""

from __future__ import annotations

import getpass
import importlib
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter, setitem
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import Node
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "AsTorchDoes",
    "CheckpointAnswers",
    "Checkpointed",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "add_to_each",
    "as_plain_tensors",
    "compiler_folders",
    "converting_in_place",
    "copy_each",
    "default_store",
    "has_hooks",
    "has_step_hooks",
    "install",
    "installer",
    "made_by",
    "mutates",
    "new_group",
    "of_any_size",
    "place_in_memory",
    "preload",
    "scaled_product",
    "storage_id",
    "version",
    "versions",
]


def preload() -> None:
    """Import what the first training step would import: the optimizer's first use pulls in this module, for seconds."""
    importlib.import_module("torch._dynamo")


def storage_id(tensor: Tensor) -> int:
    """The identity of the memory behind a tensor, which views share; a fake tensor has one too, but no address."""
    return tensor.untyped_storage()._cdata


def place_in_memory(tensor: Tensor) -> tuple[int, int]:
    """The memory behind a tensor and where in it that begins: several weights may lie in one."""
    return storage_id(tensor), int(tensor.storage_offset())


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody asked to see its gradient."""
    return bool(parameter._backward_hooks)


def install(module: nn.Module, name: str, parameter: Tensor) -> None:
    """``setattr`` for a parameter that is there already, without its checks: ZeRO 3 does it at every use."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter  # type: ignore[assignment]  # a part of one, too
    else:  # a module that keeps lists of its weights must hear of it
        setattr(module, name, parameter)


def installer(places: Sequence[tuple[nn.Module, str, Tensor]]) -> Callable[[], None]:
    """`install` for several at once, again and again."""
    plain = [place for place in places if type(place[0]).__setattr__ is nn.Module.__setattr__]
    others = [place for place in places if type(place[0]).__setattr__ is not nn.Module.__setattr__]
    tables: list[Any] = [module._parameters for module, _, _ in plain]
    names, parameters = [name for _, name, _ in plain], [parameter for _, _, parameter in plain]

    def install_all() -> None:
        deque(map(setitem, tables, names, parameters), maxlen=0)
        for module, name, parameter in others:
            setattr(module, name, parameter)

    return install_all


def asked_channels_last(weight: nn.Parameter) -> bool:
    """Whether a constructor gave a described weight another memory format, as ``model.to(memory_format=...)`` does."""
    return bool(getattr(weight, "asked_channels_last", False)) or not weight.is_contiguous()


@contextmanager
def converting_in_place() -> Iterator[None]:
    """Meanwhile `Module.to` and its like change a described weight's dtype in place; torch itself swaps two and fails.

    Where a weight is does not change, nor its memory format: that is for whoever makes it. Which one was asked for is
    noted (`asked_channels_last`).
    """
    own = nn.Module._apply

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        with torch.no_grad():
            for weight in module._parameters.values():
                if weight is not None:
                    found = function(weight)
                    weight.data = weight.to(found.dtype)
                    weight.asked_channels_last = not found.is_contiguous()  # type: ignore[attr-defined]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(function(buffer).dtype)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = own  # type: ignore[method-assign]


def as_plain_tensors() -> AbstractContextManager[None]:
    """Meanwhile, on this thread, subclasses of tensors are not asked what functions of them are to do."""
    return torch._C.DisableTorchFunctionSubclass()


def made_by(tensor: Tensor) -> list[Node]:
    """The nodes of the graph that a tensor comes from: its own, and that of the tensor which it is a view of.

    Where a view is changed in place its own node is left out of the graph, and that of the other stays in it.
    """
    base = tensor._base
    every = [tensor.grad_fn, None if base is None else base.grad_fn]
    return [node for node in every if node is not None]


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to in place."""
    return tensor._version


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """The same of several."""
    return [*map(attrgetter("_version"), tensors)]


def has_step_hooks(optimizer: optim.Optimizer) -> bool:
    """Whether anybody is told before or after its steps."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def add_to_each(tensors: list[Tensor], number: float) -> None:
    """In place, in one launch."""
    torch._foreach_add_(tensors, number)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Each to its own; in few launches where they are of one device and of one piece."""
    torch._foreach_copy_(targets, sources)


def norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Of each, computed in a dtype, in few launches."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype))


def mutates(func: Any) -> bool:
    """Whether an operation writes to one of its arguments."""
    return func._schema.is_mutable


def default_store() -> dist.Store:
    """Where the ranks of the world left their addresses."""
    return dist.distributed_c10d._get_default_store()


def new_group(
    members: Sequence[int], rank: int, name: str, timeout: timedelta, described: str, device: torch.device | None
) -> dist.ProcessGroup:
    """A process group that its members alone make, under a name that no group of their world has had.

    `dist.new_group` has every rank of the world take part; with ``use_local_synchronization`` it numbers groups by how
    many a rank has just now, which members need not agree on, and uses names again, under which old addresses are left.
    """
    c10d: Any = dist.distributed_c10d
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None  # or NCCL would split the world, which takes all ranks
    try:
        group, _ = c10d._new_process_group_helper(
            len(members), members.index(rank), list(members), dist.get_backend(), default_store(), name,
            timeout=timeout, device_id=device, group_desc=described,
        )  # fmt: skip
    finally:
        world.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(members)}
    return group


def scaled_product(one: Tensor, other: Tensor, by_one: Tensor, by_other: Tensor, dtype: torch.dtype) -> Tensor:
    """``one @ other`` of numbers in 8 bits, each times its factor; `F.scaled_mm`, the same, is not traced by Dynamo."""
    return torch._scaled_mm(one, other, scale_a=by_one, scale_b=by_other, out_dtype=dtype, use_fast_accum=True)


SCALED_PRODUCT = torch.ops.aten._scaled_mm.default
"""What it becomes."""
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""What `F.grouped_mm` becomes."""
ATTENTION = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
"""What `F.scaled_dot_product_attention` becomes, on a GPU or a CPU."""
PACKED_ATTENTION = "torch_attn._varlen_attn.default"
"""What ``varlen_attn`` becomes, by name: it is there when that has been imported, which takes seconds."""


def compiler_is_loaded() -> bool:
    """Whether anything of this process may be compiled. To load it takes seconds."""
    return "torch._dynamo" in sys.modules


def compiler_folders() -> dict[str, str]:
    """By variable, where torch's compiler and Triton keep what they made if it is not set, and load it from.

    Their own functions would import all of them.
    """
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    inductor = os.path.join(tempfile.gettempdir(), name)
    return {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": os.path.join(home, ".triton", "cache")}


def of_any_size(tensor: Tensor, dim: int) -> Tensor:
    """The same; a program that is compiled for it is for other sizes of this dim too, where it can be."""
    if compiler_is_loaded():
        sys.modules["torch._dynamo"].maybe_mark_dynamic(tensor, dim)
    return tensor


def compiled_frames() -> int:
    """How many functions this process has compiled so far; one that is compiled anew counts again."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["frames"]["total"]) if compiler is not None else 0


def compile_seconds(last: int) -> float:
    """What the last ones of these took."""
    compiler = sys.modules.get("torch._dynamo.utils")
    known = compiler.compilation_time_metrics.get("_compile.compile_inner", []) if compiler is not None else []
    return float(sum(known[-last:])) if last > 0 else 0.0


@dataclass(frozen=True)
class Checkpointed:
    """How a function that is given to `torch.utils.checkpoint` runs."""

    during: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Entered while it runs, where nothing of it is recomputed."""
    again: Callable[..., Any] | None = None
    """What backward calls in its place, with the same arguments; None: nothing is recomputed."""


@dataclass(frozen=True)
class AsTorchDoes:
    """A function that `torch.utils.checkpoint` runs as always: nobody is asked."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class CheckpointAnswers:
    """While it is entered, every call of `torch.utils.checkpoint`, however it was imported, asks ``answer`` how to run.

    Reentrant calls become others. Nothing is asked where no gradients are computed.
    """

    def __init__(self, answer: Callable[[Callable[..., Any]], Checkpointed]) -> None:
        def generator(
            function: Any, preserve: bool, contexts: Any, check: str, *rest: Any, **kwargs: Any
        ) -> Iterator[None]:
            if isinstance(function, AsTorchDoes):
                yield from _CHECKPOINT_GENERATOR(function, preserve, contexts, check, *rest, **kwargs)
                return
            how = answer(function) if torch.is_grad_enabled() else Checkpointed()
            if how.again is None:
                with how.during:
                    yield
            else:
                yield from _CHECKPOINT_GENERATOR(how.again, False, contexts, check, *rest, **kwargs)

        self._instead = {"CheckpointFunction": NotReentrant, "_checkpoint_without_reentrant_generator": generator}
        self._before: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        names = vars(torch.utils.checkpoint)
        self._before.append({name: names[name] for name in self._instead})
        names.update(self._instead)

    def __exit__(self, *error: object) -> None:
        vars(torch.utils.checkpoint).update(self._before.pop())


class NotReentrant:
    """In the place of `torch.utils.checkpoint.CheckpointFunction`: the same without reentrant autograd."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Run a function now, and again in backward."""
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


_CHECKPOINT_GENERATOR: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator
