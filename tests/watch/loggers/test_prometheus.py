"""The endpoint: its text as Prometheus' own parser reads it, while the run lasts and no longer."""

from __future__ import annotations

import math
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from phalanx import CannotHere, Run, WrongUse
from phalanx.watch.loggers import Prometheus, metrics_server
from phalanx.watch.loggers.base import LoggedRun
from phalanx.watch.loggers.prometheus import address_of, exposition, text_of
from tests.ports import free_port
from tests.test_cli import phalanx
from tests.watch.loggers.runs import patiently


def parsed(text: str) -> dict[tuple[str, str], float]:
    """By series and its label beside the run's."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, next((v for k, v in s.labels.items() if k != "run"), "")): s.value for s in samples}


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def logger(port: int) -> Prometheus:
    made = Prometheus(port)
    made.begin(LoggedRun("first", Path(), {}, 0))
    return made


def test_it_serves_the_last_step_until_it_ends() -> None:
    made = logger(port := free_port())
    assert parsed(get(port)) == {("phalanx_step", ""): 0}
    made.write(3, {"loss": 0.5, "loss/a": math.nan, 'my "x"\\y': 2.0, "seconds/forward": 0.25, "lr": math.inf})
    made.write_measures(3, {"f1": 0.75})
    found = parsed(get(port))
    assert math.isnan(found.pop(("phalanx_loss_part", "a")))
    assert found == {
        ("phalanx_step", ""): 3,
        ("phalanx_loss", ""): 0.5,
        ("phalanx_lr", ""): math.inf,
        ("phalanx_logged", 'my "x"\\y'): 2.0,
        ("phalanx_seconds", "forward"): 0.25,
        ("phalanx_held_out", "f1"): 0.75,
    }
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(port, "/other")
    made.end(True)
    with pytest.raises(urllib.error.URLError):
        get(port)


def test_numbers_that_are_none_are_spelled_as_prometheus_does() -> None:
    text = exposition({"loss": [({}, -math.inf)], "lr": [({}, math.nan)]}, {"run": "a"})
    assert 'phalanx_loss{run="a"} -Inf\n' in text
    assert 'phalanx_lr{run="a"} NaN\n' in text


@pytest.mark.parametrize(
    "text", ["", "x", "0", "65536", "host:", "-1", "9090:x", "::1:9090", "[::1]", "[]:9090", "[::1:90"]
)
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(WrongUse, match="is no port"):
        address_of(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("80", ("127.0.0.1", 80)), (":80", ("127.0.0.1", 80)), ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("node1:80", ("node1", 80)),
        ("[::1]:19191", ("::1", 19191)), ("[::]:80", ("::", 80)), ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)  # fmt: skip
def test_words_for_an_address(text: str, found: tuple[str, int]) -> None:
    assert address_of(text) == found
    assert text_of(*found).rpartition(":")[0] in ("127.0.0.1", text.rpartition(":")[0])


def test_it_listens_at_an_address_of_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        port = probe.getsockname()[1]
    host, number = address_of(f"[::1]:{port}")
    made = Prometheus(number, host)
    made.begin(LoggedRun("first", Path(), {}, 0))
    assert made.where(Run("r")) == f"http://[::1]:{port}/metrics"
    with urllib.request.urlopen(made.where(Run("r")), timeout=10) as answer:
        assert b"phalanx_step" in answer.read()
    made.end(True)


def test_a_port_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metrics_server, "TAKEN_SECONDS", 0.3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CannotHere, match=r"cannot be listened at for Prometheus: .*Choose another --metrics-port"):
            logger(port)


TASK = """
import urllib.request
import phalanx
from tests.tasks import Digits

class Mine(Digits):
    def callbacks(self):
        return [Looks()]

class Looks(phalanx.Callback):
    def on_step(self, engine, metrics):
        if engine.is_main and metrics.step == 4:
            print(urllib.request.urlopen("http://127.0.0.1:{port}/metrics").read().decode())
"""


def test_a_run_serves_it_also_after_it_lost_a_rank(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "task.py").write_text(TASK.replace("{port}", str(port)))
    words: list[Any] = ["--on", "local:2", "--kill", "0@3", "--metrics-port", port, "--run", "mine"]
    done = phalanx("train", "task.py", *map(str, words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Prometheus: http://127.0.0.1:{port}/metrics" in done.stdout
    assert 'phalanx_step{run="mine"} 5' in done.stdout
    with pytest.raises(urllib.error.URLError):
        get(port)


UNDER_ATTACK = """
import resource, subprocess, sys, time
import phalanx
from tests.tasks import Digits

ATTACK = '''
import socket, time
held = []
for _ in range(300):
    one = socket.socket()
    one.settimeout(0.2)
    try:
        one.connect(("127.0.0.1", {port}))
        one.send(b"GET /metrics HTTP/1.1\\r\\n")
    except OSError:
        pass
    held.append(one)
print("held", flush=True)
time.sleep(60)
'''

class Mine(Digits):
    def callbacks(self):
        return [Attacked()]

class Attacked(phalanx.Callback):
    def on_step(self, engine, metrics):
        if metrics.step == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
            self.attack = subprocess.Popen([sys.executable, "-c", ATTACK], stdout=subprocess.PIPE)
            self.attack.stdout.readline()
            time.sleep(0.5)

    def on_end(self, engine):
        self.attack.kill()
        self.attack.wait()
"""


def test_saving_goes_on_whoever_holds_connections(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "task.py").write_text(UNDER_ATTACK.replace("{port}", str(port)))
    words = ["--steps", "6", "--save-steps", "2", "--metrics-port", str(port), "--run", "mine"]
    done = patiently("train", "task.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cannot" not in done.stderr
    saved = [event["step"] for event in Run(tmp_path / "mine").events(0, "checkpoint")]
    assert saved == [2, 4, 6]
