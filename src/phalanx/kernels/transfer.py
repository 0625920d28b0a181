"""Small tensors that are made on the host and read by the device, which nobody waits for."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on the device. A GPU reads it when it comes to it: a copy of pageable memory would wait for that."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=pinned is not tensor)
