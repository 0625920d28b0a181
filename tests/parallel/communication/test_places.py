"""Groups and places in the code, written out in the record's memory."""

from __future__ import annotations

import sys

import torch.nn

from phalanx import user_code
from phalanx.flight import BYTES, GROUPS, SITES, Flight
from phalanx.parallel.communication import communicator
from phalanx.parallel.communication.places import OTHERS, OURS, ROOT, USERS, Places


def test_it_is_known_whose_a_line_is() -> None:
    places = Places(memoryview(bytearray(BYTES)))
    root = compile("def _rank(): pass", str(user_code.OWN / "launch" / "local.py"), "exec").co_consts[0]
    codes = [
        communicator.Communicator.all_reduce.__code__, torch.nn.Module.__init__.__code__,
        test_it_is_known_whose_a_line_is.__code__, root,
    ]  # fmt: skip
    assert [places.owner(code) for code in codes] == [OURS, OTHERS, USERS, ROOT]


def test_groups_and_sites_for_which_there_is_no_room_share_one() -> None:
    memory = bytearray(BYTES)
    places = Places(memoryview(memory))
    rows = [places.new_group(f"group {number}", "dp", 2) for number in range(GROUPS + 2)]
    assert rows == [*range(GROUPS), GROUPS - 1, GROUPS - 1]
    assert places.axes == ["dp"] * GROUPS
    sites = [places.new_site(sys._getframe()) for _ in range(SITES + 1)]
    assert sites == [*range(1, SITES), 0, 0]
    memory[:8] = b"PHLXFLT3"
    record = Flight.of(bytes(memory))
    assert record.groups["group 3"].axis == "dp"
    assert record.groups[f"group {GROUPS + 1}"].size == 2
