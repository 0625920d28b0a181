"""What a run did, in few words: told by its ranks to whoever started them."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.checkpoint.best import Best
from phalanx.train.calling import Ended


@dataclass
class Summary:
    """What a run did, or as much of it as the last generation of ranks did."""

    steps: int = 0
    stopped: bool = False
    """Somebody asked it to stop before its last step; its state is saved."""
    held_out: dict[str, float] = field(default_factory=dict)
    held_out_with: str = ""
    """The callback whose weights it was evaluated with; nothing: with the model's."""
    ended: Ended | None = None
    """Where and why a callback has ended it before its last planned step."""
    best: Best | None = None
    """The checkpoint whose weights are left, where a measure says which."""
