"""The reception: what a book says, and what hosts bring after it has moved. Whole rounds are in ``test_meeting``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from phalanx.launch.lines import Line, ready
from phalanx.launch.reception import VERSION, Book, Reception


def test_the_first_reason_stays_and_urgency_may_come_later() -> None:
    book = Book(generation=1, hosts=["a", "b"])
    book.end("host c wants to join", urgent=False)
    book.lose("b", "its connection broke")
    assert (book.over, book.urgent, book.lost) == ("host c wants to join", True, ["b"])


def test_who_has_finished_cannot_be_lost() -> None:
    book = Book(generation=1, hosts=["a", "b"], done={"a": "trained"})
    book.lose("a", "its connection broke")
    assert book.running
    assert book.finished is None
    book.done["b"] = "stopped early"
    assert book.finished == "stopped early, trained"


def test_a_book_reads_what_it_wrote_and_ignores_what_it_does_not_know() -> None:
    book = Book(generation=3, hosts=["a"], facts={"resume": "step 40"})
    assert Book.read(asdict(book) | {"mood": "good"}) == book


@pytest.fixture
def reception() -> Iterator[Reception]:
    terms = {"run": "run", "nodes": [2, 2], "silence": 5.0}
    one = Reception(socket.create_server(("localhost", 0)), "a", terms, last_call=1.0)
    yield one
    one.close()


def say(reception: Reception, **message: Any) -> tuple[Line, list[dict[str, Any]]]:
    """What the reception answers, after its greeting, until it hangs up or has answered."""
    line = Line(socket.create_connection(reception.door.getsockname()))
    line.send(**message)
    found: list[dict[str, Any]] = []
    while len(found) < 2 and not line.broken and ready([line], 5.0):
        found += [message for message in line.receive() if "beat" not in message]
    return line, found[1:]


def hello(book: Book, **other: Any) -> dict[str, Any]:
    usual = {"version": VERSION, "host": "b", "token": "1", "terms": {"run": "run", "nodes": [2, 2], "silence": 5.0}}
    return {**usual, "book": asdict(book), **other}


def test_a_host_brings_the_round_it_is_in(reception: Reception) -> None:
    line, answers = say(reception, hello=hello(Book(generation=5, hosts=["b", "c"], facts={"resume": "step 40"})))
    assert answers[0] == {"welcome": 5}
    other, answers = say(reception, hello=hello(Book(generation=4, hosts=["c", "d"]), host="d"))
    assert answers[0] == {"welcome": 5}  # and so it knows that the others went on
    assert (reception.book.generation, reception.book.hosts) == (5, ["b", "c"])
    line.close()
    other.close()


def test_a_host_that_was_started_anew_is_no_member_of_the_round_it_was_in(reception: Reception) -> None:
    line, _ = say(reception, hello=hello(Book(generation=5, hosts=["b", "c"])))
    other, answers = say(reception, hello=hello(Book(), host="c", token="2"))
    assert answers[0] == {"welcome": 5}
    assert reception.book.over == "host c was lost: it came back without its ranks"
    while not (news := [message["news"] for message in line.receive() if "news" in message]) or not news[-1]["over"]:
        assert ready([line], 5.0)
    assert not [message for message in answers + other.receive() if "news" in message]
    line.close()
    other.close()


@pytest.mark.parametrize("words", [{"join": {}}, {"hello": 1}, {"hello": {}}, {"failed": "x", "generation": 0}])
def test_strangers_are_sent_away(reception: Reception, words: dict[str, Any]) -> None:
    line, answers = say(reception, **words)
    assert answers == []
    assert line.broken
    line.close()
