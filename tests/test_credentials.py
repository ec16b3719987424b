from __future__ import annotations

import time

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.credentials import Credential, bearer, check, sign
from agentlightning.errors import CredentialError


def test_an_attempts_credential_carries_its_attempt_and_scopes() -> None:
    token = sign("secret", "a/b:0", "1", scopes=["call", "reward"], seconds=60)
    found = check("secret", token)
    assert found == Credential(
        False, "a/b:0", "1", frozenset({"call", "reward"}), expires_at=found.expires_at
    )
    assert 0 < found.expires_at - time.time() <= 60


def test_the_admin_key_is_admin_and_others_are_not() -> None:
    assert check("secret", "secret").admin
    with pytest.raises(CredentialError, match="not valid"):
        check("secret", "secreT")


def test_without_a_key_a_caller_is_admin_but_an_attempt_stays_one() -> None:
    assert check("", None).admin
    token = sign("", "r", "a", scopes=["call"], seconds=60)
    assert not check("", token).admin


def test_missing_expired_and_foreign_credentials_are_refused() -> None:
    with pytest.raises(CredentialError, match="no credential"):
        check("secret", None)
    with pytest.raises(CredentialError, match="expired"):
        check("secret", sign("secret", "r", "a", scopes=["call"], seconds=-10))
    with pytest.raises(CredentialError, match="not valid"):
        check("secret", sign("other", "r", "a", scopes=["call"], seconds=60))


def test_an_unsigned_token_is_refused() -> None:
    claims = {"rollout": "r", "attempt": "a", "scopes": ["call"], "exp": 9999999999}
    with pytest.raises(CredentialError, match="not valid"):
        check("secret", jwt.encode(claims, None, algorithm="none"))


@given(st.text(min_size=1).filter(lambda text: text != "secret"))
def test_no_other_text_is_the_key(token: str) -> None:
    try:
        credential = check("secret", token)
    except (CredentialError, UnicodeEncodeError):
        return
    assert not credential.admin


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({"authorization": "Bearer abc"}, "abc"),
        ({"authorization": "bearer  abc "}, "abc"),
        ({"x-api-key": "abc"}, "abc"),
        ({"authorization": "Basic abc", "x-api-key": "k"}, "k"),
        ({"authorization": "Bearer"}, None),
        ({}, None),
    ],
)
def test_where_a_token_is_looked_for(headers: dict[str, str], token: str | None) -> None:
    assert bearer(headers) == token
