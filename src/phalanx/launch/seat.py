"""A host's seat at a rendezvous: what it brings and agrees to, its way there, and what it says where there is none."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch import network
from phalanx.launch.key import VARIABLE, Key
from phalanx.launch.rendezvous_server import TICK


@dataclass(eq=False)
class Seat:
    """Checked when it is made; its way is found when a door is."""

    address: str
    _: KW_ONLY
    key: Key
    """Who does not know it is not let in."""
    name: str
    ranks: int
    min_nodes: int
    max_nodes: int
    host: str = ""
    """Its name among the hosts; by default the machine's own."""
    patience: float = 600.0
    last_call: float = 10.0
    """How long the first round waits for one more host, if there are enough but not all."""
    silence: float = 5.0
    """After so long without a word a host is given up."""
    terms: Mapping[str, Any] | None = None
    """What else all hosts must agree on."""
    interface: str | None = None
    """Through which others reach this host; by default the one that reaches the rendezvous."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise WrongUse(
                f"at least {self.min_nodes} and at most {self.max_nodes} nodes cannot be. Ask for 1 <= min <= max."
            )
        if self.ranks < 1:
            raise WrongUse(f"host brings {self.ranks} ranks. Bring at least one.")
        if self.silence < 5 * TICK:
            raise WrongUse(
                f"a host cannot be given up after {self.silence:g} s of silence. Wait at least {5 * TICK:g} s."
            )
        self.at, self.port = network.parse(self.address)
        self.host = self.host or socket.gethostname()
        nodes = [self.min_nodes, self.max_nodes]
        agreed = {"run": self.name, "nodes": nodes, "silence": self.silence, **(self.terms or {})}
        self.agreed = {what: repr(value) for what, value in agreed.items()}
        """What hosts compare when they meet."""
        self.way = network.Way(socket.AF_INET, "", "", "")
        self.met = False
        """Whether it has been let in once."""
        self.early = "KUBERNETES_SERVICE_HOST" in os.environ
        """Whether the rendezvous's host may have no name yet: a pod has one from when it is placed."""

    def new_door(self, asked: Callable[[], bool] | None) -> socket.socket | None:
        """A socket for the ranks' store, should this host become node 0. Also finds the way to the rendezvous anew.

        A host that was in and has lost its network, and perhaps its names, waits for it, as does one that may be early.
        None: it was asked to stop.
        """
        deadline = time.monotonic() + self.patience
        while True:
            try:
                self.way = network.way_to(self.at, self.port, self.interface)
                return self._listening()
            except socket.gaierror as error:
                why = f"host {self.at!r} is not known here ({error}). Give the rendezvous a name or an IP."
            except OSError as error:
                why = (
                    f"no network of this host leads to the rendezvous at {self.address} ({error.strerror or error}). "
                    "Bring one up, or give an address that can be reached."
                )
            if not (self.met or self.early) or time.monotonic() > deadline:
                raise CannotHere(why) from None
            if asked is not None and asked():
                return None
            time.sleep(0.5)

    def look_again(self) -> None:
        """The rendezvous's host may have come again at another address."""
        with suppress(OSError, CannotHere):
            self.way = network.way_to(self.at, self.port, self.interface)

    def _listening(self) -> socket.socket:
        """At a port that the system gives: not the rendezvous's, which is as free as others until a host opens it."""
        door = network.listen(self.way.own, interface=self.way.interface)
        if door.getsockname()[1] != self.port:
            return door
        with door:
            return network.listen(self.way.own, interface=self.way.interface)

    def turned_away(self) -> CannotHere:
        """Another key is asked for there."""
        return CannotHere(
            f"the rendezvous at {self.address} is for those who know another key than host {self.host}. Give all hosts "
            f"the same --run folder, which must be one that all of them see, or the same {VARIABLE}; and every run a "
            "port of its own."
        )

    def stranger(self) -> CannotHere:
        """Whatever is there does not speak as a rendezvous does."""
        return CannotHere(
            f"what listens at {self.address} is not a rendezvous of Phalanx, or is stopped. "
            "Choose another port, or end what has this one."
        )

    def nobody(self) -> CannotHere:
        """Nothing answers there."""
        return CannotHere(
            f"host {self.host} reached no rendezvous at {self.address} in {self.patience:g} s and cannot open one "
            "there: the address is another machine's, or its port is held by a process that does not answer. "
            "Start the host the address belongs to, and see that its port can be reached (--interface, on that host, "
            "says which of its addresses others know)."
        )
