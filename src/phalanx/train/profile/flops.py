"""FLOPs of what torch computes, by torch's own formulas, counted as it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from phalanx.parallel.torch_private import TorchDispatchMode

ATTENTION = "scaled_dot_product"


class FlopCount(TorchDispatchMode):
    """While it is entered, ``counted`` is told of the FLOPs of every operation that has some."""

    supports_higher_order_operators = True

    def __init__(self, counted: Callable[[int], None]) -> None:
        super().__init__()
        self.counted = counted
        self.uncounted: set[str] = set()
        """Operations whose formula did not work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", func)
        try:
            if packet in flop_registry:
                self.counted(int(flop_registry[packet](*args, **kwargs, out_val=result)))
            elif ATTENTION in str(packet):  # of a kind that torch has no formula for, such as a CPU's
                self.counted(_attention(str(packet), args))
        except Exception:  # what is computed is more important than what it counts for
            self.uncounted.add(str(packet))
        return result


def _attention(name: str, args: Any) -> int:
    shapes = [tensor.shape for tensor in args if isinstance(tensor, Tensor)]
    return int(sdpa_backward_flop_count(*shapes[:4]) if "backward" in name else sdpa_flop_count(*shapes[:3]))
