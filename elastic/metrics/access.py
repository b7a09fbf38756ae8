"""Who may ask the agent over TCP: a bearer token, and TLS. The unix socket needs neither: its mode lets this user in.

/healthz and /readyz answer without a token: probes of an orchestrator have none, and both say one word.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hmac
import ipaddress
import ssl
from pathlib import Path

from elastic.errors import UsageError
from elastic.passing import lacks_room

_OPEN_PATHS = frozenset({"/healthz", "/readyz"})
CHALLENGES = ("Bearer", 'Basic realm="elasticd", charset="UTF-8"')  # the second one is for people with a browser


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`token` None: everybody who reaches the port. `tls` None: in the clear."""

    token: bytes | None = dataclasses.field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    def allows(self, path: str, authorization: str) -> bool:
        """Whether what the header says lets its sender see `path`."""
        if self.token is None or path in _OPEN_PATHS:
            return True
        return hmac.compare_digest(_given(authorization), self.token)  # takes as long for a good guess as for a bad one


OPEN = Access()


def load_access(token_file: str | None, cert: str | None, key: str | None) -> Access:
    """From the files that the job's settings name, which were looked at then.

    Raises: UsageError. OSError: this host has no room now.
    """
    token, tls = None, None
    try:
        if token_file is not None:
            token = Path(token_file).read_bytes().strip()
            if not token:
                raise UsageError(f"--http-token-file {token_file} is empty: put a long random word there")
        if cert is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(cert, key)
    except ssl.SSLError as exc:
        raise UsageError(f"--http-cert {cert} and --http-key {key} do not make a pair: {exc.reason or exc}") from exc
    except OSError as exc:
        if lacks_room(exc):
            raise
        raise UsageError(f"{exc.filename or cert}: {exc.strerror or exc}") from exc
    return Access(token=token, tls=tls)


def exposure(address: str, *, token: bool, tls: bool) -> str:
    """What others on the network can do at this address of ours, with the remedy; empty where it is as it should be."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback or (token and tls):
        return ""
    if token:
        return f"--http on {address}: the token crosses the network unencrypted; give --http-cert and --http-key"
    return (
        f"--http on {address}: everybody on the network can read status and metrics; give --http-token-file, "
        "or stay on 127.0.0.1"
    )


def _given(authorization: str) -> bytes:
    """The token in a header `Bearer TOKEN`, or `Basic` with it as any user's password; empty where there is none."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip().encode("latin-1", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
