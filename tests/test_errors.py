"""Errors: which may pass by themselves, and the nearest name to one that is unknown."""

from __future__ import annotations

import errno
import pickle

import pytest

from phalanx.errors import WrongUse, closest, may_pass
from phalanx.traces import Traced


class ConnectionErrorOfAStore(Exception):
    """As clients of cloud storage have them."""


ConnectionErrorOfAStore.__name__ = "ConnectionError"


class EndpointConnectionError(ConnectionErrorOfAStore):
    pass


def caused(by: Exception) -> Exception:
    try:
        raise RuntimeError("the batch cannot be read") from by
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("error", [
    OSError(errno.EIO, "Input/output error"), OSError("Input/output error"), TimeoutError(), ConnectionResetError(),
    ConnectionRefusedError(), EndpointConnectionError(), caused(OSError(errno.EIO, "Input/output error")),
    Traced("sample 3 cannot be read: OSError: it", "", "", may_pass=True),
])  # fmt: skip
def test_errors_of_storage_and_networks_may_pass(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize("error", [
    FileNotFoundError(errno.ENOENT, "No such file"), PermissionError(errno.EACCES, "Permission denied"),
    IsADirectoryError(errno.EISDIR, "Is a directory"), KeyError("OSError"), RuntimeError("OSError: TimeoutError"),
    WrongUse("ConnectionError. Do this."), caused(KeyError("x")), Traced("sample 3: KeyError: 'OSError'", "", ""),
])  # fmt: skip
def test_mistakes_do_not_pass(error: Exception) -> None:
    assert not may_pass(error)


def test_what_came_from_another_process_says_so_itself() -> None:
    assert may_pass(pickle.loads(pickle.dumps(Traced("sample 3", "", "", True))))


def test_the_nearest_name() -> None:
    assert closest("widht", ["width", "depth"]) == "did you mean 'width'?"
    assert closest("x", ["width", "depth"]) == "choose one of: depth, width"
    assert closest("x", []) == "there are none to choose from"
