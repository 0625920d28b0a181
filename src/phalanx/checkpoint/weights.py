"""Full weights as one safetensors file, written a tensor at a time: no rank ever holds the whole model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.files import make_folders, opened, sync_folder
from phalanx.parallel.spread import Spread

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def check_writable(spread: Spread) -> None:
    """Refuse now what could not be written after the last step."""
    for name, dtype, _ in spread.whole.description():
        if dtype not in DTYPES:
            raise WrongUse(
                f"{name} is {dtype}, which a safetensors file cannot hold. "
                "Keep it in another dtype, or register it with persistent=False."
            )


def write_weights(spread: Spread, path: Path, writer: bool, values: Mapping[str, Tensor] | None = None) -> None:
    """Write the model's weights and buffers under its own names. All ranks must call it; ``writer`` is one of them.

    ``values``: by weight, what to write in place of this rank's part of it.

    A shared weight stands once, under its first name; its other names are in the metadata under ``tied``. Tensors
    lie in one order, whatever order the ranks have them in: the same weights are the same bytes in any layout.
    """
    state = spread.whole.state(values)
    try:
        if writer:
            _write(spread, state, path)
    finally:  # to the end on every rank, whoever writes and whatever fails
        for _ in state:
            pass


def _write(spread: Spread, state: Iterable[tuple[str, Tensor]], path: Path) -> None:
    make_folders(path.parent)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        _write_to(unfinished, spread, state)
    except BaseException:
        unfinished.unlink(missing_ok=True)  # it would hold the room that is waited for
        raise
    unfinished.replace(path)
    sync_folder(path.parent)


def _write_to(path: Path, spread: Spread, state: Iterable[tuple[str, Tensor]]) -> None:
    with opened(path, "wb") as file:
        ordered = sorted(spread.whole.description(), key=lambda item: (-item[1].itemsize, item[0]))
        begin = header(ordered, {"format": "pt", "tied": json.dumps(dict(spread.anatomy.tied))})
        file.write(begin)
        places, offset = {}, len(begin)
        for name, dtype, shape in ordered:
            places[name] = offset
            offset += math.prod(shape) * dtype.itemsize
        for name, tensor in state:
            file.seek(places[name])
            file.write(raw_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """How a safetensors file begins: a length, then JSON with each tensor's dtype, shape and place; padded to align."""
    found: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * dtype.itemsize
        found[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's contents as they lie in memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
