"""In the place of packages that a contender imports and does not use here, where they are not installed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked when nothing else has found a module; what is looked up in one is an empty class, or a package of them."""

    NAMES = ("datasets", "tensorboard", "torchao", "wandb", "tyro", "torchdata")

    @classmethod
    def install(cls) -> None:
        """From here on they are found."""
        if importlib.util.find_spec("tensorboard") is None:
            sys.modules.setdefault(
                "torch.utils.tensorboard", Nothing("torch.utils.tensorboard")
            )  # it would look inside
        sys.meta_path.append(cls())

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.split(".")[0] in self.NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


class Nothing(types.ModuleType):
    """A package of empty classes, whose names begin with a capital, and of more packages."""

    __path__: list[str] = []  # noqa: RUF012  # which the import system looks for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.islower():
            return Nothing(f"{self.__name__}.{name}")
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, key: cls)})
