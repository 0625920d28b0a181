"""Where in a text secrets stand: in URLs, behind names that say so, and in the forms that services give theirs.

Every search is linear in the text: a run of letters is looked at once, however often a name begins in it.
"""

from __future__ import annotations

import base64
import binascii
import re
import string
from collections.abc import Callable, Iterator

from phalanx.secret_names import Secrecy, secrecy, words_of

Span = tuple[int, int]

_HINT = re.compile(r"pass|pw|secret|token|key|cred|auth|bearer|pat|hook|sas|cookie|jwt|otp|sig", re.IGNORECASE)
"""One of these is in every name that is looked for."""
_NAME = re.compile(rf"(?<![\w.-])(?=[\w.-]*?(?i:{_HINT.pattern}))[\w.-]++")
_SIGNATURE = re.compile(r"[\w.-]*sig(?:nature)?", re.IGNORECASE)
"""A secret in the parameters of a URL, and nowhere else."""
_BETWEEN = re.compile(r"""(?P<quote>\\{0,7}["'])?\]?\)?[ \t]{0,20}(?P<op>=>|:=|==?|:(?!//)|,|%3[Dd])?[ \t]{0,20}""")
"""A name and its value."""
_TYPE = re.compile(
    r"[A-Za-z_][\w.]{0,60}(?:\[[^\]\n]{0,60}\])?(?: ?\| ?[A-Za-z_][\w.]{0,60}){0,4} {0,8}="
    r"""[ \t]{0,20}(?=[bBrRuUfF]{0,2}["'])"""
)
"""``str = `` in ``api_key: str = "..."``."""
_OPENING = re.compile(r"""[bBrRuUfF]{0,2}(?P<quote>\"{3}|'{3}|\\{0,7}["'])""")
_BODY = {'"': re.compile(r'(?:[^"\\\n]|\\.)*+'), "'": re.compile(r"(?:[^'\\\n]|\\.)*+")}
_WORD, _PARAMETER = re.compile(r"""[^\s'"&;]+"""), re.compile(r"""(?:(?!%26)[^&;#\s'"<>])+""")
_LINE = re.compile(r"[^\r\n]+")
LOOKED_AT = 128
"""So many of a value's letters say whether it is a secret; all of it is one then."""
_BEFORE_OPTIONS = ("", *" \t\n'\"([,`=")
_TRAILING = ",.:)]}>\\`"
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
"""What follows these goes on to the end of the line."""
_SCHEME = re.compile(
    r"(Basic|Bearer|Digest|Token|Negotiate|ApiKey|Key|AWS4-HMAC-SHA256|SharedKey)[ =]{1,4}", re.IGNORECASE
)
_CODE = re.compile(r"[A-Za-z_][\w.]{0,60}[(\[]|(?:self|cls|os|args|cfg|config|settings|options|env|task)\.|lambda\b")
"""How an expression begins that is no value."""
_PLACEHOLDER = re.compile(
    r"[.*…xX_<>\s-]+|\$[A-Z_][A-Z0-9_]*|[$%]?\{[^}]*\}|\$[({].*|%\(?\w*\)?s|<[^<>]*>|\[[A-Z0-9_]+\]|\{\{.*\}\}"
    r"|(?:YOUR|MY|THE)_[A-Z_]+|NAME|VALUE|PASSWORD|TOKEN|SECRET|KEY",
    re.DOTALL,
)
"""Stands where a secret would."""
_NO_SECRETS = words_of(
    "none null nil true false yes no on off str string int float bool bytes object any optional required optional[str] "
    "secretstr text default"
)
_WAYS = words_of(
    "auto basic bearer digest kerberos ntlm oauth oauth2 anonymous negotiate token env environment iam sso"
)
"""Of proving who one is: what a field named ``auth`` may also have."""
_PROSE = words_of(
    "a again an and are as at be before by can cannot could does for from given has have here if in incorrect into "
    "invalid is it may missing must needs not of on or same see should than that the then there they this to too unset "
    "until use used was were when where which while will with without would you your"
)
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{10,}|github_pat_\w{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|npm_[A-Za-z0-9]{20,}|[sr]k_(?:live|test)_\w{10,}|dapi[0-9a-f]{32}|r8_[A-Za-z0-9]{20,}"
    r"|gsk_[A-Za-z0-9]{20,}|do[opr]_v1_[0-9a-f]{40,}|glsa_\w{20,}|dckr_pat_[\w-]{16,}|shp(?:at|ss|ca)_[0-9a-f]{20,}"
    r"|AGE-SECRET-KEY-1[0-9A-Z]{20,}|(?:bot)?\d{8,10}:AA[\w-]{30,}|lin_api_\w{20,}|ATATT3[\w=-]{20,}|tfp_[\w-]{20,}|EAA[A-Za-z0-9]{20,})"
    r"|(?<![\w-])(?:sk-(?=[A-Za-z_-]{0,64}\d)[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|glpat-[\w-]{16,}"
    r"|pypi-[\w-]{16,}|nvapi-[\w-]{16,}|tvly-[\w-]{16,}|pplx-\w{16,}|ya29\.[\w-]{16,}|hv[sb]\.[\w-]{16,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|eyJ[\w-]{8,512}+\.[\w-]{8,}(?:\.[\w-]*)?)"
    r"|(?<=hooks\.slack\.com/)\w+/[\w/]{8,}|(?<=/api/webhooks/)\d{5,}/[\w-]{8,}|(?<=webhook\.office\.com/)[\w@/-]{8,}"
)
"""What some services' keys look like."""
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_SCHEMED = re.compile(r"(?<!\w)(Bearer|bearer|Basic|basic)[ +]([\w.~+/=-]++)")
_USER = re.compile(r"""(?<!\S)['"]?(?:-u|--user|--proxy-user)(?:[ =]['"]?|['"],? ['"])[^\s:'"]{1,64}:([^\s'"]+)""")
"""Of curl's command line."""
_TAG = re.compile(r"<([\w:.-]{1,80})>([^<>]{1,4096})</\1>")
"""Of XML."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*")
"""Of the environment: a name in place of its value."""
_IN_A_CLUSTER = re.compile(r"\bkubernetes:[^\s'\"]*,\Z")
"""``--on kubernetes:...,secret=NAME``, which names one."""
_SIGNED = re.compile(r"x-(?:amz|goog)-signature", re.IGNORECASE)


def secrets_in(text: str, source: bool = False) -> list[Span]:
    """Where secrets stand in a text, in order. ``source``: Python code, of which names and calls must stay."""
    found = list(_in_urls(text)) if "://" in text else []
    if _HINT.search(text):
        found += _named(text, source)
        found += _of_schemes(text)
        found += (tag.span(2) for tag in _TAG.finditer(text) if secrecy(tag[1]) and not _is_placeholder(tag[2]))
    found += ((m.start(), m.end()) for m in _FORMS.finditer(text))
    if "-----BEGIN " in text:
        found += _private_keys(text)
    if ":" in text:
        found += (m.span(1) for m in _USER.finditer(text))
    return _merged(found)


def _merged(found: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(found):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif start < end:
            merged.append((start, end))
    return merged


# URLs


class _Next:
    """Where the next of some characters stands, asked for places that only grow: all of it costs one pass."""

    def __init__(self, text: str, characters: str) -> None:
        self._text, self._pattern, self._at = text, re.compile(characters), -1

    def at(self, start: int) -> int:
        if self._at < start:
            found = self._pattern.search(self._text, start)
            self._at = found.start() if found else len(self._text)
        return self._at


_OF_SCHEME = string.ascii_letters + string.digits + "_+.:-"
_AUTHORITY = re.compile(r"[^\s/?#@:]*+")
_PORT = re.compile(r"\d{1,5}(?![^/?#\s'\",;)\]}])")


def _in_urls(text: str) -> Iterator[Span]:
    """``://user:password@``, up to the last ``@`` before the path; a port is no password."""
    space, at, authority, quotes = (_Next(text, each) for each in (r"\s", "@", r"[\s/?#]", "[\"'`]"))
    for scheme in re.finditer(r"(?<=\w)://", text):
        user = _AUTHORITY.match(text, scheme.end())
        assert user is not None
        begins = user.end()
        after = text[begins : begins + 1]
        if after == "@" and user.end() > user.start() and text.endswith(("http", "https"), 0, scheme.start()):
            yield user.span()
        if after != ":":
            continue
        is_address = text[scheme.end()] == "["  # of IPv6
        begins += 1
        end = space.at(begins)
        if _is_quoted(text, scheme.start()):
            end = min(end, quotes.at(begins))
        last = text.rfind("@", begins, min(end, authority.at(begins)))
        if last < 0 and not is_address and not _PORT.match(text, begins):  # it has a slash, or the like
            last = at.at(begins)
        if begins <= last < end:
            yield begins, last


def _is_quoted(text: str, scheme: int) -> bool:
    """Whether a quote stands before a URL."""
    before = text[max(0, scheme - 64) : scheme].rstrip(_OF_SCHEME)
    return before[-1:] in ("'", '"', "`")


# Names


def _named(text: str, source: bool) -> Iterator[Span]:
    """What follows names that say that it is a secret."""
    done = 0
    for name in _NAME.finditer(text):
        if name.start() < done:  # a part of what was found before
            continue
        known = secrecy(name[0])
        if name[0] == "secret" and _IN_A_CLUSTER.search(text, max(0, name.start() - 300), name.start()):
            continue
        parameter = text[name.start() - 1 : name.start()] in ("?", "&", ";", "#") if name.start() else False
        if (parameter and (known or _SIGNATURE.fullmatch(name[0]))) or _SIGNED.fullmatch(name[0]):
            known = Secrecy.CERTAIN
        if known is Secrecy.NONE:
            continue
        between = _BETWEEN.match(text, name.end())
        assert between is not None
        span = _value(text, name, known, between, parameter, source)
        if span is not None:
            done = span[1]
            yield span


def _value(
    text: str, name: re.Match[str], known: Secrecy, between: re.Match[str], parameter: bool, source: bool
) -> Span | None:
    """The value of a name, if it is a secret."""
    op, begins = between["op"] or "", between.end()
    flag = name[0].startswith("-") and text[name.start() - 1 : name.start()] in _BEFORE_OPTIONS
    if name[0].endswith("PWD") and text.startswith("/", begins):  # a shell's folder
        return None
    if op == ":" and not between["quote"] and (typed := _TYPE.match(text, begins)):
        op, begins = "=", typed.end()
    opening = _OPENING.match(text, begins)
    if opening is not None:
        op = "=" if source and op == ":" else op
        return _quoted(text, name, known, op, opening, flag and bool(between["quote"] or not op))
    if (parameter and op == "=") or op.startswith("%"):
        return _if(text, _PARAMETER, begins, lambda value: not _is_placeholder(value))
    if name[0].lower() in _HEADERS and op in (":", "="):
        return _header(text, begins, name[0], lambda: _end_of_line(text, name.start(), begins))
    if source and (between["quote"] or not _in_text(text, name.start())):
        return None
    if flag and op in ("=", ""):
        return _if(text, _WORD, begins, _of_option(name[0], known)) if begins > name.end() else None
    if op == "=":
        spaced = between.end() - name.end() > 1 + len(between["quote"] or "")
        return _if(text, _WORD, begins, lambda value: _is_given(value, name[0], known, spaced))
    if op == ":":
        return _told(text, name[0], begins, known)
    if not op and known is Secrecy.CERTAIN and begins == name.end() + 1:  # password hunter2
        return _if(text, _WORD, begins, lambda value: is_mixed(value) and value.isalnum())
    return None


def _quoted(
    text: str, name: re.Match[str], known: Secrecy, op: str, opening: re.Match[str], of_flag: bool
) -> Span | None:
    """A value in quotes, without them."""
    quote, begins = opening["quote"], opening.end()
    if quote in _BODY:
        body = _BODY[quote].match(text, begins)
        assert body is not None
        end = body.end()
    else:
        end = text.find(quote, begins)
        end = len(text) if end < 0 else end
    value = text[begins:end]
    if "f" in opening[0].lower() and "{" in value:
        return None
    if name[0].lower() in _HEADERS:
        return _header(text, begins, name[0], lambda: end)
    if _is_placeholder(value) or len(value) < 3 or value == name[0] or (_VARIABLE.fullmatch(value) and secrecy(value)):
        return None
    if of_flag:
        return begins, end
    if op in ("=", ":", ":=", "=>") and known is Secrecy.CERTAIN:
        return begins, end
    if op == "=" and len(value) >= 6 and value.lower() not in _WAYS and not re.search(r"[\s*]|^[A-Z]+_[A-Z_]*$", value):
        is_key = name[0].lower().endswith("key")
        return (begins, end) if is_random(value) or not is_key else None
    return (begins, end) if op and is_mixed(value) and (known is Secrecy.CERTAIN or is_random(value)) else None


def _header(text: str, begins: int, name: str, end: Callable[[], int]) -> Span | None:
    """What a request's head says of who asks, but for the scheme's name. ``end``: finds where its value ends."""
    scheme = _SCHEME.match(text, begins)
    begins = scheme.end() if scheme else begins
    word = _WORD.match(text, begins, begins + LOOKED_AT)
    if word is None or _is_placeholder(word[0]):
        return None
    secret = scheme or is_mixed(word[0]) or ("cookie" in name.lower() and "=" in word[0])
    return (begins, end()) if secret else None


def _end_of_line(text: str, name: int, begins: int) -> int:
    """Where the value of a header ends: at the quote that its name stands behind, or with its line."""
    quote = text[name - 1 : name]
    line = _LINE.match(text, begins)
    end = line.end() if line else begins
    closed = text.find(quote, begins, end) if quote in ("'", '"') else -1
    return closed if closed >= 0 else end


def _told(text: str, name: str, begins: int, known: Secrecy) -> Span | None:
    """``password: hunter2``, and not what a sentence says of one."""

    def secret(value: str) -> bool:
        if value.lower() in _PROSE or value.startswith(("/", "~", "./")):
            return False
        if known is Secrecy.MAYBE or is_mixed(value):
            return known is not Secrecy.MAYBE or is_random(value)
        behind = text[begins + len(value) : begins + len(value) + 1]  # a sentence goes on
        return behind in ("", *"\r\n'\";&,)}") and _is_given(value, name, known)

    return _if(text, _WORD, begins, secret)


def _if(text: str, pattern: re.Pattern[str], begins: int, secret: Callable[[str], bool]) -> Span | None:
    """A word, without what stands behind it in a sentence, if it is a secret."""
    word = pattern.match(text, begins, begins + LOOKED_AT)
    value = word[0].rstrip(_TRAILING) if word else ""
    if not value or _CODE.match(text, begins) or not secret(value):
        return None
    if _is_placeholder(value) or (word and _is_placeholder(word[0])):
        return None
    whole = pattern.match(text, begins)
    assert whole is not None
    return begins, begins + len(whole[0].rstrip(_TRAILING))


def _is_given(value: str, name: str, known: Secrecy, spaced: bool = False) -> bool:
    """``name=value`` in a text: a value, and no other name. ``spaced``: as code has it, ``name = value``."""
    if value[0] in "([{<":
        return False
    if known is Secrecy.MAYBE:
        return is_random(value) or (is_mixed(value) and "." not in value and not name.lower().endswith("key"))
    return is_mixed(value) if spaced else not (secrecy(value) and value.isidentifier() and not is_mixed(value))


def _of_option(name: str, known: Secrecy) -> Callable[[str], bool]:
    """Behind an option: a value, and neither another option nor a sentence; of ``--key`` no column's name."""

    def secret(value: str) -> bool:
        if known is Secrecy.MAYBE and name.endswith("key"):
            return is_mixed(value)
        return not value.startswith("-") and len(value) >= 3 and value.lower() not in _PROSE

    return secret


def _is_placeholder(value: str) -> bool:
    return value.lower() in _NO_SECRETS or _PLACEHOLDER.fullmatch(value[:LOOKED_AT]) is not None


def _in_text(text: str, at: int) -> bool:
    """Whether a place in Python code is inside a string or a comment, as its line tells."""
    begins = max(text.rfind("\n", max(0, at - 500), at) + 1, at - 500, 0)
    line = text[begins:at]
    return "#" in line or line.count('"') % 2 == 1 or line.count("'") % 2 == 1 or line.endswith("export ")


# Values

_MIXED = re.compile(r"(?![/~]|\./)(?=\S*+\Z)(?=[^A-Za-z]*[A-Za-z])[^0-9]*[0-9]")
_NUMBER = re.compile(r"\d[\d.,_]*[a-zA-Z%/]{0,4}")


def is_mixed(value: str) -> bool:
    """Letters and digits, as no word has them."""
    return len(value) >= 6 and _MIXED.match(value) is not None and _NUMBER.fullmatch(value) is None


def is_random(value: str) -> bool:
    """As a generator makes them: a long piece of letters and digits, or several."""
    if not re.fullmatch(r"[A-Za-z0-9_+/=~-]{16,}", value[:LOOKED_AT]):
        return False
    longest = max(re.split(r"[_+/=~-]", value), key=len)
    return len(longest) >= 8 and is_mixed(value) and len(set(value)) >= 8


def _of_schemes(text: str) -> Iterator[Span]:
    """``Bearer ...`` and ``Basic ...`` by themselves."""
    for found in _SCHEMED.finditer(text):
        value = found[2]
        if found[1].lower() == "basic":
            secret = _is_basic(value)
        elif found[1] == "Bearer":
            secret = len(value) >= 4 and secrecy(value) is Secrecy.NONE and value.lower() not in _PROSE
            secret = secret and not value.lower().startswith(("auth", "token"))
        else:
            secret = is_random(value) or is_mixed(value)
        if secret and not _is_placeholder(value):
            yield found.span(2)


def _is_basic(value: str) -> bool:
    """Whether it is a name and a password in base64."""
    try:
        return ":" in base64.b64decode(value + "=" * (-len(value) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return False


def _private_keys(text: str) -> Iterator[Span]:
    done = 0
    for begin in _PEM.finditer(text):
        if begin.start() >= done:
            end = text.find("-----END ", begin.end())
            done = len(text) if end < 0 else end
            yield begin.end(), done
