"""Secrets do not reach what is kept and shown; versions and names that a verdict needs do."""

from __future__ import annotations

import base64
import json
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pytest_trlcompat._secrets import REDACTED, redacted, redacted_values
from pytest_trlcompat.stack import PACKAGES
from tests.hostile import PIECES

NONE: dict[str, str] = {}
SECRET = "q7Zp-11kd_Xw"

NAMES = (
    *(
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "GITHUB_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
    ),
    *("OPENAI_APIKEY", "PGPASSWORD", "MYSQL_PWD", "SMTP_PASS", "GH_PAT", "COMET_API_KEY", "MY_CREDENTIALS", "hf_token"),
    *("NPM_AUTH", "SESSION_COOKIE", "CI_JOB_TOKEN", "SECRETS", "GPG_PASSPHRASE", "UV_INDEX_X_PASSWORD"),
)
OTHERS = (
    *(
        "PATH",
        "PWD",
        "OLDPWD",
        "HOME",
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "MONKEY",
        "HF_TOKEN_PATH",
        "SSH_AUTH_SOCK",
    ),
    *("GOOGLE_KEY_FILE", "MASTER_PORT", "AUTHOR", "PATTERN", "COMPASS", "TOKEN_COUNT", "HF_HOME"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_is_secret_where_the_name_of_its_variable_says_so(name: str) -> None:
    assert redacted(f"401: {SECRET} is expired", {name: SECRET}) == f"401: {REDACTED} is expired"


@pytest.mark.parametrize("name", OTHERS)
def test_a_value_of_another_variable_stays(name: str) -> None:
    assert redacted(f"401: {SECRET} is expired", {name: SECRET}) == f"401: {SECRET} is expired"


NEEDED = (
    *PACKAGES,
    *("1.16.0", "2.13.0+cpu", "1.16.0.dev0", "2026.11.24", "0.12345678", "12345678", "1e-8", "3.0000e+10"),
    *("short", "sevench", "transformers", "accelerate", "grpo-evaluate", "ValueError", "GRPOTrainer", "loss_function"),
    *("per device", "CUDA", "true", "undefined"),
)


@pytest.mark.parametrize("value", NEEDED)
def test_a_version_a_number_a_short_value_and_a_word_stay(value: str) -> None:
    text = f"ImportError: {value} is not what trl {value} needs"
    assert redacted(text, {"MY_SECRET": value, "HF_TOKEN": value}) == text


def test_a_path_stays_and_what_only_looks_like_one_does_not(tmp_path: Path) -> None:
    for value, shown in ((str(tmp_path / "key1"), str(tmp_path / "key1")), ("/nosuch4/key1", REDACTED)):
        assert redacted(f"cannot read {value}", {"MY_KEY": value}) == f"cannot read {shown}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:pw@host/simple", "https://[redacted]@host/simple"),
        ("https://ghp@github.com/x.git", "https://[redacted]@github.com/x.git"),
        ("postgres://a:b@c@host/db", "postgres://[redacted]@host/db"),
        ("git+ssh://git@github.com/a/b", "git+ssh://git@github.com/a/b"),
        ("https://host/a@b?c=d", "https://host/a@b?c=d"),
        ("get https://h/f?rev=main&token=abc&x=1", "get https://h/f?rev=main&token=[redacted]&x=1"),
        ("https://h/f?X-Amz-Signature=0a&Expires=3", "https://h/f?X-Amz-Signature=[redacted]&Expires=3"),
        ("https://h/#access_token=abc", "https://h/#access_token=[redacted]"),
        ("{'Authorization': 'Bearer abc.def', 'a': 1}", "{'Authorization': '[redacted]', 'a': 1}"),
        ("authorization: Basic dTpw next", "authorization: [redacted] next"),
        ("env HF_TOKEN=abc4defg pytest", "env HF_TOKEN=[redacted] pytest"),
        ("WANDB_API_KEY='abc4defg'", "WANDB_API_KEY='[redacted]'"),
        (f"no {'hf_' + 34 * 'a'}.", "no [redacted]."),
        (f"no {'ghp_' + 36 * 'b'}.", "no [redacted]."),
        ("AKIA" + 16 * "Q", "[redacted]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nrest", "[redacted]\nrest"),
        ("-----BEGIN PRIVATE KEY-----\nabc", "[redacted]"),
        ("PAD_TOKEN=tokenizer", "PAD_TOKEN=tokenizer"),
    ],
)
def test_a_secret_is_known_by_its_place_and_its_form(text: str, shown: str) -> None:
    assert redacted(text, NONE) == shown


def test_a_password_of_a_url_in_the_environment_is_secret_anywhere() -> None:
    environ = {"PIP_INDEX_URL": f"https://user:{urllib.parse.quote('p@ss/w0rd!', safe='')}@host/simple"}
    assert redacted("login with p@ss/w0rd! failed", environ) == f"login with {REDACTED} failed"
    assert redacted("login with p%40ss%2Fw0rd%21 failed", {**environ, "X_KEY": "p@ss/w0rd!"}).count(REDACTED) == 1


def test_the_spellings_and_the_lines_of_a_secret() -> None:
    secret = 'a"b\\c 9é/'
    for spelling in (secret, urllib.parse.quote(secret, safe=""), json.dumps(secret), repr(secret)):
        assert REDACTED in redacted(f"x {spelling} y", {"A_KEY": secret}), spelling
    key = f"-----BEGIN KEY-----\n{base64.b64encode(bytes(range(48))).decode()}\n-----END KEY-----\n"
    indented = "\n".join(f"    {line}" for line in key.split("\n")[1:2])
    assert redacted(indented, {"SSH_PRIVATE_KEY": key}) == f"    {REDACTED}"


def test_of_two_secrets_the_longer_one_goes_first() -> None:
    assert redacted("abcd1234efgh", {"A_KEY": "abcd1234", "B_KEY": "abcd1234efgh"}) == REDACTED


def test_values_keep_their_types_and_what_is_excepted() -> None:
    document = {"blocked_by": SECRET, "a": [SECRET, 1, 0.5, None, True, {SECRET: f"x{SECRET}"}], "b": (SECRET,)}
    assert redacted_values(document, {"HF_TOKEN": SECRET}, keep=("blocked_by",)) == {
        "blocked_by": SECRET,
        "a": [REDACTED, 1, 0.5, None, True, {REDACTED: f"x{REDACTED}"}],
        "b": [REDACTED],
    }


def test_the_environment_of_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redacted(SECRET) == SECRET
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert (redacted(SECRET), redacted_values([SECRET])) == (REDACTED, [REDACTED])
    monkeypatch.delenv("HF_TOKEN")
    assert redacted(SECRET) == SECRET


secrets = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30)
places = st.sampled_from([*PIECES, "https://", "?token=", "A_KEY=", "@"])
pieces = st.lists(st.one_of(places, st.text(max_size=5))).map("".join)


@pytest.mark.fuzz
@given(secrets, secrets, pieces, pieces)
@example("abcdefg1", "bcdefg12", "", "2")
def test_no_secret_is_left_and_doing_it_again_changes_nothing(one: str, other: str, before: str, after: str) -> None:
    environ = {"ONE_TOKEN": f"{one}7#aZ$k9x", "OTHER_KEY": f"9x{other}-Qq7&1", "PLAIN": "word"}
    assume(not any(REDACTED in value or value in REDACTED for value in environ.values()))
    shown = redacted(f"{before}{environ['ONE_TOKEN']}{after}{environ['OTHER_KEY']}{before}", environ)
    assert not [name for name in ("ONE_TOKEN", "OTHER_KEY") if environ[name] in shown]
    assert redacted(shown, environ) == shown


@pytest.mark.fuzz
@given(pieces)
def test_without_secrets_and_addresses_text_stays_as_it_is(text: str) -> None:
    assume(not any(mark in text for mark in ("://", "=", "uthorization")))
    assert redacted(text, {"HF_TOKEN": "short", "PATH": text}) == text


BEGINNINGS = ("://", "?token=", "A_KEY=", "://a@", "Authorization: ", "-----BEGIN PRIVATE KEY-----", "A_", "eyJ", "sk-")


@pytest.mark.parametrize("piece", BEGINNINGS)
def test_redacting_takes_time_in_proportion_to_the_text(piece: str) -> None:
    """A megabyte of what begins like a secret, again and again: in a quadratic time it would take hours."""
    assert redacted(piece * (1_000_000 // len(piece)), NONE) is not None
