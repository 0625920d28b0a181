"""What numbers in a flight record stand for: groups, and places in the code, written out when they are first seen."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FrameType

from phalanx import user_code
from phalanx.flight import GROUP, GROUP_BYTES, GROUPS, GROUPS_AT, SITE_BYTES, SITES, SITES_AT

HERE = str(Path(__file__).parent)
OURS, OTHERS, USERS, ROOT = range(1, 5)
"""Whose a frame is: this room's, anybody's, the user's; or the first of a rank."""


class Places:
    """In the memory of one rank's record."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.groups: dict[str, int] = {}
        """By name, its row."""
        self.axes: list[str] = []
        """By row of a group."""
        self._sites = 0
        self._codes: list[CodeType] = []
        """Those that are known by their address must stay there."""

    def new_group(self, group: str, axis: str, size: int) -> int:
        """Those for which there is no row share the last."""
        row = self.groups[group] = min(len(self.groups), GROUPS - 1)
        if row == len(self.axes):
            self.axes.append(axis)
        axis = "world" if axis == "default_pg" else axis
        GROUP.pack_into(self._memory, GROUPS_AT + row * GROUP_BYTES, group.encode()[:72], axis.encode()[:24], size, 0)
        return row

    def owner(self, code: CodeType) -> int:
        """Whose its frames are."""
        self._codes.append(code)
        if code.co_filename.startswith(HERE):
            return OURS
        if user_code.is_root(code.co_filename, code.co_name):
            return ROOT
        return USERS if user_code.is_users_line(code.co_filename) else OTHERS

    def new_site(self, frame: FrameType) -> int:
        """The number of where a frame is. The first stands for all that there is no room for."""
        number = self._sites + 1
        if number >= SITES:
            return 0
        self._sites = number
        file = frame.f_code.co_filename
        own = Path(file).is_relative_to(user_code.OWN)
        name = user_code.place(file, frame.f_lineno)
        name = f"{Path(file).relative_to(user_code.OWN.parent)}:{frame.f_lineno}" if own else name
        at, text = SITES_AT + number * SITE_BYTES, name[-(SITE_BYTES - 1) :].encode(errors="replace")
        self._memory[at : at + SITE_BYTES] = text[:SITE_BYTES].ljust(SITE_BYTES, b"\0")
        return number
