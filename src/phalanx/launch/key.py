"""The key of a run: whoever proves that they know it is let in, and nobody else is told anything.

Both ends of a connection prove it, by a MAC over nonces of both, so that nothing recorded or sent back proves anything.
What follows is under keys of that session, one a direction. It is authenticated, not encrypted: a key keeps strangers
out, not the network's owner from reading along.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from phalanx.errors import CannotHere, WrongUse

VARIABLE = "PHALANX_KEY"
SHORTEST = 16
"""Characters of a key that somebody chose."""
NONCE_BYTES = PROOF_BYTES = 32


class Key:
    """A secret that never shows in words."""

    def __init__(self, secret: bytes | None = None) -> None:
        """None: a new one, for processes that are forked from this one."""
        self._secret = hashlib.sha256(b"phalanx key" + (secret or secrets.token_bytes(32))).digest()

    @classmethod
    def of_run(cls, folder: Path) -> Key:
        """The one in the environment, or else the one in the run's folder, which is made if it is not there."""
        chosen = os.environ.get(VARIABLE)
        if chosen is None:
            return cls(_kept(folder / "key"))
        if len(chosen) < SHORTEST:
            raise WrongUse(
                f"{VARIABLE} has {len(chosen)} characters, which can be guessed. Give all hosts of the run the same "
                f"{SHORTEST} random ones or more, or unset it: then the key is made in the run's folder."
            )
        return cls(chosen.encode(errors="surrogateescape"))

    def __repr__(self) -> str:
        return "Key(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key does not travel")

    def derive(self, use: str, purpose: str, nonces: bytes) -> bytes:
        """What only this key gives for one use in one session of one purpose."""
        return hmac.digest(self._secret, hashlib.sha256(f"{use} of {purpose}".encode()).digest() + nonces, "sha256")


def _kept(path: Path) -> bytes:
    """The secret in a file that only its owner can read. Hosts that begin together find one and the same."""
    try:
        if not path.exists():
            own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            try:
                with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(secrets.token_hex(32) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                with suppress(FileExistsError):  # another host was first
                    os.link(own, path)
            finally:
                own.unlink(missing_ok=True)
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise WrongUse(
                f"{path} can be read by others (mode {mode:03o}). Remove it to have a new one made, or set {VARIABLE} "
                "to the same random words on all hosts if this file system keeps no modes."
            )
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise CannotHere(
            f"the key of the run, {path}, cannot be made or read here: {reason}. Run all hosts as its owner, or set "
            f"{VARIABLE} to the same random words on all of them."
        ) from None
    if len(text) < SHORTEST:
        raise WrongUse(f"{path} holds no key. Remove it while no host runs, to have a new one made.")
    return text.encode()
