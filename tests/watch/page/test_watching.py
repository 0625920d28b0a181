"""The verbs, as a user meets them: what they refuse, how they end; and the page, in a browser."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import WrongUse
from phalanx.run import Run
from phalanx.watch.page.report import write_report
from phalanx.watch.page.watching import runs_of
from tests.browser import Browser, needs_chromium
from tests.test_cli import phalanx
from tests.watch.page.folders import append, start, step, write


@contextmanager
def watched(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command itself, and where its page is."""
    command = [sys.executable, "-m", "phalanx", "watch", str(folder), "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            yield process, found[0]
        finally:
            process.kill()


def test_runs_are_found(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "one", 1, 3)
    assert list(runs_of(tmp_path / "runs" / "one")()) == ["one"]
    found = runs_of(tmp_path / "runs")
    write(tmp_path / "runs" / "two", 1, 3)
    os.utime(tmp_path / "runs" / "one", (1, 1))
    assert list(found()) == ["one", "two"], "one that came later too, the newest last"
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongUse, match="has no run in it"):
        runs_of(tmp_path / "empty")
    with pytest.raises(WrongUse, match="is not there"):
        runs_of(tmp_path / "nowhere")


def test_what_is_refused_is_one_clear_line(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "one", 1, 3)
    for words, code, said in (
        (["watch", "nowhere"], 2, "nowhere is not there"),
        (["watch", "--host", "0.0.0.0"], 2, "Give a --token"),
        (["watch", "--token", ""], 2, "is empty"),
        (["report", "runs"], 2, "is no run's folder"),
    ):
        done = phalanx(*words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    done = phalanx("report", "runs/one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report  runs/one/report.html" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_when_it_is_asked_to(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path / "one", 1, 3)
    with watched(tmp_path / "one", "--token", "a-long-token") as (process, address):
        assert address.endswith("/?token=a-long-token")
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")


def ready(browser: Browser, words: str) -> None:
    browser.until(f"document.body?.dataset.ready === {json.dumps(words)}")


@needs_chromium
def test_the_page(tmp_path: Path) -> None:
    """One browser for all: starting it is slow."""
    folder, draw = tmp_path / "runs", random.Random(1)
    other = write(folder / "narrow", 2, 40, width=32)
    run = write(folder / "wide", 4, 400, slow=(2, 300), width=64)
    os.utime(other.path, (1, 1))
    append(run, 0, {"kind": "checkpoint", "time": 1.7949e9 + 30, "step": 250, "seconds": 0.3})
    append(run, 0, {"kind": "evaluation", "time": 1.7949e9 + 31, "step": 255, "held_out": {"accuracy": 0.75}})
    with watched(folder) as (_, address), Browser() as browser:
        browser.open(address)
        ready(browser, "wide 0  400")
        browser.until("document.body.dataset.concluded === 'wide'")
        said = browser.ask("document.getElementById('verdict').innerText")
        assert said.startswith("died: its supervisor ended without a word, after 400 steps")
        shown = browser.ask("[...document.querySelectorAll('[data-chart]')].map((each) => each.dataset.chart)")
        assert shown[:2] == ["loss", "held out"]
        assert {"grad_norm", "lr", "samples a second", "seconds a step", "sent"} <= set(shown)
        assert "rank 2 in step 301" in browser.ask("document.querySelector('#heat canvas').ariaLabel")

        _goes_on_live(browser, run, draw)
        _zooms(browser)
        _compares(browser)
        _can_be_read_without_pictures(browser)
        browser.resize(390, 800, mobile=True)
        browser.until("document.documentElement.scrollWidth <= 390")
        browser.prefer("dark")
        assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        browser.ask("document.getElementById('theme').click()")
        assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 248)", (
            "as chosen: light"
        )

        _takes_no_text_for_markup(browser, folder)
        assert all(asked.startswith((address, "data:")) for asked in browser.requests), "no request leaves this machine"
        assert browser.errors == []
        browser.open("about:blank")
        browser.until("document.URL === 'about:blank'")
        browser.requests.clear()
        browser.open(write_report(run).as_uri())
        browser.until("document.body?.dataset.ready === 'wide 0  410'")
        assert browser.ask("document.querySelectorAll('[data-chart] canvas').length") >= 7
        browser.choose("first", 301)
        ready(browser, "wide 300 410 410")
        assert all(asked.startswith(("file:", "data:")) for asked in browser.requests), "it asks nobody"
        assert browser.errors == []


@needs_chromium
def test_a_run_is_seen_while_it_trains(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "tasks.py", tmp_path / "mine.py")
    words = ["train", "mine.py", "--on", "local:2", "--device", "cpu", "--steps", "1200", "--run", "runs/live"]
    (tmp_path / "runs" / "live").mkdir(parents=True)
    with (
        (tmp_path / "told").open("w") as told,
        subprocess.Popen([sys.executable, "-m", "phalanx", *words], cwd=tmp_path, stdout=told, stderr=told) as trains,
    ):
        while not (tmp_path / "runs" / "live" / "events").exists():
            assert trains.poll() is None, (tmp_path / "told").read_text()
            time.sleep(0.1)
        with watched(tmp_path / "runs") as (_, address), Browser() as browser:
            browser.open(address)
            seen = set()
            while trains.poll() is None:
                seen.add(browser.ask("document.body?.dataset.ready"))
            assert len(seen - {None}) > 1, "steps came while it was looked at"
            ready(browser, "live 0  1200")
            browser.until("document.getElementById('live').innerText === 'done'")
            assert "certificate" in browser.ask("document.getElementById('facts').innerText.toLowerCase()")
            assert browser.errors == []
        assert trains.wait() == 0
    assert (tmp_path / "runs" / "live" / "report.html").exists()


def _goes_on_live(browser: Browser, run: Run, draw: random.Random) -> None:
    """Steps that come, a metric that nobody knows, and a rank that failed."""
    append(run, 0, *(step(0, n, draw, logged={"my metric": n / 7}) for n in range(400, 410)))
    append(run, 1, {"kind": "failure", "time": 1.7949e9 + 49, "reason": "was ended by <b>SIGKILL</b>", "step": 405})
    append(run, 0, start(0, 4, 405, 2), *(step(0, n, draw, logged={"my metric": n / 7}) for n in range(405, 410)))
    ready(browser, "wide 0  410")
    assert browser.until("document.querySelector('[data-chart=\"logged/my metric\"] .now')?.innerText") == "58.4286"
    told = browser.ask("document.getElementById('events').innerText")
    assert "failed: was ended by <b>SIGKILL</b>" in told, "text is text"
    assert "went on after step 405" in told
    last = browser.ask("document.querySelector('[data-chart=loss] .now').innerText")
    assert abs(float(last) - run.ledger()[409]["loss"]) < 1e-3


def _zooms(browser: Browser) -> None:
    """By the mouse on a chart, by typing, by the keyboard on the map, and back."""
    place = "document.querySelector('[data-chart=loss] .u-over').getBoundingClientRect()"
    box = browser.ask(f"(() => {{ const box = {place}; return [box.left, box.top, box.width]; }})()")
    browser.drag(box[0] + box[2] * 0.5, box[1] + 50, box[0] + box[2] * 0.75)
    browser.until("Math.abs(document.getElementById('first').value - 205) < 6")
    browser.until("Math.abs(document.getElementById('last').value - 307) < 6")
    browser.choose("last", 280)
    browser.until("document.body.dataset.ready.endsWith(' 280 410')")
    assert browser.ask("document.getElementById('spans-note').innerText").startswith(
        "the last steps of those shown above: steps 221 to 280"
    )
    browser.ask("document.querySelector('#heat canvas').focus()")
    browser.press("ArrowLeft")
    assert re.match(r"rank 0, step 279: \d+\.\d ms", browser.ask("document.querySelector('#heat .tip').innerText"))
    browser.press("Enter")
    browser.until("document.body.dataset.ready.startsWith('wide 276 ')")
    browser.press("Escape")
    ready(browser, "wide 0  410")
    _looks_closely(browser)


def _looks_closely(browser: Browser) -> None:
    """At a step of the time line, by the keyboard and by the mouse, and back."""
    browser.ask("document.querySelector('#spans canvas').focus()")
    for key in ("ArrowLeft", "ArrowDown", "ArrowLeft"):
        browser.press(key)
    told = browser.ask("document.querySelector('#spans .tip').innerText")
    assert re.match(r"rank 1, step \d+: data \d+\.\d ms, forward \d+\.\d ms, backward", told)
    assert browser.ask("document.getElementById('spans-back').hidden")
    browser.press("Enter")
    browser.until("!document.getElementById('spans-back').hidden")
    browser.press("Escape")
    browser.until("document.getElementById('spans-back').hidden")
    browser.ask("document.querySelector('#spans').scrollIntoView({block: 'center'})")
    box = browser.ask(
        "(() => { const box = document.querySelector('#spans canvas').getBoundingClientRect(); "
        "return [box.left, box.top, box.width]; })()"
    )
    browser.drag(box[0] + box[2] / 2, box[1] + 10, box[0] + box[2] * 0.6)
    browser.until("!document.getElementById('spans-back').hidden")
    browser.ask("document.getElementById('spans-back').click()")
    browser.until("document.getElementById('spans-back').hidden")


def _takes_no_text_for_markup(browser: Browser, folder: Path) -> None:
    """Names of runs, metrics and settings, reasons and stacks: whoever writes them must not write the page."""
    bad, draw = "<img src=x onerror=document.title='taken'>", random.Random(3)
    run = write(folder / bad, 2, 0, note=bad)
    logged: dict[str, Any] = {"logged": {bad: 1.0, "__proto__": 2.0, "constructor": 3.0}}
    lines = [step(0, n, draw, **logged | {"turn": bad}) | {"bad": bad if n == 7 else ""} for n in range(20)]
    append(run, 0, *lines, {"kind": "bad", "time": 1.7949e9, "step": 7, "reason": bad})
    failure = {
        "rank": 0, "reason": bad, "trace": f'File "{bad}", line 1', "stuck": False, "timed_out": False, "final": True,
        "secondary": False, "file": bad,
    }  # fmt: skip
    account = {"host": bad, "time": 1.7949e9, "steps": 20, "generation": 1, "failures": [failure]}
    (run.path / "failures").mkdir()
    (run.path / "failures" / "generation-00001-from-00000.json").write_text(json.dumps(account))
    (run.path / "generation").write_text("1\n")
    browser.until("[...document.getElementById('run').options].length === 3")
    browser.choose("run", bad)
    ready(browser, f"{bad} 0  20")
    browser.until(f"document.body.dataset.concluded === {json.dumps(bad)}")
    browser.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert bad in browser.ask("document.getElementById('verdict').innerText"), "it is told as it is written"
    charts = browser.ask("[...document.querySelectorAll('[data-chart]')].map((each) => each.dataset.chart)")
    assert {f"logged/{bad}", "logged/__proto__", "logged/constructor"} <= {*charts, *_constants(browser)}
    assert browser.ask("document.querySelectorAll('img, iframe, object').length") == 0
    assert "taken" not in browser.ask("document.title").removeprefix(bad)
    browser.choose("run", "wide")
    ready(browser, "wide 0  410")


def _constants(browser: Browser) -> set[str]:
    said = browser.ask("document.getElementById('constants').innerText").partition(": ")[2]
    return {each.rpartition(" ")[0] for each in said.split(", ")}


def _compares(browser: Browser) -> None:
    """A second run is laid over the first; then it is looked at by itself."""
    browser.ask("document.querySelector('[aria-label=\"compare narrow\"]').click()")
    browser.until("document.querySelectorAll('[data-chart=loss] .legend li').length === 2")
    browser.until("/^width\\s+64\\s+32$/m.test(document.getElementById('differences').innerText)")
    browser.ask("document.querySelector('[aria-label=\"compare narrow\"]').click()")
    browser.choose("run", "narrow")
    ready(browser, "narrow 0  40")
    browser.choose("run", "wide")
    ready(browser, "wide 0  410")


def _can_be_read_without_pictures(browser: Browser) -> None:
    """Every picture says what it shows, and has a table; every control has a name."""
    unnamed = (
        "[...document.querySelectorAll('button, input, select, [role=img]')].filter((each) => !each.hidden && "
        "!(each.ariaLabel || each.labels?.length || each.innerText)).map((each) => each.outerHTML)"
    )
    assert browser.ask(unnamed) == []
    browser.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.until("document.querySelectorAll('figure table').length >= 7")
    heads = browser.ask(
        "[...document.querySelectorAll('#heat-table th, #spans-table th')].map((each) => each.innerText)"
    )
    assert heads[:5] == ["Rank", "Host", "Usual", "Longest", "In step"]
    assert "forward" in heads
