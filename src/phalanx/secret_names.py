"""Which names say that their value is a secret: ``db_password``, ``slack_token``; and which do not: ``max_tokens``.

A name is taken apart into words, ``HF_TOKEN``, ``hf-token`` and ``hfToken`` alike, and its last words decide.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache


class Secrecy(IntEnum):
    """How sure it is that a name means a secret."""

    NONE = 0
    MAYBE = 1
    """The name is used for other things too, as ``key`` and ``token`` are."""
    CERTAIN = 2


def words_of(text: str) -> frozenset[str]:
    """The words of a text, each once."""
    return frozenset(text.split())


LONGEST_NAME = 200
"""Letters of a name; of a longer one the last so many are read."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CERTAIN = words_of(
    "password passwords passwd passwort passphrase passcode pwd secret secrets credential credentials creds apikey "
    "apikeys accesskey secretkey privatekey accountkey authtoken accesstoken bearer authorization jwt sas cookie "
    "webhook webhooks"
)
_JOINED = re.compile(
    r"\w*(?:password|passwd|passphrase|webhook|(?:api|access|secret|private|account|auth|pass)key"
    r"|(?:api|auth|access|bot|session|refresh|security|github|gitlab|slack|user)token|[a-z]{3}secret)s?"
)
"""Words that are written as one: ``pgpassword``, ``awssecretaccesskey``."""
_MAYBE = frozenset({"token", "key", "auth", "pat", "pass", "pw", "otp"})
_SERVICES = words_of(
    "admin anthropic aws azure cohere comet database datadog db deepspeed discord docker elastic email ftp gcp gcs git "
    "github gitlab google hf http https hub huggingface imap jira kafka kaggle ldap login mail minio mistral mlflow "
    "mongo mongodb mssql mysql neptune notion npm openai openrouter ovh pg pinecone postgres postgresql proxy pypi "
    "redis replicate root s3 scaleway sentry sftp slack smtp snowflake sql ssh stripe telegram together twilio vault "
    "vpn wandb wifi"
)
"""Who asks for passwords and keys."""
_KEY_OF = _SERVICES | words_of(
    "access account api app application auth blob client crypt decryption deploy encrypt encryption functions hmac "
    "licence license master phalanx private rsa secret shared sign signing subscription tls webhook"
)
"""Before ``key``: others name a column of a table (``label_key``)."""
_TOKEN_OF = _SERVICES | words_of(
    "access api app auth bearer bot client csrf deploy id identity install job jwt my oauth personal phalanx pipeline "
    "private push read refresh sas secret security service session sts user write"
)
"""Before ``token``: these are given to people and programs."""
_TOKEN_OF_TEXT = words_of(
    "additional all any assistant audio avg bad begin begins blank bos boundary byte char character class cls concept "
    "context control cur current decoder document draft dummy each empty encoder end eoh eom eos eot every extra fim "
    "first forbidden forced header ids ignore ignored image img input instance label lang language last latent "
    "learnable mask max mean memory middle min multi n new newline next no noise null num number one output pad "
    "padding passage patch per pixel placeholder pos position prefix prev previous prompt query question register "
    "reserved response sep separator single sot sound space special speculative speech src start step stop style sub "
    "subword suffix suppress system target text tgt think thinking time tool total trigger unit unk unknown unused "
    "video vision visual word"
)
"""Before ``token``: a piece of text, ``pad_token``."""
_PASS_OF = _SERVICES | frozenset({"user", "app", "account", "my", "service"})
"""Before ``pass``: others are passes through a model (``forward_pass``)."""
_AFTER = words_of(
    "b64 backup base base64 dev for hash hex of old plain prod production raw staging str string test to value"
)
"""Behind a word that is certain these change nothing: ``SECRET_KEY_BASE``, ``password_for_db``."""
_ADDRESS = ("url", "uri", "address", "link")


@lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """Whether a field, a variable, a parameter or a header of this name has a secret."""
    words = [word.lower() for word in _WORD.findall(name[-LONGEST_NAME:])]
    while words and words[-1].isdigit():
        words.pop()
    if not words:
        return Secrecy.NONE
    if words[-1] in _ADDRESS and len(words) > 1 and words[-2] in ("webhook", "hook", "sas"):
        return Secrecy.CERTAIN
    if _certain(words):
        return Secrecy.CERTAIN
    if len(words) > 1 and words[-1] in ("keys", "tokens"):  # several of what one alone would be, for certain
        return Secrecy.CERTAIN if _of(words[-1][:-1], words[-2]) is Secrecy.CERTAIN else Secrecy.NONE
    if words[-1] not in _MAYBE:
        return Secrecy.NONE
    if words[0] == "x" and len(words) > 2 and words[-1] in ("key", "token"):  # a header
        return Secrecy.CERTAIN
    return _of(words[-1], words[-2] if len(words) > 1 else "")


def _certain(words: list[str]) -> bool:
    """Whether one of them means a secret by itself, and nothing behind it makes something else of it."""
    for at in range(len(words) - 1, -1, -1):
        if words[at] in _CERTAIN or _JOINED.fullmatch(words[at]):
            return True
        if at and words[at] == "key" and words[at - 1] in ("secret", "access", "private", "api"):
            return True
        if words[at] not in _AFTER and words[at] not in _SERVICES:
            return False
    return False


def _of(last: str, before: str) -> Secrecy:
    """A word that may mean a secret, by the one before it."""
    if not before:
        return Secrecy.MAYBE
    if last == "token":
        if before in _TOKEN_OF_TEXT:
            return Secrecy.NONE
        return Secrecy.CERTAIN if before in _TOKEN_OF else Secrecy.MAYBE
    if last == "key":
        return Secrecy.CERTAIN if before in _KEY_OF else Secrecy.NONE
    if last in ("pass", "pw"):
        return Secrecy.CERTAIN if before in _PASS_OF else Secrecy.NONE
    if last == "auth":
        return Secrecy.NONE if before in ("use", "no", "with", "without", "has", "needs", "requires") else Secrecy.MAYBE
    return Secrecy.CERTAIN if before in _SERVICES or before == "my" else Secrecy.MAYBE  # pat, otp
