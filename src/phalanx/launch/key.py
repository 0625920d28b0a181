"""The key of a run: whoever proves that they know it is let in, and nobody else is told anything.

Both ends of a connection prove it, by a MAC over nonces of both, so that nothing recorded or sent back proves anything.
What follows is under keys of that session, one a direction. It is authenticated, not encrypted: a key keeps strangers
out, not the network's owner from reading along.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import itertools
import math
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from phalanx.errors import CannotHere, WrongUse

VARIABLE = "PHALANX_KEY"
SHORTEST, FEWEST_DIFFERENT, FEWEST_BITS = 16, 6, 80
"""Characters of a key that somebody chose, how many of them are different, and bits that they may have at most."""
ROUNDS = 600_000
"""Of a hash, for each guess at a key that somebody chose: a few tenths of a second."""
LARGEST = 4096
"""Bytes of a file with a key."""
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
        return cls(_kept(folder / "key") if chosen is None else _stretched(chosen, VARIABLE))

    def __repr__(self) -> str:
        return "Key(...)"

    def __reduce__(self) -> str:
        raise TypeError("a key does not travel")

    def derive(self, use: str, purpose: str, nonces: bytes) -> bytes:
        """What only this key gives for one use in one session of one purpose."""
        return hmac.digest(self._secret, hashlib.sha256(f"{use} of {purpose}".encode()).digest() + nonces, "sha256")


def bits_of(chosen: str) -> float:
    """How many bits words have at most, by their length and kinds of characters; few where they repeat themselves."""
    different = len(set(chosen))
    steps = {ord(after) - ord(before) for before, after in itertools.pairwise(chosen)}
    if chosen in (chosen + chosen)[1:-1] or different < FEWEST_DIFFERENT or len(steps) < FEWEST_DIFFERENT:
        return different * math.log2(max(2, different))
    kinds = [(str.islower, 26), (str.isupper, 26), (str.isdigit, 10), (lambda letter: not letter.isalnum(), 32)]
    pool = sum(size for kind, size in kinds if any(map(kind, chosen)))
    return len(chosen) * math.log2(max(2, pool))


def _stretched(chosen: str, where: str) -> bytes:
    """Words that somebody chose, made slow to guess; those that can be guessed all the same are refused.

    Whoever answers at the rendezvous gets a proof of the key, and can try words against it for as long as they like.
    """
    bits = int(bits_of(chosen))
    if len(chosen) < SHORTEST or bits < FEWEST_BITS:
        few = f" of at most {bits} bits" if len(chosen) >= SHORTEST else ""
        raise WrongUse(
            f"{where} has {len(chosen)} characters{few}, which can be guessed. Give all hosts of the run the same "
            f"random ones, as openssl rand -hex 32 makes them, or unset {VARIABLE}: then the key is made in the run's "
            "folder."
        )
    return hashlib.pbkdf2_hmac("sha256", chosen.encode(errors="surrogateescape"), b"phalanx key", ROUNDS)


def _kept(path: Path) -> bytes:
    """The secret in a file that only its owner can read. Hosts that begin together find one and the same."""
    try:
        if not os.path.lexists(path):
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
        text = _read(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise CannotHere(
            f"the key of the run, {path}, cannot be made or read here: {reason}. Run all hosts as its owner, or set "
            f"{VARIABLE} to the same random words on all of them."
        ) from None
    if len(text) < SHORTEST:
        raise WrongUse(f"{path} holds no key. Remove it while no host runs, to have a new one made.")
    made = re.fullmatch(r"[0-9a-f]{64}", text) and bits_of(text) >= FEWEST_BITS
    return text.encode() if made else _stretched(text, str(path))


def _read(path: Path) -> str:
    """The text of this user's own file, and of nothing else that may stand there: nothing is waited for."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_ours(path, "is a link") from None
        raise
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode):
        os.close(opened)
        raise _not_ours(path, "is no regular file")
    with os.fdopen(opened, "rb") as file:
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid():
            raise _not_ours(path, f"belongs to another user (number {found.st_uid})")
        if mode & 0o077:
            raise _not_ours(path, f"can be read by others (mode {mode:03o})")
        return file.read(LARGEST).decode().strip()


def _not_ours(path: Path, why: str) -> WrongUse:
    return WrongUse(
        f"{path} {why}. Remove it to have a new one made, or set {VARIABLE} to the same random words on all hosts if "
        "this file system keeps no owners or modes."
    )
