"""Requests to stop: noted however often they come, and cut short only by a person."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from phalanx.launch import stopping
from phalanx.launch.local import run_ranks
from phalanx.launch.stopping import ENDING, Requests, Stop, give_requests, handled


def saving() -> str:
    """A rank that needs a while after it was asked to stop, whatever else it is asked for."""
    requests = Requests()
    give_requests(requests)
    os.kill(os.getppid(), signal.SIGUSR1)
    os.kill(os.getppid(), signal.SIGTERM)
    while not requests.stop:
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getppid(), number)
        time.sleep(0.02)
    time.sleep(0.2)
    return f"saved, asked to stop: {requests.stop}, to save: {requests.save}"


def test_signals_that_follow_the_first_change_nothing() -> None:
    stop = Stop(grace=30)
    outcome = run_ranks(saving, 1, stop=stop)
    assert (outcome.result, outcome.interrupted) == ("saved, asked to stop: True, to save: True", True)
    assert not stop.cut_short


def asked() -> bool:
    requests = Requests()
    give_requests(requests)
    end = time.monotonic() + 20
    while not requests.stop and time.monotonic() < end:
        time.sleep(0.01)
    return requests.stop


def test_a_signal_that_another_thread_got_is_handed_on() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def signalled() -> None:
        while signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.01)
        time.sleep(0.5)  # the first thread is asleep by then
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    other = threading.Thread(target=signalled)
    other.start()
    outcome = run_ranks(asked, 1, stop=Stop(grace=30))
    other.join()
    assert (outcome.result, outcome.interrupted) == (True, True)


def early() -> str:
    """A rank that is asked before it has anything to tell of it."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
    requests = Requests()
    give_requests(requests)
    return repr(requests)


def test_a_rank_notes_them_from_its_first_moment() -> None:
    assert run_ranks(early, 1).result == "Requests(stop=True, save=False)"


def test_grace_ends_and_nothing_at_stake_needs_none() -> None:
    def hanging() -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)

    stop = Stop(grace=0.5)
    assert run_ranks(hanging, 1, stop=stop).interrupted
    assert stop.cut_short == "after the 0.5 s of --grace"
    began = time.monotonic()
    stop = Stop(grace=30, at_stake=lambda: False)
    assert run_ranks(hanging, 1, stop=stop).interrupted
    assert not stop.cut_short
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("terminal", "signals", "cut"),
    [
        (True, [(signal.SIGINT, 0.0), (signal.SIGINT, 2.0)], True),
        (True, [(signal.SIGINT, 0.0), (signal.SIGINT, 0.05)], False),  # handed on by what started us
        (True, [(signal.SIGTERM, 0.0), (signal.SIGTERM, 2.0), (signal.SIGHUP, 3.0)], False),
        (True, [(signal.SIGTERM, 0.0), (signal.SIGINT, 2.0)], False),
        (True, [(signal.SIGTERM, 0.0), (signal.SIGINT, 2.0), (signal.SIGUSR1, 2.5), (signal.SIGINT, 4.0)], True),
        (False, [(signal.SIGINT, 0.0), (signal.SIGINT, 2.0)], False),
    ],
)
def test_only_a_second_ctrl_c_cuts_it_short(
    terminal: bool, signals: list[tuple[int, float]], cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now)
    monkeypatch.setattr(stopping, "at_a_terminal", lambda: terminal)
    stop = Stop(grace=30)
    first = []
    for number, moment in signals:
        now = 100.0 + moment
        first.append(stop.heard(number))
    assert first == [True, *[False] * (len(signals) - 1)]
    assert bool(stop.cut_short) == cut
    assert (stop.left == 0) == cut
    assert ("Ctrl-C again" in stop.told()) == (terminal and any(n == signal.SIGINT for n, _ in signals))


def test_handlers_are_put_back_and_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    terminated = signal.getsignal(signal.SIGTERM)
    heard: list[int] = []
    try:
        with handled(ENDING, lambda number, frame: heard.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is terminated
