"""What another stage of a pipeline has: weights that can be described here, and the shapes of what its modules give.

A model's code outside of its blocks runs on every stage. It may ask a weight that is not here for its device, and it
goes on with what a module that is not here would give. That module is run on shapes (torch's meta device). Integers and
truth values keep their values on the way, since shapes may follow from them, as from the grid of a picture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx.errors import WrongUse
from phalanx.parallel.torch_private import TorchDispatchMode, as_plain_tensors, mutates
from phalanx.trees import leaves, mapped

NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
DEVICE = {vars(torch._C.TensorBase)[name].__get__ for name in ("device", "is_cpu", "is_cuda")}
MADE_LIKE = {
    Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros,
    torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like,
}  # fmt: skip
"""Functions that make a tensor of another's dtype and device, and read no value of it."""
MOVED_LIKE = {Tensor.to, Tensor.type_as}
"""Functions that bring their first argument to the dtype and device of another."""
MADE = {torch.tensor, torch.as_tensor, torch.asarray}
META = torch.device("meta")


class AbsentWeight(nn.Parameter):
    """Stands in a module for a weight that another stage has: it says where it would be, and has no values."""

    full_name: str
    like: Tensor

    @classmethod
    def of(cls, name: str, shapeless: Tensor, device: torch.device) -> AbsentWeight:
        """For a weight of this shape and dtype on a device."""
        made = cls(shapeless, requires_grad=False)
        made.full_name = name
        made.like = torch.empty((), dtype=shapeless.dtype, device=device).expand(shapeless.shape)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DEVICE or func in MADE_LIKE:
            args, kwargs = mapped(_like, (args, kwargs), AbsentWeight)
        elif func in MOVED_LIKE:
            args, kwargs = (*args[:1], *mapped(_like, args[1:], AbsentWeight)), mapped(_like, kwargs, AbsentWeight)
        with as_plain_tensors():
            absent = next(leaves((args, kwargs), AbsentWeight), None)
            if absent is not None and any(not tensor.is_meta for tensor in leaves((args, kwargs))):
                raise WrongUse(  # torch multiplies by a weight without values, and gives whatever lay in memory
                    f"{absent.full_name} is computed with on a stage of pp that does not have it. Use it in the "
                    "forward of its module alone, or use fsdp instead of pp."
                )
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentWeight:
        return self


def _like(weight: AbsentWeight) -> Tensor:
    return weight.like


def given(name: str, shadow: Callable[..., Any], device: torch.device, args: Any, kwargs: Any) -> Any:
    """What a module gives where it is: tensors on the meta device, and what follows from whole numbers alone.

    ``shadow``: the module, of which all weights are on the meta device.
    """
    args, kwargs = mapped(lambda t: t.to(META) if t.is_floating_point() else t, (args, kwargs))
    with _Shapes(name, device), _Devices(device):
        return shadow(*args, **kwargs)


class _Shapes(TorchDispatchMode):
    """Runs operations on real tensors where all of theirs are, and on shapes alone otherwise."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__()
        self.name, self.device = name, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if not any(tensor.is_meta for tensor in leaves((args, kwargs))):
            return func(*args, **(kwargs | {"device": self.device} if device == META else kwargs))
        target = args[0] if args and mutates(func) else None
        if isinstance(target, Tensor) and not target.is_meta and not target.is_floating_point():
            raise self._unknown()  # whoever has it takes its values for known
        if func is torch.ops.aten.index.Tensor:  # a mask's shape does not say how much it keeps
            args = (args[0], [part for index in args[1] for part in _places(index)])
        args, kwargs = mapped(lambda tensor: tensor.to(META), (args, kwargs))
        try:
            return func(*args, **(kwargs | {"device": META} if device is not None else kwargs))
        except (NotImplementedError, RuntimeError) as error:
            reads = NEEDS_VALUES.intersection(func.tags) or func is torch.ops.aten._local_scalar_dense.default
            if reads or isinstance(error, NotImplementedError):
                raise self._unknown() from error
            raise

    def _unknown(self) -> WrongUse:
        return WrongUse(
            f"the sizes of what {self.name} gives depend on numbers that it computes, so stages of pp that do not have "
            "it cannot tell them. Use fsdp instead of pp."
        )


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """An index as whole numbers, one for each of its dims where it is a mask whose values are known."""
    if index is None or index.is_meta or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return index.nonzero(as_tuple=True)


class _Devices(TorchFunctionMode):
    """Makes tensors of given numbers where they keep them, though the model asks for the device of a shape."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MADE and kwargs.get("device") == META:
            kwargs = kwargs | {"device": self.device}
        elif func is Tensor.new_tensor and args[0].is_meta:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs, "device": self.device}
        return func(*args, **kwargs)
