"""How many connections ranks take to ranks of other hosts: several, where those are far and few share a link.

What a TCP connection has under way is bounded by its buffers, and falls at every packet that is lost, to grow again by
a little each round trip. So over a long one it does not fill a link that is fast (188 of 300 Mbit/s at 100 ms, 258 with
4 connections) or loses something (39 of 100 Mbit/s at 50 ms with 0.1% lost, and 79). Where many ranks share a link,
their connections fill it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

FAR = 0.005
"""Seconds of a round trip from which on a connection may leave much of a link unused: 4 MB, what the send buffer of one
grows to, pass in it at 6 Gbit/s. With 0.1% lost of 100 Mbit/s, 4 took 0.93 of the time at 10 ms and 0.84 at 20 ms."""
ENOUGH = 4
"""Connections that fill a link."""


def at_most(hosts: Sequence[int], every: Sequence[int]) -> int:
    """To each rank of another host, if that is far. ``hosts``: of a group's ranks; ``every``: of all ranks.

    All ranks of a host send at the same time, each to ranks of all other hosts of its group.
    """
    others, ranks = len(set(hosts)) - 1, Counter(every)
    sharing = others * max((ranks[host] for host in hosts), default=0)
    return max(1, ENOUGH // sharing) if sharing else 1
