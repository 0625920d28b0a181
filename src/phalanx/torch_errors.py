"""Errors of torch, gloo and NCCL, told apart by their text, which is all they give: this table has every such text."""

from __future__ import annotations

from enum import Enum


class About(Enum):
    """What an error is about: it says one of these."""

    FORK = ("fork-based multiprocessing", "re-initialize CUDA in forked")
    """A process was forked from one that had computed. (torch)"""
    WAITED = ("imed out", "timing out", "operation timeout", "wait timeout")
    """Another rank did not come in time. (gloo, NCCL's watchdog, a store)"""
    GONE = (
        "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed",
        "ncclRemoteError", "remote process exit", "communicator was aborted", "ncclCommAbort",
    )  # fmt: skip
    """Another rank or its process is not there any more. (gloo, NCCL, a store)"""
    UNREACHED = ("onnection closed", "onnection reset", "ead/write failed", "onnection refused")
    """Another rank cannot be spoken to. (gloo)"""
    WORKER = ("DataLoader worker",)
    """A process that reads data was killed. (torch)"""
    MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc", "Cannot allocate memory")
    """There is no memory left, of a GPU or of the host. (torch, CUDA, Linux)"""
    SIZES = ("shape", "size", "dimension")
    """Tensors do not fit together. (torch)"""
    DTYPES = ("same dtype", "expected scalar type", "Found dtype", "dtype", "Double", "Float")
    """Numbers of two widths meet, where it says two of these. (torch)"""
    BACKWARD_AGAIN = ("second time",)
    """Backward goes through a graph that it has let go. (torch)"""
    IN_PLACE = ("modified by an inplace operation",)
    """Something was changed that backward needs as it was. (torch)"""


def matches(error: BaseException | str, about: About) -> int:
    """How many of the texts it has."""
    text = str(error)
    return sum(words in text for words in about.value)


def is_about(error: BaseException | str, *what: About) -> bool:
    """Whether it is about any of these."""
    return any(matches(error, about) for about in what)
