"""On plain hosts over ssh: checked, then one supervisor each, whose output comes back.

Nothing is installed there and nothing stays: a supervisor ends when the process that started it does, however it ends.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from phalanx import user_code
from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.files import write_whole
from phalanx.folder_files import make_folder, read_text
from phalanx.launch import belonging, key, network, place, ssh
from phalanx.launch.host_check import HostCheck, at_once
from phalanx.launch.host_code import PackedCode
from phalanx.launch.host_links import LOG, Links
from phalanx.launch.host_side import Facts
from phalanx.launch.place import ENDED, RUNNING, Command, Place, Status
from phalanx.launch.ssh import SshHost, Unreached
from phalanx.launch.started import PORTS
from phalanx.launch.stopping import Stop
from phalanx.redact import redact
from phalanx.run import Run, held, holder
from phalanx.verdict import Verdict
from phalanx.words import digits, many

OPTIONS = ("ranks", "gpus", "port", "python", "ssh", "code")
HANDED_ON = ("PYTHONPATH", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH", "PHALANX_", "HF_", "AWS_", "FSSPEC_", "WANDB_")
"""Variables of the environment, by how their names begin, that hosts are told."""
MORE_PORTS = 20
"""That are tried where the first is taken and nobody asks for one."""
CODE = "code"
"""The file that has the exit code of a run that ended."""


@dataclass(frozen=True, kw_only=True)
class Hosts(Place):
    """Hosts that are reached over ssh, by name."""

    word: ClassVar[str] = "hosts"
    job: ClassVar[str] = "[0-9]{1,9}@[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
    remotes: tuple[SshHost, ...] = ()
    port: int | None = None
    """Where they meet; by default one that follows from the run's folder."""
    python: str | None = None
    """The interpreter there; by default by the same path as here."""
    copy: bool = False
    text: str = "hosts"

    @classmethod
    def parse(cls, options: Mapping[str, str], rest: str) -> Self:
        for name in options:
            if name not in OPTIONS:
                raise WrongUse(f"--on hosts: {name!r} is not one of its options; {closest(name, OPTIONS)}")
        if options.get("code", "copy") != "copy":
            raise WrongUse(f"code={options['code']} means nothing. Write code=copy to send the task's code, or none.")
        gpus = place.count(options, "gpus", 0, least=0)
        ranks = place.count(options, "ranks", gpus or 1)
        port = place.count(options, "port", 0) if "port" in options else None
        if port is not None and port >= 1 << 16:
            raise WrongUse(f"port={port} is no port. Give one below {1 << 16}.")
        words = ssh.command(options.get("ssh"))
        remotes = tuple(replace(remote, ssh=words) for remote in _remotes(rest, ranks))
        named = str(Path(rest).resolve()) if Path(rest).is_file() else rest
        text = ",".join([named, *(f"{name}={value}" for name, value in options.items())])
        if redact(text) != text:
            raise WrongUse(f"--on hosts: an option has a secret, which would be noted. Give it through {ssh.VARIABLE}.")
        return cls(
            nodes=len(remotes), ranks=min(remote.ranks for remote in remotes), gpus=gpus, remotes=remotes, port=port,
            python=options.get("python"), copy="code" in options, text=f"hosts:{text}",
        )  # fmt: skip

    @classmethod
    def noted(cls, options: Mapping[str, str], rest: str) -> Self:
        """No file of hosts is read: what is asked of such a place is asked of the run's folder."""
        return cls(text=f"hosts:{','.join([rest, *(f'{name}={value}' for name, value in options.items())])}")

    @property
    def world(self) -> int:
        return sum(remote.ranks for remote in self.remotes)

    def preview(self, command: Command) -> str:
        address = self._meeting(command)[0]
        lines = []
        for remote in self._remotes(command):
            words = self._words(command, remote, f"{address}:{self._ports(command)[0]}")
            lines.append(f"{remote.name}: cd {shlex.quote(str(command.folder))} && {shlex.join(words)}")
        return "\n".join(lines)

    def train(self, command: Command, check: Callable[[], object]) -> Verdict:
        self._check_words(command)
        try:
            check()
        except BaseException:
            _clear(command.run)
            raise
        run, folder = Run(command.run), command.run / "hosts"
        make_folder(run.path, folder)
        with held(folder, within=run.path):
            try:
                requests = self._requests(command, self._checked(command))
            except BaseException:
                _clear(command.run)
                raise
            (folder / CODE).unlink(missing_ok=True)
            place.note(run, self.text, f"{os.getpid()}@{socket.gethostname()}")
            code = 1
            try:
                verdict = self._followed(command, requests, folder)
                code = verdict.exit_code
            except CannotHere as error:
                code = error.exit_code
                raise
            finally:
                write_whole(folder / CODE, f"{code}\n", within=run.path)
        return verdict

    def _followed(self, command: Command, requests: dict[SshHost, Facts], folder: Path) -> Verdict:
        """To the end, at one meeting place after another where the host that has it is lost."""
        stop = Stop(command.grace)
        while True:
            links = Links(requests, folder, stop)
            links.follow()
            if stop.asked or not links.moving:
                return self._verdict(Run(command.run), links, stop)
            requests = self._moved(command, requests, links.lost())

    def status(self, run: Run, job: str) -> Status:
        where = f"started by process {job.replace('@', ' on ')}"
        if holder(run.path / "hosts", within=run.path):
            return Status(RUNNING, where)
        try:
            code = digits(read_text(run.path, run.path / "hosts" / CODE, 100).strip())
        except FileNotFoundError:
            code = None
        return Status(ENDED, f"{where}, which was killed" if code is None else f"exit code {code}", code)

    def cancel(self, run: Run, job: str) -> None:
        pid, _, host = job.partition("@")
        if host != socket.gethostname():
            raise CannotHere(f"{run.path} was started on {host}. Cancel it there: phalanx cancel {run.in_shell}")
        lock = run.path / "hosts" / "lock"
        if not holder(lock.parent, within=run.path):
            raise CannotHere(f"process {pid}, which started {run.path}, is gone; its hosts end by themselves. Wait.")
        if not belonging.ask(int(pid), signal.SIGTERM, lambda process: belonging.holds(process, lock)):
            raise CannotHere(belonging.refused(int(pid), lock))

    def output(self, run: Run, job: str) -> Path:
        return run.path / "hosts" / LOG

    def _remotes(self, command: Command) -> list[SshHost]:
        return [replace(remote, python=self.python or command.python) for remote in self.remotes]

    def _check_words(self, command: Command) -> None:
        for word in ("--max-nodes", "--host"):
            if word in command.words:
                raise WrongUse(f"{word} follows from --on hosts:. Leave it out.")
        if len({remote.ranks for remote in self.remotes}) > 1 and "--layout" not in command.words:
            raise WrongUse("hosts have different numbers of ranks, from which no layout follows. Give --layout.")

    def _meeting(self, command: Command) -> tuple[str, int | None]:
        """By which address others reach the first host, and the port if one is asked for."""
        given = command.value("--meet")
        if given is None:
            address = self.remotes[0].address()
            return f"[{address}]" if ":" in address else address, self.port
        address, port = network.parse(given)
        return given.rpartition(":")[0], port

    def _ports(self, command: Command) -> list[int]:
        asked = self._meeting(command)[1]
        first = zlib.crc32(str(command.run).encode()) % len(PORTS)
        return [asked] if asked else [PORTS[(first + more) % len(PORTS)] for more in range(MORE_PORTS)]

    def _words(self, command: Command, remote: SshHost, meet: str) -> list[str]:
        """What a host runs."""
        words = replace(command, python=remote.python).on(remote.ranks)
        if self.nodes == 1:
            return words
        if "--meet" in words:
            del words[words.index("--meet") : words.index("--meet") + 2]
        return [*words, "--max-nodes", str(self.nodes), "--meet", meet, "--host", remote.name]

    def _checked(self, command: Command) -> HostCheck:
        """Hosts that can take part, or a refusal that names what is wrong with which."""
        remotes = self._remotes(command)
        files = {str(path): user_code.file_hash(path) or "" for path in user_code.modules().values()}
        path = [entry for entry in _variables().get("PYTHONPATH", "").split(os.pathsep) if entry]
        checkpoints = command.value("--checkpoints")
        if checkpoints and "://" not in checkpoints:
            checkpoints = str((command.folder / checkpoints).resolve())
        check = HostCheck(remotes, self.gpus, command.folder, command.run, files, path, checkpoints, self.copy)
        check.look()
        if not check.wrong:
            check.meet(self._meeting(command)[0].strip("[]"), self._ports(command) if self.nodes > 1 else [])
        print(check.table(), flush=True)
        check.refuse()
        begun = [name for name, facts in check.facts.items() if facts["begun"]]
        if begun and not command.resume:
            found = f"{command.run} holds a run already on host {begun[0]}"
            raise WrongUse(f"{found}. Go on with it by --resume, or give another --run.")
        return check

    def _requests(self, command: Command, check: HostCheck) -> dict[SshHost, Facts]:
        """What each host is asked to keep running. The key of the run travels with it, and is written nowhere."""
        meet = f"{self._meeting(command)[0]}:{check.port}"
        secret = {key.VARIABLE: os.environ.get(key.VARIABLE) or secrets.token_hex(32)} if self.nodes > 1 else {}
        code = PackedCode.here() if check.copy else None
        if code is not None:
            print(f"   code  {many(len(code.files), 'file')} to each host", flush=True)
        if check.unshared:
            print(f"   note  {command.run} is not shared: what rank 0 writes there stays on its host", flush=True)

        def request(remote: SshHost) -> Facts:
            there, variables, folder = command, _variables(), None
            if code is not None:
                folder = _sent(remote, code, command.run)
                there, variables = code.moved(command, folder), code.moved_path(variables, folder)
            return {
                "do": "keep", "words": self._words(there, remote, meet), "folder": str(there.folder), "code": folder,
                "variables": {**variables, **secret}, "grace": command.grace,
            }  # fmt: skip

        return dict(zip(check.remotes, at_once(request, check.remotes), strict=True))

    def _moved(self, command: Command, requests: Mapping[SshHost, Facts], lost: Sequence[str]) -> dict[SshHost, Facts]:
        """The same for hosts that meet at another of them."""
        remotes = sorted(requests, key=lambda remote: remote.name in lost)
        there = [remote for remote in remotes if remote.name not in lost]
        check = HostCheck(there, 0, command.folder, command.run, {}, ())
        address = there[0].address()
        check.meet(address, self._ports(command))
        check.refuse()
        meet = f"{f'[{address}]' if ':' in address else address}:{check.port}"
        found = {}
        for remote in remotes:
            words = list(requests[remote]["words"])
            words[words.index("--meet") + 1] = meet
            found[remote] = {**requests[remote], "words": words}
        return found

    def _verdict(self, run: Run, links: Links, stop: Stop) -> Verdict:
        lost = links.lost()
        codes = {link.remote.name: link.code for link in links.links}
        ended = [f"{name}: exit code {code}" for name, code in codes.items() if code] + [f"{n}: lost" for n in lost]
        if links.done:
            return Verdict(True, f"done on {', '.join(n for n, c in codes.items() if c == 0)}", ended)
        again = self.again(run)
        if stop.asked:
            return Verdict(False, "stopped on all hosts", ended, next=f"Go on with: {again}", code=130)
        code = next((code for code in codes.values() if code), 3 if lost else 1)
        said = [f"what they printed is in {run.path / 'hosts'}"]
        return Verdict(
            False, "ended on all hosts", [*ended, *said], next=f"Mend what they say, then: {again}", code=code
        )


def _remotes(rest: str, ranks: int) -> Iterator[SshHost]:
    """Of ``a,b``, or of a file with a line a host."""
    if "/" in rest and not Path(rest).is_file():
        raise WrongUse(
            f"--on hosts: there is no file {rest}. Give one with a host a line, or hosts: hosts:node1,node2."
        )
    found = _lines(Path(rest)) if Path(rest).is_file() else [(name, 0) for name in rest.split(",") if name]
    lines = [(name, own or ranks) for name, own in found]
    if not lines:
        raise WrongUse("--on hosts: names none. Write it like hosts:node1,node2, or hosts:FILE with a host a line.")
    parts = {text: _parsed(text) for text, _ in lines}
    short = [target.rpartition("@")[2] for target, _ in parts.values()]
    for number, (text, own) in enumerate(lines):
        target, port = parts[text]
        if text in (other for other, _ in lines[:number]):
            raise WrongUse(f"--on hosts: {text} is there twice. Name each host once, and give it ranks=N.")
        name = target.rpartition("@")[2]
        yield SshHost(name if short.count(name) == 1 else text, target, port, own)


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Hosts of a file, with their ranks, or 0."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(f"{path} cannot be read: {error}. Give a text file with a host a line.") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        own = 0
        for word in words[1:]:
            found = re.fullmatch(r"(?:ranks|slots)=([1-9]\d*)", word)
            if found is None:
                raise WrongUse(
                    f"{path}, line {number}: {word} means nothing. Write a host, and after it ranks=N or none."
                )
            own = int(found[1])
        yield words[0], own


def _parsed(text: str) -> tuple[str, int | None]:
    """What ssh is told of ``user@host:port``."""
    found = re.fullmatch(r"((?:[^@\s]+@)?)(?:\[([^\]\s/]+)\]|([^:\s\[\]/]+))(?::(\d{1,5}))?", text)
    if found is None or text.startswith("-"):
        raise WrongUse(f"--on hosts: {text!r} is no host. Write it like node1, me@node1:2222, or me@[fd00::1]:2222.")
    return f"{found[1]}{found[2] or found[3]}", int(found[4]) if found[4] else None


def _sent(remote: SshHost, code: PackedCode, run: Path) -> str:
    """The folder there that has the code."""
    name = hashlib.sha256(f"{socket.gethostname()} {run} {remote.name}".encode()).hexdigest()[:16]
    try:
        found = remote.ask({"do": "unpack", "name": name, "files": code.packed})
    except Unreached as error:
        raise CannotHere(f"the code cannot be sent to host {remote.name}: it {error}.") from None
    if found["note"]:
        print(f"   note  host {remote.name}: {found['note']}", flush=True)
    return str(found["folder"])


def _variables() -> dict[str, str]:
    left = (ssh.VARIABLE, key.VARIABLE)
    return {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON) and name not in left}


def _clear(run: Path) -> None:
    """Take a folder away in which nothing has begun."""
    if not (run / "hosts" / LOG).exists():
        shutil.rmtree(run / "hosts", ignore_errors=True)
    with suppress(OSError):  # it holds a run that goes on
        run.rmdir()
