"""Messages: what was said arrives as it was, and nothing else does."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from phalanx.launch import messages
from phalanx.launch.messages import Book, Message, Unreadable, decoded, encoded

BOOK = Book(generation=3, hosts=["a", "b"], ranks=[2, 8], address="node1", port=7, facts={"resume": "step 40"})
SAID: list[Message] = [
    messages.Hello(2, "a", "1", {"run": "'run'"}, BOOK),
    messages.Welcome("a", 3),
    messages.Join(2, 0, "node1", 7, 600.0, 1.5),
    messages.Leave("was asked to stop"),
    messages.Failed(3, "rank 1"),
    messages.Done(3, "done"),
    messages.Fact(3, "resume", "step 40"),
    messages.News(BOOK),
    messages.Evicted("silent"),
    messages.Refused("use", "größer"),
    messages.Farewell(),
    messages.Heartbeat(),
]


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_what_was_said_arrives(message: Message) -> None:
    assert decoded(encoded(message)) == message


def join(**other: Any) -> bytes:
    usual = {"ranks": 2, "after": 0, "address": "a", "port": 7, "patience": 1.0, "waited": 0.0}
    return json.dumps(["Join", usual | other]).encode()


def news(**other: Any) -> bytes:
    return json.dumps(["News", {"book": json.loads(encoded(messages.News(BOOK)))[1]["book"] | other}]).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 200_000, b"{" * 1_000, b"\xff", b"", b"7", b"[]", b"null", b'["Book", {}]', b'["Join", {}]',
        b'["Join", []]',
        b'[["Join"], {}]', b'["Heartbeat", {"mood": 1}]', b'["Leave", {"why": NaN}]', b"1" * 5_000,
        join(ranks=True), join(ranks=0), join(ranks="2"), join(port=0), join(port=1 << 16), join(waited=float("nan")),
        join(waited=1e300), join(address=["a"]), join(address=""), join(after=-1), join(after=1 << 60), join(extra=1),
        news(hosts=7), news(hosts=["a", ["b"]]), news(hosts=["a", "a"]), news(ranks=[2]), news(ranks=[2, 0]),
        news(done={"a": {}}), news(facts=[1]), news(urgent=1), news(over="x" * (1 << 17)),
    ],
)  # fmt: skip
def test_what_is_no_message_is_unreadable(payload: bytes) -> None:
    with pytest.raises(Unreadable):
        decoded(payload)


def test_messages_with_a_wrong_value_somewhere_are_unreadable_and_nothing_worse() -> None:
    chosen = random.Random(5)
    odd: list[Any] = [None, True, -1, 1.5, "x", [], {}, [[]], {"a": []}, 1 << 70, "\x00"]

    def harmed(value: Any) -> Any:
        if chosen.random() < 0.1 or not isinstance(value, (dict, list)):
            return chosen.choice(odd) if chosen.random() < 0.3 else value
        if isinstance(value, dict):
            return {name: harmed(item) for name, item in value.items() if chosen.random() > 0.05}
        return [harmed(item) for item in value]

    for _ in range(2_000):
        payload = json.dumps(harmed(json.loads(encoded(chosen.choice(SAID))))).encode()
        try:
            found = decoded(payload)
        except Unreadable:
            continue
        assert json.loads(encoded(found)) == json.loads(payload)


def test_the_first_reason_stays_and_urgency_may_come_later() -> None:
    book = Book(generation=1, hosts=["a", "b"], ranks=[1, 1])
    book.end("host c wants to join", urgent=False)
    book.lose("b", "its connection broke")
    assert (book.over, book.urgent, book.lost) == ("host c wants to join", True, ["b"])


def test_who_has_finished_cannot_be_lost() -> None:
    book = Book(generation=1, hosts=["a", "b"], ranks=[1, 1], done={"a": "trained"})
    book.lose("a", "its connection broke")
    assert book.running
    assert book.finished is None
    book.done["b"] = "stopped early"
    assert book.finished == "stopped early, trained"
