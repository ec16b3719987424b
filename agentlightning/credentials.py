"""Who may do what: the admin key, and the signed credential of one attempt.

An attempt's credential is a JSON Web Token (HS256) that carries rollout, attempt, scopes
and expiry. Its signing key is derived from the admin key, so that each service that has
the admin key can sign and check without asking another.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import jwt

from agentlightning.errors import CredentialError

Scope = Literal["call", "reward"]

_ALGORITHM = "HS256"


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request proved. ``admin`` may do everything; else only its own attempt.
    ``expires_at`` is in Unix seconds.

    Example:
        >>> token = sign("secret", "r1", "a1", scopes=["call"], seconds=60)
        >>> check("secret", token).scopes
        frozenset({'call'})
    """

    admin: bool = False
    rollout_id: str | None = None
    attempt_id: str | None = None
    scopes: frozenset[str] = frozenset()
    expires_at: float = float("inf")


def sign(
    admin_key: str, rollout_id: str, attempt_id: str, *, scopes: Collection[Scope], seconds: float
) -> str:
    """A credential for one attempt that ends ``seconds`` from now."""
    claims = {
        "rollout": rollout_id,
        "attempt": attempt_id,
        "scopes": sorted(scopes),
        "exp": int(time.time() + seconds),
    }
    return jwt.encode(claims, _signing_key(admin_key), algorithm=_ALGORITHM)


def check(admin_key: str, token: str | None) -> Credential:
    """What ``token`` proves; raises CredentialError if it is missing, wrong or expired.

    With an empty admin key (a server on loopback without one), no token at all is admin.
    """
    if not admin_key and not token:
        return Credential(admin=True)
    if not token:
        raise CredentialError("no credential: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    if admin_key and hmac.compare_digest(token.encode(), admin_key.encode()):
        return Credential(admin=True)
    try:
        claims = jwt.decode(token, _signing_key(admin_key), algorithms=[_ALGORITHM])
        return Credential(
            rollout_id=claims["rollout"],
            attempt_id=claims["attempt"],
            scopes=frozenset(claims["scopes"]),
            expires_at=float(claims["exp"]),
        )
    except jwt.ExpiredSignatureError as error:
        raise CredentialError("the credential has expired") from error
    except (jwt.InvalidTokenError, KeyError) as error:
        if not admin_key:
            return Credential(admin=True)
        raise CredentialError("the credential is not valid here") from error


def bearer(headers: Mapping[str, str]) -> str | None:
    """The token of ``Authorization: Bearer`` or ``x-api-key`` (header names in lower case)."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or None


def _signing_key(admin_key: str) -> bytes:
    return hashlib.sha256(b"agentlightning attempt credential\0" + admin_key.encode()).digest()
