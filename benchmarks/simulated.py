"""One rank of a world of any size, alone in a process: every other rank is there in name, and says what this one says.

A process group of torch's own kind, so that all code of a rank runs unchanged: what is gathered are copies of this
rank's part, sums are sums of equal parts, and what is received is zeros. Nothing is sent, so what is measured is the
work that a rank does by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from phalanx.parallel.communication.communicator import Communicator

joined: list[int] = []
"""Of each process group that this rank has made a part of: how many ranks it has."""


class Done(dist.Work):
    """A collective that is over."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.future: Future[Any] = Future()
        self.future.set_result(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self.future


class Echo(dist.ProcessGroup):
    """Every other rank says what this one says."""

    name = desc = ""

    def getBackendName(self) -> str:
        return "echo"

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _set_group_desc(self, desc: str) -> None:
        self.desc = desc

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def group_desc(self) -> str:
        return self.desc

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Done:
        for output, own in zip(outputs, inputs, strict=True):
            for place in output:
                place.copy_(own)
        return Done(outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, options: Any = None) -> Done:
        output.view(self.size(), -1).copy_(own.reshape(1, -1).clone())  # own may be a row of it
        return Done(output)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        if options is None or options.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.size())
        return Done(tensors)

    def _reduce_scatter_base(self, output: Tensor, parts: Tensor, options: Any = None) -> Done:
        output.copy_(parts.view(self.size(), -1)[self.rank()].view_as(output))
        return Done(output)

    def alltoall_base(self, output: Tensor, own: Tensor, out: list[int], back: list[int], options: Any = None) -> Done:
        if output.shape == own.shape:
            output.copy_(own)
        else:
            output.zero_()
        return Done(output)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Done:
        return Done(tensors)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Done:
        return Done(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Done:
        for tensor in tensors:
            tensor.zero_()
        return Done(tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Done:
        return self.recv(tensors, 0, tag)

    def barrier(self, options: Any = None) -> Done:
        return Done(None)

    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base


class Nobody(dist.Store):
    """A store in which what is waited for is there."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        self.kept[key] = value

    def get(self, key: str) -> Any:
        return self.kept.get(key, b"0")

    def add(self, key: str, amount: int) -> int:
        self.kept[key] = int(self.kept.get(key, 0)) + amount
        return self.kept[key]

    def wait(self, keys: list[str], timeout: timedelta = timedelta(0)) -> None:
        return

    def check(self, keys: list[str]) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None


def _echo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Echo:
    joined.append(size)
    return Echo(rank, size)


dist.Backend.register_backend("echo", _echo, devices=["cpu", "cuda"])


@contextmanager
def rank_of(world: int, rank: int, ranks_each: int = 8) -> Iterator[None]:
    """Be one rank of so many, on hosts of so many each."""
    before = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    os.environ |= {"LOCAL_RANK": str(rank % ranks_each), "LOCAL_WORLD_SIZE": str(ranks_each)}
    original = dist.new_group

    def with_echo(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return original(*args, **options)

    store = Nobody()  # torch keeps no reference to what is Python's of it
    dist.init_process_group("echo", store=store, rank=rank, world_size=world)
    dist.new_group = with_echo  # also where gloo is asked for
    told = Communicator.broadcast_words
    Communicator.broadcast_words = lambda self, words, source: words or ["{}"]  # type: ignore[method-assign]
    joined.clear()
    try:
        yield
    finally:
        dist.new_group = original
        Communicator.broadcast_words = told  # type: ignore[method-assign]
        dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
