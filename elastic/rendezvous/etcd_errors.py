"""What etcd and grpc mean by an error: the status code alone does not tell, the words do."""

from __future__ import annotations

from elastic.errors import ElasticError, StoreRefusedError, StoreUnavailableError
from elastic.rendezvous.etcd_config import EtcdConfig
from elastic.rendezvous.transact import NotAppliedError

_TLS_SIGNS = ("CERTIFICATE_VERIFY_FAILED", "SSL_ERROR_SSL", "CERTIFICATE_REQUIRED", "not in peer certificate")
_TURNED_AWAY = (
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
)  # a token that is no longer good; out of space, too many requests


class NotFoundError(ElasticError):
    """The lease that was named is gone; the gateway answers it with a value."""


def translated(code: str, details: str, endpoint: str, config: EtcdConfig) -> ElasticError:
    """The error of ours for the status `code` of grpc, by its name, and the words that came with it."""
    who = f"user {config.user!r}" if config.user is not None else "no user was given (--etcd-user)"
    if code == "NOT_FOUND":
        return NotFoundError(f"{endpoint}: {details}")
    if "authentication failed" in details:
        return StoreRefusedError(f"{endpoint} does not know {who} with the password in ELASTICD_ETCD_PASSWORD")
    if "authentication is not enabled" in details:
        return StoreRefusedError(f"{endpoint} has no authentication: leave out --etcd-user, or enable it there")
    if code == "PERMISSION_DENIED" or "user name is empty" in details:
        return StoreRefusedError(f"{endpoint} denies permission: {who}; grant it readwrite on the job's keys")
    if any(sign in details for sign in _TLS_SIGNS):
        files = f"--etcd-ca {config.ca}, --etcd-cert {config.cert}"
        return StoreRefusedError(f"no TLS with {endpoint}: check {files} ({details[-200:]})")
    if "Domain name not found" in details:
        return StoreRefusedError(f"the host of {endpoint} has no address: check --rdzv-endpoint ({details})")
    if "auth store is old" in details or code in _TURNED_AWAY:
        return NotAppliedError(f"{endpoint}: {details}")
    if code == "INVALID_ARGUMENT":
        return StoreRefusedError(f"{endpoint} does not take the request: {details}")
    hint = "" if config.ca is not None or "Socket closed" not in details else " (does it want TLS: --etcd-ca?)"
    return StoreUnavailableError(f"{endpoint}: {code}: {details}{hint}")
