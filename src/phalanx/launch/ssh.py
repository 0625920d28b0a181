"""A host that is reached over ssh: as the user's own ssh reaches it, without asking anybody anything."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch import host_side
from phalanx.launch.host_side import MARK

VARIABLE = "PHALANX_SSH"
CONNECT_SECONDS = 10
SILENT_SECONDS = (15, 4)
"""Between questions whether the host is still there, and how many may stay without an answer."""
ANSWER_SECONDS = 60.0
OPTIONS = {
    "BatchMode": "yes", "ConnectTimeout": CONNECT_SECONDS, "ServerAliveInterval": SILENT_SECONDS[0],
    "ServerAliveCountMax": SILENT_SECONDS[1], "ControlPath": "none", "ClearAllForwardings": "yes",
}  # fmt: skip
LOST = 255
"""The exit code of ssh where the host was not reached, or its connection broke."""
BEGIN = "import sys; exec(compile(bytes.fromhex(sys.stdin.buffer.readline().decode()), 'phalanx', 'exec'))"


class Unreached(CannotHere):
    """A host does not answer, in the words of ssh or of what runs there."""


@dataclass(frozen=True)
class SshHost:
    """One host, with so many ranks."""

    name: str
    """Among the hosts of a run."""
    target: str
    """What ssh is told: ``host``, ``user@host``, or a name of the user's ssh configuration."""
    port: int | None = None
    ranks: int = 1
    ssh: tuple[str, ...] = ("ssh",)
    python: str = "python"

    def words(self) -> list[str]:
        """The command that runs what it is then sent."""
        options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
        port = ["-p", str(self.port)] if self.port else []
        there = shlex.join([self.python, "-u", "-c", BEGIN])
        return [*self.ssh, "-T", *options, *port, "--", self.target, f"exec {there}"]

    def address(self) -> str:
        """By which it is reached, as ssh's configuration has it; its name where no ssh is here to ask."""
        port = ["-p", str(self.port)] if self.port else []
        try:
            said = subprocess.run([*self.ssh, "-G", *port, "--", self.target], capture_output=True, text=True).stdout
        except OSError:
            said = ""
        found = re.search(r"^hostname (\S+)$", said, re.MULTILINE)
        return found[1] if found else self.target.rpartition("@")[2]

    def start(self, request: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """What is asked for, begun there; it goes on for as long as its input is open."""
        try:
            process = subprocess.Popen(
                self.words(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise CannotHere(
                f"{self.ssh[0]} cannot be run here: {error.strerror}. Install it (Debian: openssh-client), or name "
                f"another with ssh= or {VARIABLE}."
            ) from None
        assert process.stdin is not None
        try:
            process.stdin.write(f"{_program()}\n{json.dumps(request)}\n".encode())
            process.stdin.flush()
        except OSError:  # it has ended: what it says is read by whoever waits for it
            pass
        return process

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One answer."""
        with self.start(request) as process:
            try:
                out, err = process.communicate(timeout=ANSWER_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Unreached(f"does not answer within {ANSWER_SECONDS:g} s. See what keeps it") from None
        found = read(out.decode(errors="replace"))
        if found is None:
            raise Unreached(self.why(process.returncode, err.decode(errors="replace")))
        return found

    def why(self, code: int, said: str) -> str:
        """In words how its connection, or what was to run there, ended; and what to do."""
        if code == LOST:
            port = f"-p {self.port} " if self.port else ""
            return f"is not reached over ssh: {shown(said)}. Try: ssh {port}{self.target}"
        if code == 127:
            return f"has no {self.python}: {shown(said)}. Name the interpreter there with python="
        return f"{self.python} ends with exit code {code}: {shown(said)}. Name another with python="


def shown(said: str) -> str:
    """The last of what ssh says, or what it runs."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines[-2:]) or "it does not say why"


def read(out: str) -> dict[str, Any] | None:
    """An answer among what else a host prints, as some do when one logs in."""
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    return None


def command(given: str | None) -> tuple[str, ...]:
    """The words of ssh: those that are given, of the environment, or its name."""
    text = given or os.environ.get(VARIABLE) or "ssh"
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise WrongUse(f"ssh={text} is no command: {error}. Write it like ssh=ssh -F FILE.") from None


@cache
def _program() -> str:
    return Path(host_side.__file__).read_bytes().hex()
