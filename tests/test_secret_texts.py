"""Secrets in texts are found in whatever words they stand, ordinary texts stay, and a long one takes no longer."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.redact import redact, redact_source
from phalanx.secret_names import secrecy
from phalanx.secret_texts import is_mixed, is_random, secrets_in

HAVE_ONE = r"""
Authorization: Basic dXNlcjpodW50ZXIyMg==
authorization: Bearer hunter22abc
authorization: AWS4-HMAC-SHA256 Credential=AKIDHUNTER22/2025/s3, Signature=hunter22
Proxy-Authorization: Basic bWU6aHVudGVyMjI=
x-api-key: hunter22
X-Auth-Token: hunter22
x-goog-api-key: hunter22
b'x-api-key: hunter22\r\n'
Cookie: session=hunter22; other=1
Set-Cookie: sid=hunter22; Path=/
login --token hunter22 --user me
login --api-key swordfish_hunter22
--password=hunter22
Command '['login', '--token', 'hunter22']' returned non-zero exit status 1
curl -H 'Authorization: Token hunter22' https://x
curl -u me:hunter22 https://host
password=hunter22
ValueError: cannot log in with token=hunter22
password = "hunter22"
password="correct horse hunter22 staple"
{"password": "hunter22", "a": 1}
{"password": "hun\"hunter22"}
{\"password\": \"hunter22\"}
{'api_key': 'hunter22'}
{"auth": {"password": "hunter22"}}
headers={'Authorization': 'Bearer hunter22'}
headers=[('x-api-key', 'hunter22')]
Config(password='hunter22', tokens=5)
<Secret password='hunter22'>
config["secret_key"] = "hunter22"
os.environ.setdefault("DB_PASSWORD", "hunter22")
api_key: str = "hunter22"
api_key: str | None = 'hunter22'
host=db user=me password=hunter22 dbname=x
Server=x;User=me;Password=hunter22;Database=y
Driver=x;UID=me;PWD=hunter22
DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter22/AAA==;EndpointSuffix=x
password: hunter22
  api_key: hunter22
mysql: Access denied for user 'a' (using password: hunter22)
HF_TOKEN=hunter22 python x.py
export AWS_SECRET_ACCESS_KEY=hunter22
PGPASSWORD=hunter22 psql
?access_token=hunter22&x=1
https://host/x?a=1&sig=hunter22
postgres://me:hunter22@db/x
redis://:hunter22@host:6379/0
"sftp://me:hunter22@host/x","next":"a@b"
fatal: Authentication failed for 'https://me:hunter22@github.com/x.git'
https://hunter22@host/x
https://hooks.slack.com/services/T000/B000/hunter22xxxx
https://discord.com/api/webhooks/123456/hunter22-abc
ghp_abcdefhunter220123456789
github_pat_11ABC_hunter22hunter22
glpat-hunter22hunter22xx
sk-ant-api03-hunter22hunter22
sk-proj-hunter22hunter22
xoxb-123-hunter22
hf_abcdefhunter22abcdef
eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJodW50ZXIyMiJ9.hunter22hunter22
AKIAHUNTER22HUNTER22
-----BEGIN RSA PRIVATE KEY-----\nMIIhunter22\n-----END RSA PRIVATE KEY-----
""".strip().split("\n")
HAVE_NONE = r"""
tokens = batch["tokens"]
token_count = 3
key = "width"
max_tokens=128, n_tokens=5 token_budget=4096 tokenizer=gpt2-large-2024 num_key_value_heads=8, key_dim=64
author=Smith42x path=/home/me1 pattern=*.jpg patience=5 patch=16 passes=3 bypass=0
Give it again: --set password=...
password is a secret, which no run.toml holds. Give it again: --set password=...
kubectl create secret generic NAME --from-literal=PHALANX_KEY=$(openssl rand -hex 32)
token=${TOKEN} password={password} api_key=%s token=<your token>
KeyError: 'token'
KeyError: key=blocks.0.attention.weight
unexpected token: got 'x'
token: 5
Missing key(s) in state_dict: "a.weight"
sorted(rows, key=len)
key, value = line.split("=")
def login(password: str, token: str | None = None, *, auth: Auth) -> None:
login(password=self.password, token=get_token(), api_key=os.environ["X"])
login(password=password, secret=client_secret)
auth=None use_auth=True
bearer of bad news
Basic authentication failed
https://host/x?tokenizer=gpt2&author=me&monkey=1&page_token_count=3
http://host:8080/a@b tcp://[::1]:29400/a@b tcp://127.0.0.1:29400 and you@example.org
{"a":"http://host:8080/x","b":"me@x"}
--token must be 8 to 200 letters, digits
Give a --token that they must know, or leave --host out
--token, or PHALANX_TOKEN, is empty.
password: must be at least 8 characters
secret: the value of the field
1234 tokens/s  loss 1.0 *** at step 3
PWD=/home/me OLDPWD=/root
eos_token="<|endoftext|>" pad_token='[PAD]' token="image"
key: float32 [8, 4], query: float32 [8, 4]
"key": "value"
{"token": "Hello", "logprob": -1.0}
set PHALANX_KEY to the same random words on all of them
the key of the run, /x/key, cannot be made or read here
sk-learn and disk-io are packages
weights 693e907339683158 of step-00000004
""".strip().split("\n")


@pytest.mark.parametrize("text", HAVE_ONE)
def test_a_secret_is_found(text: str) -> None:
    for around in (text, f"OSError: {text}", f"before\n{text}\nafter"):
        hidden = redact(around)
        assert "hunter22" not in hidden.lower()
        assert "aHVudGVyMjI" not in hidden
        assert "dXNlcjpod" not in hidden
        assert redact(hidden) == hidden, "what is hidden stays as it is"


@pytest.mark.parametrize("text", HAVE_NONE)
def test_an_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text
    assert redact_source(text) == text


@pytest.mark.parametrize(
    "code",
    [
        "login(password=pw1, token=t2)", "API_KEY=key2", 'x = {"password": pw1}', "password = value1",
        "pat = p1 if p2 else 3",
        'auth = ("basic", 1)', "def f(password: Secret1): ...",
    ],
)  # fmt: skip
def test_code_still_runs_without_its_secrets(code: str) -> None:
    assert redact_source(code) == code


@pytest.mark.parametrize(
    "code", ["dsn = 'host=x password=hunter22'", "# login --token hunter22", 'f"sftp://me:hunter22@{host}"']
)
def test_strings_and_comments_in_code_are_looked_into(code: str) -> None:
    assert "hunter22" not in redact_source(code)


NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12).filter(lambda name: not secrecy(name))
VALUES = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1, max_size=12)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), st.sampled_from(["=", ": ", "="]))
def test_settings_that_are_no_secrets_stay(settings: list[tuple[str, str]], sign: str) -> None:
    text = ", ".join(f"{name}{sign}{value}" for name, value in settings)
    assert redact(text) == text


@given(st.text(), st.sampled_from(["password", "github_token", "api_key"]), st.text(min_size=3))
def test_a_quoted_value_of_a_sure_name_never_stays(before: str, name: str, value: str) -> None:
    secret = "".join(letter for letter in value if letter.isalnum()) + "x7secret"
    assert secret not in redact(f"{before} {name}='{secret}'")


@given(st.text())
def test_any_text_has_an_answer(text: str) -> None:
    spans = secrets_in(text)
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


PIECES = [
    "token", "token=", "token: ", "token '", "password='", 'password="\\', "password=(", "password: str|",
    "password:x,", "a://b:c/", "a://", "a://b:c", "::://:", "http://", "x@", "sk-", "eyJ-", "eyJaaaaaaaa.", "Bearer ",
    "Basic ", "key: ",
    "-----BEGIN PRIVATE KEY-----", "?sig=", "-u a:", "--token ", "Authorization: ", "a.token[", "%token", "SG.", "hf_",
    "key\\\"", "secret_" , "github_pat_", "hooks.slack.com/", "'token': ",
]  # fmt: skip


def seconds(text: str) -> float:
    """The least that a few tries took of this process's own time, which a busy machine does not lengthen."""
    found = []
    for _ in range(4):
        began = time.process_time()
        redact(text)
        found.append(time.process_time() - began)
    return min(found)


@pytest.mark.parametrize("piece", PIECES)
def test_twice_as_much_text_takes_twice_as_long(piece: str) -> None:
    grown = 16
    few, many = seconds(piece * 400), seconds(piece * 400 * grown)
    assert many < 4 * grown * few + 1e-3, f"{grown} times the text took {many / few:.0f} times as long"


def test_a_line_of_a_million_letters() -> None:
    assert redact("token" * 200_000) == "token" * 200_000
    assert redact("password=" + "a1" * 500_000 + " end") == "password=*** end"


def test_values() -> None:
    assert all(map(is_mixed, ["hunter22", "a1b2c3d4", "P4ssword!"]))
    assert not any(map(is_mixed, ["hunter", "123456", "100MiB", "1e-4", "/tmp/a1b2", "a1 b2 c3"]))
    assert is_random("dGhpcyBpcyBhIGtleQ1")
    assert not any(map(is_random, ["hunter22", "blocks.0.attention.weight", "gpt2-large-v2-base"]))
