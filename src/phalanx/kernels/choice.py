"""Whether a kernel is used, or its plain twin: on a GPU, where it was tried once and gave what the twin gives."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16, torch.float32)
interpreted = False
"""Whether kernels are interpreted on a processor, as in their tests."""


KERNELS: list[Kernel] = []
"""Those of this process: ranks agree on each when they start."""


class Kernel:
    """One or several that are used together."""

    def __init__(self, name: str, trial: Callable[[torch.device], bool], package: str = "triton") -> None:
        """``trial``: whether it gives on a device what its twin gives, a few numbers each. ``package``: of which."""
        self.name, self.trial, self.package = name, trial, package
        self._works: dict[torch.device, bool] = {}

    @classmethod
    def declared(cls, name: str, trial: Callable[[torch.device], bool], package: str = "triton") -> Kernel:
        """One that ranks agree on: used by all of them, or by none."""
        KERNELS.append(cls(name, trial, package))
        return KERNELS[-1]

    def used(self, tensor: Tensor) -> bool:
        """For numbers like these: a proof's, in float64, are the twin's."""
        if tensor.dtype not in NARROW:
            return False
        return interpreted or (tensor.is_cuda and self.works(tensor.device))

    def works(self, device: torch.device) -> bool:
        """Tried once; what it needs is not everywhere: triton wants a C compiler and Python's headers at run time."""
        if device not in self._works:
            self._works[device] = self._tried(device)
        return self._works[device]

    def found_to_work(self, device: torch.device) -> bool:
        """Whether it has been tried, and works: where it cannot be tried any more."""
        return self._works.get(device, False)

    def settle(self, device: torch.device, works: bool) -> None:
        """Have it used on a device, or not, as on other ranks."""
        self._works[device] = works

    def _tried(self, device: torch.device) -> bool:
        if not _is_installed(self.package):  # triton comes with torch's builds for GPUs
            return False
        try:
            works, reason = self.trial(device), "it does not find what its plain twin does"
        except Exception as error:
            works = False
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else repr(error)
        if not works:
            warnings.warn(f"the kernel of {self.name} is not used on {device}: {reason}", stacklevel=4)
        return works


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what it would be a part of is not there either
        return False
