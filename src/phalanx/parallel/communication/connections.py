"""How many connections ranks take to ranks of other hosts: several, where those are far and few share a link.

What is under way on a TCP connection grows by a little each round trip, and falls by half at every loss, so over a long
round trip one connection does not fill a link (66 of 100 Mbit/s at 50 ms, and 89 with 4). Without one it does, and
further ones carry nothing more. Nor do they where many ranks share a link, whose connections fill it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

FAR = 0.005
"""Seconds of a round trip from which on a connection leaves much of a link unused."""
ENOUGH = 4
"""Connections that fill a link."""


def at_most(hosts: Sequence[int], every: Sequence[int]) -> int:
    """To each rank of another host, if that is far. ``hosts``: of a group's ranks; ``every``: of all ranks.

    All ranks of a host send at the same time, each to ranks of all other hosts of its group.
    """
    others, ranks = len(set(hosts)) - 1, Counter(every)
    sharing = others * max((ranks[host] for host in hosts), default=0)
    return max(1, ENOUGH // sharing) if sharing else 1
