"""Every private name of torch that Phalanx touches, each with a test that fails clearly when torch moves."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "has_hooks",
    "install",
    "mutates",
    "preload",
    "storage_id",
    "version",
]


def preload() -> None:
    """Import what the first training step would import: the optimizer's first use pulls in this module, for seconds."""
    importlib.import_module("torch._dynamo")


def storage_id(tensor: Tensor) -> int:
    """The identity of the memory behind a tensor, which views share; a fake tensor has one too, but no address."""
    return tensor.untyped_storage()._cdata


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody asked to see its gradient."""
    return bool(parameter._backward_hooks)


def install(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """``setattr`` for a parameter that is there already, without its checks: ZeRO 3 does it at every use."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:  # a module that keeps lists of its weights must hear of it
        setattr(module, name, parameter)


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to in place."""
    return tensor._version


def mutates(func: Any) -> bool:
    """Whether an operation writes to one of its arguments."""
    return func._schema.is_mutable
