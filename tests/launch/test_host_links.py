"""Supervisors of hosts become one log; the lost are called again; a stop reaches all. A shell is the network."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch import host_links
from phalanx.launch.host_links import Links
from phalanx.launch.ssh import SshHost
from phalanx.launch.stopping import Stop

SSH = """\
#!/bin/sh
for last; do :; done
if [ -e {folder}/lost ]; then rm {folder}/lost; echo 'Connection closed' >&2; exit 255; fi
exec sh -c "$last"
"""
WAITS = "import signal, sys, time; signal.signal(15, lambda *_: (print('saved'), sys.exit(130))); time.sleep(30)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_links, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(host_links, "LAST_SECONDS", 3.0)


def links(folder: Path, **programs: str) -> Links:
    """By host's name, what its supervisor does."""
    shell = folder / "ssh"
    shell.write_text(SSH.format(folder=folder))
    shell.chmod(0o755)
    requests: dict[SshHost, dict[str, Any]] = {}
    for name, program in programs.items():
        remote = SshHost(name, name, ssh=(str(shell),), python=sys.executable)
        requests[remote] = {
            "do": "keep", "words": [sys.executable, "-u", "-c", program], "folder": str(folder), "code": None,
            "variables": {}, "grace": 5.0,
        }  # fmt: skip
    return Links(requests, folder, Stop(5.0))


def test_one_log_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = links(
        tmp_path,
        a="print('   host  2 of 2, generation 1, 2 ranks in all')",
        b="print('hello'); print('   host  1 of 2, generation 1, 2 ranks in all'); print('done')",
    )
    made.follow()
    assert made.done
    said = capsys.readouterr().out
    assert sorted(said.splitlines()) == [
        "   host  1 of 2, generation 1, 2 ranks in all", "[a]    host  2 of 2, generation 1, 2 ranks in all",
        "[b] hello", "done",
    ]  # fmt: skip
    assert (tmp_path / "run.log").read_text() == said
    assert (tmp_path / "b.out").read_text().splitlines()[-1] == "done"


def test_a_host_that_is_lost_is_called_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lost").touch()
    made = links(tmp_path, a="import time; print('trains'); time.sleep(1)")
    made.follow()
    assert made.done
    assert capsys.readouterr().out.splitlines() == [
        "  again  host a is lost: Connection closed", "   host  a is reached again", "trains"
    ]  # fmt: skip


def test_one_that_fails_is_not_started_again(tmp_path: Path) -> None:
    made = links(tmp_path, a="import sys; sys.exit(2)", b="import sys; sys.exit(1)")
    made.follow()
    assert [link.code for link in made.links] == [2, 1]
    assert not made.done


def test_when_one_is_done_others_are_not_waited_for_long(tmp_path: Path) -> None:
    began = time.monotonic()
    made = links(tmp_path, a="print('done')", b=WAITS)
    made.follow()
    assert made.links[0].code == 0
    assert time.monotonic() - began < 25


def test_a_request_to_stop_reaches_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready = [tmp_path / f"{name} is ready" for name in "ab"]
    first, second = (WAITS.replace("time.sleep", f"open({str(path)!r}, 'w').close(); time.sleep") for path in ready)
    made = links(tmp_path, a=f"print('begun')\n{first}", b=second)

    def ask() -> None:
        while not all(path.exists() for path in ready):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    made.follow()
    asking.join()
    assert [link.code for link in made.links] == [130, 130]
    said = capsys.readouterr().out
    assert "stop  was asked to" in said
    assert said.count("saved") == 2
