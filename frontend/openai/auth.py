"""Who may call what: API keys, compared by digest in constant time.

Asked by the endpoint that the router chose, so no spelling of a URL can reach a handler around it. Knows no routes.
"""
from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Sequence

from frontend.openai.errors import RouteNotFoundError, UnauthorizedError
from frontend.openai.exchange import Exchange


class Access(enum.Enum):
    """What a route asks for."""
    OPEN = "open"                               # nothing: probes, and pages that contain nothing
    KEY = "key"                                 # an API key, if any is configured
    ADMIN = "admin"                             # an admin key; without one configured the route does not exist


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _caller(key: bytes) -> str:
    """A name for the holder of a key, as good for cache salts as the key and useless for guessing it: it is slow to
    compute, and made once per key at start."""
    return hashlib.scrypt(key, salt=b"cache salt of an API key", n=1 << 14, r=8, p=1, dklen=16).hex()


class Keys:
    """The configured keys. An admin key opens everything."""

    def __init__(self, api_keys: Sequence[str] = (), admin_keys: Sequence[str] = (), share_cache: bool = False) -> None:
        self._share_cache = share_cache
        self._is_open = not api_keys
        self._has_admin = bool(admin_keys)
        self._callers = {_digest(key.encode()): _caller(key.encode()) for key in (*api_keys, *admin_keys)}
        self._admins = [_digest(key.encode()) for key in admin_keys]

    def admit(self, exchange: Exchange, access: Access) -> None:
        """Lets the request pass, with its caller's name. Raises UnauthorizedError, RouteNotFoundError."""
        if access is Access.OPEN or (access is Access.KEY and self._is_open):
            return
        if access is Access.ADMIN and not self._has_admin:
            raise RouteNotFoundError("control routes are off; start with --admin-api-key")
        given = _given_key(exchange)
        if given is None:
            raise UnauthorizedError("this server asks for a key: send Authorization: Bearer KEY")
        digest = _digest(given)
        known = self._admins if access is Access.ADMIN else list(self._callers)
        matches = [one for one in known if hmac.compare_digest(one, digest)]
        if not matches:
            kind = "admin key" if access is Access.ADMIN else "API key"
            raise UnauthorizedError(f"the key that was sent is no {kind} of this server")
        exchange.caller = self._callers[matches[0]]
        exchange.cache_owner = "" if self._share_cache else exchange.caller


def _given_key(exchange: Exchange) -> bytes | None:
    """From Authorization, or from x-api-key, which Anthropic's clients send."""
    scheme, _, key = (exchange.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return exchange.header(b"x-api-key")
