"""Tokens and origins as settings: in one form each, or refused; and kept out of what is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsbatch.auth import clean_origin, without_secrets
from wsbatch.config import ServerConfig
from wsbatch.pool.open import _by_name


def test_a_token_is_stripped_and_never_shown() -> None:
    config = ServerConfig(auth_token=" s3cret\r\n")
    assert config.auth_token == "s3cret"
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize("token", ["", " \n", "s3\ncret", "s3\x1bcret"])
def test_what_is_no_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ValueError, match=r"^ServerConfig\.auth_token ") as refused:
        ServerConfig(auth_token=token)
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ws://host:80/path?token=s3cret#s3cret", "ws://host:80/path"),
        ("wss://user:s3cret@[::1]:8", "wss://[::1]:8"),
        ("ws://[s3cret", "a URL that cannot be read"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_replicas_are_named_without_their_tokens() -> None:
    urls = ["ws://a/?token=s3cret", "ws://a/?token=s3cret2", "ws://b", "ws://b"]
    assert list(_by_name(urls, {})) == ["ws://a/", "ws://a/ (2)", "ws://b"]


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        (" https://App.Example/ ", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80/", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("null", "null"),
    ],
)
def test_an_origin_has_one_form(text: str, origin: str) -> None:
    assert clean_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    [
        "app.example",
        "localhost:3000",
        "//app.example",
        "https://",
        "https://*.example",
        "https://app.example/chat",
        "https://app.example?x",
        "https://user@app.example",
        "https://app.example:99999",
        "wss://app.example",
        "https://[::1",
    ],
)
def test_what_is_no_origin_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"ServerConfig\.allow_origins: ") as refused:
        ServerConfig(allow_origins=("https://fine.example", text))
    assert repr(text) in str(refused.value)


@given(st.text())
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    try:
        origin = clean_origin(text)
    except ValueError:
        return
    assert clean_origin(origin) == origin


@pytest.mark.parametrize(
    "origins", [("",), ("https://a.example", " "), ("*", "https://a.example"), "https://a.example"]
)
def test_origins_never_fail_open(origins: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"ServerConfig\.allow_origins"):
        ServerConfig(allow_origins=origins)
    assert ServerConfig(allow_origins=("*",)) == ServerConfig()
