"""Names of secrets, and the many names that only look like them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout import Layout
from phalanx.references import RECIPES, find_task
from phalanx.secret_names import Secrecy, secrecy, words_of
from phalanx.train.options import Options

CERTAIN = words_of(
    """
    password passwd passphrase pwd db_password PGPASSWORD mysqlPassword password2 password_for_db sudo_password secret
    secrets client_secret clientSecret SECRET_KEY_BASE aws_secret_access_key SecretAccessKey secret_value api_key
    api_keys apiKey apikey x-api-key WANDB_API_KEY OPENAI_API_KEY access_key account_key AccountKey
    storage_account_key encryption_key private_key ssh_key shared_access_key PHALANX_KEY github_token slack_token
    my_token sas_token HF_TOKEN hf-token hfToken auth_token authToken access_token access_tokens refresh_token
    bearer_token AWS_SESSION_TOKEN X-Amz-Security-Token id_token bot_token gitlab_token db_pass smtp_pass user_pass
    root_pw bearer Authorization proxy-authorization credentials credential creds X-Amz-Credential webhook
    slack_webhook SLACK_WEBHOOK_URL hook_url sas azure_sas sas_url github_pat GITHUB_PAT jwt cookie
    """
)
MAYBE = words_of(
    """
    token key auth basic_auth pat pass pw otp token2 domain_token
    """
)
NONE = words_of(
    """
    tokens max_tokens n_tokens num_tokens tokens_per_second batch_tokens token_budget tokenizer tokenizer_path
    tokenize token_count token_type_ids token_id pad_token pad_token_id eos_token bos_token unk_token sep_token
    cls_token mask_token image_token audio_token next_token last_token new_token text_token stop_token special_token
    prefix_token lang_token key_dim num_keys keys key_value_heads num_key_value_heads key_padding_mask keyboard
    keypoints key_name key_file key_length label_key text_key sort_key primary_key foreign_key public_key session_key
    item_key monkey hockey turkey hotkey jockey pattern patterns patience patch patches patch_size path paths
    data_path pathway patent author authors authority authored auth_url auth_type use_auth no_auth pass_rate passage
    passages passing passes forward_pass backward_pass first_pass low_pass bypass compass passenger secretary
    secretion secretariat bearing forebearance credentialed password_length password_file password_model secret_name
    secret_ref token_path token_file cookiecutter basket sassy signature signature_columns design assign sigma sign
    signal api width learning_rate seed salt nonce hash id session_id
    """
)


def test_names_of_secrets() -> None:
    assert {name: secrecy(name) for name in CERTAIN} == dict.fromkeys(CERTAIN, Secrecy.CERTAIN)
    assert {name: secrecy(name) for name in MAYBE} == dict.fromkeys(MAYBE, Secrecy.MAYBE)


def test_names_that_only_look_like_them() -> None:
    assert {name: secrecy(name) for name in NONE} == dict.fromkeys(NONE, Secrecy.NONE)


def test_no_setting_of_ours_is_one() -> None:
    kinds = [*map(find_task, RECIPES), Layout, Options]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert len(names) > 100
    assert not {name for name in names if secrecy(name)}


@pytest.mark.parametrize(
    "style", [str.upper, str.title, lambda name: name.replace("_", "-"), lambda name: f"my_{name}"]
)
def test_how_a_name_is_written_does_not_matter(style: object) -> None:
    assert callable(style)
    for name in ("db_password", "github_token", "account_key", "client_secret"):
        assert secrecy(style(name)) is Secrecy.CERTAIN, style(name)
    for name in ("max_tokens", "key_dim", "num_keys", "pad_token", "data_path"):
        assert secrecy(style(name)) is Secrecy.NONE, style(name)


@given(
    st.sampled_from(["count", "budget", "dim", "length", "ids", "size", "rate", "heads", "per_second", "file", "name"])
)
def test_what_is_counted_or_named_is_none(end: str) -> None:
    for word in ("token", "key", "password", "secret", "auth", "pass", "pat"):
        assert secrecy(f"{word}_{end}") is Secrecy.NONE
        assert secrecy(f"{word}{end.title()}") is Secrecy.NONE


@given(st.text())
def test_any_name_has_an_answer(name: str) -> None:
    assert secrecy(name) in Secrecy
    assert secrecy(f"{name}_password") is Secrecy.CERTAIN


def test_a_name_of_any_length() -> None:
    assert secrecy("a" * 1_000_000 + "_password") is Secrecy.CERTAIN
    assert secrecy("token" * 200_000) is Secrecy.NONE
