"""An error told: the user's own lines first, ours and torch's folded, and what a module got and expects."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor, nn

from phalanx import user_code
from phalanx.errors import CannotHere, WrongUse
from phalanx.logits import Logits
from phalanx.user_code import innermost, is_users_line
from phalanx.words import many

OWN = Path(__file__).parent
INSTALLED = ("site-packages", "dist-packages")
METHODS = ("inputs", "loss", "evaluate", "collate", "optimizer", "schedule", "model", "data", "held_out", "callbacks")
SHOWN = 6
"""So many of several things are named."""


class Traced(RuntimeError):
    """An error of the user's code that came from another process, where it was told."""

    def __init__(self, message: str, lines: str, whole: str, may_pass: bool = False) -> None:
        """``may_pass``: what `errors.may_pass` said of it there."""
        super().__init__(message, lines, whole, may_pass)
        self.message, self.lines, self.whole, self.may_pass = message, lines, whole, may_pass

    def __str__(self) -> str:
        return self.message


def folded(error: BaseException) -> str:
    """What was noted of an error, the user's lines from the innermost out, and how many others there were."""
    if isinstance(error, Traced):
        return error.lines
    told = [f"  {note}" for note in getattr(error, "__notes__", ())]
    frames = [frame for each in _chain(error) for frame in reversed(traceback.extract_tb(each.__traceback__))]
    own = [frame for frame in frames if is_users_line(frame.filename)]
    for frame in own[:SHOWN]:
        told += [f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}']
        told += [f"    {frame.line}"] if frame.line else []
    if others := _whose(frame.filename for frame in frames if not is_users_line(frame.filename)):
        told.append(f"  … {others}")
    if len(own) > SHOWN:
        told.append(f"  … {many(len(own) - SHOWN, 'more line')} of yours")
    return "\n".join(told)


def whole(error: BaseException) -> str:
    """All of it, as Python would print it."""
    if isinstance(error, Traced):
        return error.whole
    return "".join(traceback.format_exception(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _whose(files: Iterator[str]) -> str:
    """``14 lines of phalanx and torch``."""
    found: dict[str, int] = {}
    for file in files:
        parts = Path(file).parts
        inside = [parts[i + 1] for i, part in enumerate(parts[:-1]) if part in INSTALLED]
        name = "phalanx" if Path(file).is_relative_to(OWN) else inside[-1].removesuffix(".py") if inside else "Python"
        found[name] = found.get(name, 0) + 1
    named = sorted(found, key=lambda name: -found[name])
    listed = " and ".join([*([", ".join(named[:-1])] if named[1:] else []), *named[-1:]])
    return f"{many(sum(found.values()), 'line')} of {listed}" if found else ""


def explain(error: BaseException, model: nn.Module, task: object) -> None:
    """Note with an error which module of the model it came from, or which method of the task, and what that got."""
    with suppress(Exception):  # what was raised is more important
        _explain(error, model, task)


def _explain(error: BaseException, model: nn.Module, task: object) -> None:
    if isinstance(error, (WrongUse, CannotHere, Traced)) or getattr(error, "__notes__", None):
        return
    last: FrameType | None = None
    for frame in _frames(error.__traceback__):
        place, name = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(place, nn.Module) and name == "forward":
            if last is None or last.f_locals.get("self") is not place:  # else its call knows what it was given
                last = frame
        elif (isinstance(place, nn.Module) and "args" in frame.f_locals) or (place is task and name in METHODS):
            last = frame
    if last is None:
        return
    place = last.f_locals["self"]
    if isinstance(place, nn.Module):
        error.add_note(_of_module(place, last, model))
        made = getattr(inspect.unwrap(type(task).model), "__code__", None) if hasattr(task, "model") else None
        if made is not None and innermost(error.__traceback__) is None and is_users_line(made.co_filename):
            error.add_note(f"the model is made at {user_code.place(made.co_filename, made.co_firstlineno)}")
    else:
        error.add_note(f"{type(task).__name__}.{last.f_code.co_name} got {_arguments(last)}")


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _named(module: nn.Module, model: nn.Module) -> str:
    name = next((name for name, each in model.named_modules() if each is module), None)
    kind = type(module).__name__
    return f"{name} ({kind})" if name else f"the model ({kind})" if name == "" else f"a {kind}"


def _of_module(module: nn.Module, frame: FrameType, model: nn.Module) -> str:
    if frame.f_code.co_name == "forward":
        got = _arguments(frame)
    else:
        given = [described(value) for value in frame.f_locals["args"]]
        given += [f"{n}={described(v)}" for n, v in (frame.f_locals.get("kwargs") or {}).items()]
        got = ", ".join(given) or "nothing"
    return f"{_named(module, model)} got {got}; it expects {expected(module)}"


def _arguments(frame: FrameType) -> str:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = [f"{name} {described(frame.f_locals[name])}" for name in names if name != "self" and name in frame.f_locals]
    return ", ".join(given) or "nothing"


def expected(module: nn.Module) -> str:
    """What a module's forward takes, in words."""
    weight = next((w for w in module.parameters(recurse=False)), None)
    kind = "numbers" if weight is None else _dtype(weight)
    match module:
        case nn.Linear():
            return f"{kind} [..., {module.in_features}]"
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() | nn.ConvTranspose1d() | nn.ConvTranspose2d():
            space = (
                ["length"] if len(module.kernel_size) == 1 else ["depth", "height", "width"][-len(module.kernel_size) :]
            )
            return f"{kind} [batch, {', '.join([str(module.in_channels), *space])}]"
        case nn.Embedding():
            return f"whole numbers from 0 to {module.num_embeddings - 1}"
        case nn.LayerNorm() | nn.RMSNorm():
            return f"{kind} [..., {', '.join(map(str, module.normalized_shape))}]"
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d():
            return f"{kind} [batch, {module.num_features}, ...]"
        case nn.GroupNorm():
            return f"{kind} [batch, {module.num_channels}, ...]"
        case nn.RNN() | nn.LSTM() | nn.GRU():
            order = "batch, time" if module.batch_first else "time, batch"
            return f"{kind} [{order}, {module.input_size}]"
        case nn.MultiheadAttention():
            order = "batch, time" if module.batch_first else "time, batch"
            return f"{kind} [{order}, {module.embed_dim}]"
    try:
        taken = str(inspect.signature(module.forward)).partition(" ->")[0]
    except (TypeError, ValueError):
        taken = "(...)"
    return f"what forward{taken} says"


def described(value: Any, depth: int = 2) -> str:
    """A value by its kind and shape: ``float32 [8, 4]``."""
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{_dtype(value)} [{', '.join(map(str, value.shape))}]{_range(value)}{place}"
    if isinstance(value, Logits):  # whose other attributes would compute them
        return f"logits [{', '.join(map(str, value.shape))}]"
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # numpy's
        return f"{value.dtype} [{', '.join(map(str, value.shape))}]"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping) and depth:
        shown = [f"{name}: {described(item, depth - 1)}" for name, item in list(value.items())[:SHOWN]]
        return "{" + ", ".join([*shown, *(["…"] if len(value) > SHOWN else [])]) + "}"
    if isinstance(value, (list, tuple)) and depth:
        if len(value) > SHOWN:
            return f"a {type(value).__name__} of {len(value)}, the first {described(value[0], depth - 1)}"
        shown = [described(item, depth - 1) for item in value]
        return f"[{', '.join(shown)}]" if isinstance(value, list) else f"({', '.join(shown)})"
    return f"a {type(value).__name__}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _range(tensor: Tensor) -> str:
    """Of whole numbers, which may be labels or positions, between which they lie."""
    other = tensor.dtype.is_floating_point or tensor.dtype.is_complex or str(tensor.dtype) == "torch.bool"
    if other or tensor.device.type != "cpu" or not tensor.numel():
        return ""
    with suppress(RuntimeError):  # torch finds no least one among some kinds of whole numbers
        return f" from {int(tensor.min())} to {int(tensor.max())}"
    return ""
