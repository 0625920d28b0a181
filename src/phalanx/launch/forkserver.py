"""A fork server: a process that is warm and never computes, from which ranks are forked.

A build of torch with CUDA refuses autograd in a child of a process that has run it, and CUDA does not survive a fork
either. So whoever computes itself, as a proof does for its reference, has its ranks forked by a server, which was
forked from it before. Where that is too late, the server is a fresh interpreter.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch.lines import not_for_children
from phalanx.parallel.torch_private import preload
from phalanx.processes import die_with_parent

HEAD = struct.Struct("<QI")
"""Of a request: how long it is, and how many file descriptors follow."""
LOOK_SECONDS = 0.01

_shared: dict[str, Any] = {}
"""What the owner of this process's server had when it started it; messages name it instead of carrying it."""
_server: ForkServer | None = None
"""The one that this process keeps for whoever asks."""


class ForkServer:
    """``fork(function, *args)`` runs a function in a process of its own, forked from one that has never computed.

    What this process holds when it starts a server, the processes hold too, unless the server had to be a fresh
    interpreter: then they have only ``shared`` and what they import. It ends with the thread that started it.
    """

    def __init__(self, shared: Mapping[str, Any] | None = None) -> None:
        self.owner, self.shared = os.getpid(), dict(shared or {})
        self._lock, self._pickler = threading.Lock(), pickle.Pickler
        preload()
        self._start_forked()
        self.fresh = not self._ask("forks")
        if self.fresh:
            self.close()
            self._start_fresh()

    def _start_forked(self) -> None:
        self._socket, theirs = _connected()
        _shared.update(self.shared)
        sys.stdout.flush()
        sys.stderr.flush()
        self._process: BaseProcess | subprocess.Popen = multiprocessing.get_context("fork").Process(
            target=_serve, args=(theirs,), name="fork server"
        )
        self._process.start()
        for name in self.shared:
            del _shared[name]
        theirs.close()
        atexit.register(self.close)

    def _start_fresh(self) -> None:
        """For a process that has run autograd already: what it has must travel."""
        self._socket, theirs = _connected()
        theirs.set_inheritable(True)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from phalanx.launch.forkserver import serve_fresh; serve_fresh({theirs.fileno()})",
            ],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self.close)
        files = {n: m.__file__ for n, m in list(sys.modules.items()) if n.startswith("phalanx_task_")}
        shared, self.shared = self.shared, {}
        self._pickler = _by_value()
        self._ask("prepare", pickle.dumps((sys.path, files, torch.get_num_threads())), self.dumps(shared))
        self.shared = shared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def fork(self, function: Callable[..., Any], *args: Any, descriptors: Sequence[int] = ()) -> Forked:
        """Run ``function(*args, *descriptors)`` in a new process, with this one's environment and folder.

        There ``descriptors`` are those of the same files.
        """
        work = self.dumps((function, args, dict(os.environ), os.getcwd()))
        return Forked(self, self._ask("fork", work, descriptors=descriptors))

    def dumps(self, message: Any) -> bytes:
        """A message for `loads` in a process of this server's."""
        return _dumped(message, self.shared, self._pickler)

    def _ask(self, *request: Any, descriptors: Sequence[int] = ()) -> Any:
        message = pickle.dumps(request)
        with self._lock:
            try:
                self._socket.sendall(HEAD.pack(len(message), len(descriptors)))
                if descriptors:
                    socket.send_fds(self._socket, [b"d"], descriptors)
                self._socket.sendall(message)
                answer = pickle.loads(_received(self._socket, HEAD.unpack(_received(self._socket, HEAD.size))[0]))
            except (OSError, EOFError):
                raise CannotHere("the process that forks the ranks has ended. Start again.") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the server, and what it has forked."""
        atexit.unregister(self.close)
        if self.owner != os.getpid():
            return
        self._socket.close()
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
        else:
            self._process.join()


class Forked:
    """A process of a fork server's, with the methods that a process of multiprocessing's has."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs; minus the signal's number if one ended it."""
        if self._code is None:
            self._code = self.server._ask("look", self.pid)
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(LOOK_SECONDS)

    def kill(self) -> None:
        if self._code is None:
            self.server._ask("kill", self.pid)

    def close(self) -> None:
        """There is nothing to let go of."""


def kept(server: ForkServer | None = None) -> ForkServer | None:
    """The server that this process keeps, if it does; or have it keep one."""
    global _server
    if server is not None:
        _server = server
    return _server if _server is not None and _server.owner == os.getpid() else None


def without_copying(task: Any) -> dict[str, Any]:
    """What of a task need not be sent to processes that are forked with it, and perhaps cannot be."""
    plain = (bool, int, float, str, type(None))
    parts = {f"its {name}": value for name, value in vars(task).items() if not isinstance(value, plain)}
    return {"the task": task, **parts}


# Messages: what the owner shared when it started the server is named, not carried.


def _dumped(message: Any, shared: Mapping[str, Any], pickler: type[pickle.Pickler] = pickle.Pickler) -> bytes:
    names = {id(value): name for name, value in shared.items()}

    class Naming(pickler):  # type: ignore[misc, valid-type]
        def persistent_id(self, value: Any) -> str | None:
            return names.get(id(value))

    file = io.BytesIO()
    try:
        Naming(file, pickle.HIGHEST_PROTOCOL).dump(message)
    except Exception as error:  # a class of the user's may raise anything when it is asked for its state
        raise _cannot_travel(error) from None
    return file.getvalue()


def _by_value() -> type[pickle.Pickler]:
    """A pickler that sends classes and functions of a notebook along, if there is one."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.Pickler
    return cloudpickle.Pickler


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: str) -> Any:
        return _shared[name]


def _cannot_travel(error: Exception) -> WrongUse:
    return WrongUse(
        f"a part of the task cannot be sent to other processes: {type(error).__name__}: {error}. Put the task into a "
        "file of its own and import it; what cannot be copied, such as an open file, is made in model() or data(). "
        "To have the classes of a notebook sent along: pip install 'phalanx[notebook]'."
    )


def loads(message: bytes) -> Any:
    """What `ForkServer.dumps` made."""
    return _Unpickler(io.BytesIO(message)).load()


# The server's side.


def _connected() -> tuple[socket.socket, socket.socket]:
    """The owner's end, which no child of its keeps, or the server would never see it hung up; and the server's."""
    ours, theirs = socket.socketpair()
    return not_for_children(ours), theirs


def _received(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def serve_fresh(descriptor: int) -> None:
    """A server's life in an interpreter of its own."""
    preload()
    _serve(socket.socket(fileno=descriptor))


def _serve(connection: socket.socket) -> None:
    """A server's whole life: until its owner hangs up."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole terminal; the owner decides
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # processes share this memory as long as nobody touches it
    forked: dict[int, BaseProcess] = {}
    with suppress(EOFError, OSError):
        while True:
            size, count = HEAD.unpack(_received(connection, HEAD.size))
            descriptors = socket.recv_fds(connection, 1, count)[1] if count else []
            kind, *words = pickle.loads(_received(connection, size))
            try:
                answer = _answer(kind, words, descriptors, forked, connection)
            except Exception as error:
                answer = error if isinstance(error, WrongUse) else CannotHere(f"no rank could be started: {error}.")
            for descriptor in descriptors:
                os.close(descriptor)
            message = pickle.dumps(answer)
            connection.sendall(HEAD.pack(len(message), 0) + message)
    for process in forked.values():
        process.kill()
    for process in forked.values():
        process.join()


def _answer(
    kind: str, words: list[Any], descriptors: list[int], forked: dict[int, BaseProcess], connection: socket.socket
) -> Any:
    context = multiprocessing.get_context("fork")
    if kind == "forks":
        trial = context.Process(target=_compute, args=(connection,))
        trial.start()
        trial.join()
        return trial.exitcode == 0
    if kind == "prepare":
        return _prepare(*words)
    if kind == "fork":
        process = context.Process(target=_run, args=(words[0], descriptors, connection))
        process.start()
        assert process.pid is not None
        forked[process.pid] = process
        return process.pid
    known = forked[words[0]]
    if kind == "kill":
        known.kill()
        known.join()
    return known.exitcode


def _prepare(words: bytes, shared: bytes) -> None:
    """Make a fresh interpreter as much like its owner as it can be."""
    path, files, threads = pickle.loads(words)
    sys.path[:] = path
    torch.set_num_threads(threads)
    for name, file in files.items():
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    try:
        _shared.update(loads(shared))
    except Exception as error:
        raise _cannot_travel(error) from None


def _compute(connection: socket.socket) -> None:
    """Whether a child of this process can train: its owner may have run autograd, or have begun to use a GPU."""
    connection.close()
    try:
        weight = torch.ones(1, requires_grad=True)
        weight.sum().backward()
        torch.optim.AdamW([weight]).step()
    except RuntimeError:
        os._exit(1)


def _run(work: bytes, descriptors: list[int], connection: socket.socket) -> None:
    """A forked process's whole life."""
    die_with_parent()
    connection.close()
    function, args, environment, folder = loads(work)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(torch.get_num_threads())  # renews torch's pool, not safely if autograd's threads come first
    function(*args, *descriptors)
