"""How a host is reached: by the user's own ssh, asked nothing; what it says is told in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx import CannotHere, WrongUse
from phalanx.launch import ssh
from phalanx.launch.ssh import SshHost, Unreached, read, shown


def program(folder: Path, text: str) -> tuple[str, ...]:
    """A program in place of ssh."""
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path),)


def test_ssh_is_asked_not_to_ask(tmp_path: Path) -> None:
    words = SshHost("a", "me@a", 2222, python="/opt/my python").words()
    assert words[:2] == ["ssh", "-T"]
    assert "BatchMode=yes" in words
    assert words[-5:-1] == ["-p", "2222", "--", "me@a"]
    assert words[-1].startswith("exec '/opt/my python' -u -c ")


def test_which_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ssh.VARIABLE, raising=False)
    assert ssh.command(None) == ("ssh",)
    monkeypatch.setenv(ssh.VARIABLE, "ssh -F 'my file'")
    assert ssh.command(None) == ("ssh", "-F", "my file")
    assert ssh.command("other") == ("other",)
    with pytest.raises(WrongUse, match="is no command"):
        ssh.command("a 'b")


def test_what_ssh_says_is_told(tmp_path: Path) -> None:
    for text, told in (
        ("echo 'Permission denied (publickey).' >&2; exit 255", "is not reached over ssh: Permission denied"),
        ("echo 'sh: python: not found' >&2; exit 127", "has no python: sh: python: not found. Name the interpreter"),
        ("echo 'SyntaxError: old' >&2; exit 1", "python ends with exit code 1: SyntaxError: old"),
    ):
        with pytest.raises(Unreached, match=told.replace("(", r"\(")):
            SshHost("a", "a", ssh=program(tmp_path, text)).ask({"do": "look"})
    with pytest.raises(CannotHere, match="cannot be run here: No such file"):
        SshHost("a", "a", ssh=("/nowhere/ssh",)).ask({"do": "look"})
    assert shown("\n") == "it does not say why"


def test_an_answer_is_found_among_what_else_is_printed() -> None:
    assert read('welcome!\nphalanx answers {"a": 1}\nbye\n') == {"a": 1}
    assert read("welcome!\n") is None


@pytest.mark.skipif(not os.path.exists("/usr/bin/ssh"), reason="ssh not installed (Debian: openssh-client)")
def test_the_address_is_that_of_the_users_configuration(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host short\n  HostName long.example.org\n")
    made = SshHost("short", "me@short", ssh=("ssh", "-F", str(tmp_path / "config")))
    assert made.address() == "long.example.org"
    assert SshHost("a", "me@a", ssh=("ssh", "-F", "/dev/null")).address() == "a"


def test_where_there_is_no_ssh_its_name_is_its_address(tmp_path: Path) -> None:
    assert SshHost("a", "me@a", ssh=(str(tmp_path / "ssh"),)).address() == "a"
