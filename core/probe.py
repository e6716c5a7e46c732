"""Whether somebody listens at an address: refused, open, or no answer at all; and what TLS says to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from elastic_adapter.core.config import Credentials
from elastic_adapter.core.model import Endpoint
from elastic_adapter.core.succession import Answer

_TLS = "it speaks TLS: write https:// before the host, or add --etcd-ca"
_NOT_TLS = "it does not speak TLS: write http:// before the host, and leave out --etcd-ca"


async def probe(address: str, within_s: float = 1.0) -> Answer:
    """Try to connect to HOST:PORT, and hang up."""
    try:
        place = Endpoint.parse(address)
        _, writer = await asyncio.wait_for(asyncio.open_connection(place.host, place.port), within_s)
    except ConnectionRefusedError:
        return Answer.REFUSED
    except socket.gaierror:
        return Answer.UNKNOWN
    except (OSError, asyncio.TimeoutError, ValueError):
        return Answer.SILENT
    # A connection to this machine may be given the port that it asks for as its own, and then it talks to itself.
    is_own = writer.get_extra_info("sockname") == writer.get_extra_info("peername")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Answer.REFUSED if is_own else Answer.OPEN


def tls_trouble(address: str, credentials: Credentials, within_s: float = 2.0) -> str:
    """Why a TLS handshake with these credentials fails, in words; empty where TLS is not the trouble."""
    place = Endpoint.parse(address)
    secure = credentials.ca is not None or credentials.cert is not None
    context = _context(credentials) if secure else _blind_context()
    try:
        with (
            socket.create_connection((place.host, place.port), within_s) as plain,
            context.wrap_socket(plain, server_hostname=place.host) as tls,
        ):
            if not secure:
                return _TLS
            # A server that misses our certificate says so after the handshake.
            tls.recv(1)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        return _words(error, credentials)
    except ConnectionError:
        return _NOT_TLS if secure else ""
    except OSError:
        return ""
    return ""


def _context(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=credentials.ca)
    context.set_alpn_protocols(["h2"])
    if credentials.cert is not None:
        context.load_cert_chain(credentials.cert, credentials.key)
    return context


def _blind_context() -> ssl.SSLContext:
    """Nothing is sent by it: it only shows whether the other side speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_files(credentials: Credentials) -> str | None:
    """What is wrong with the files for TLS, in one line; None: nothing."""
    ca, cert, key = credentials.ca, credentials.cert, credentials.key
    try:
        if ca is not None:
            ssl.create_default_context(cafile=ca)
    except OSError:
        return f"--etcd-ca {ca}: expected certificates in PEM format, and there are none in it"
    try:
        if cert is not None:
            ssl.create_default_context().load_cert_chain(cert, key)
    except OSError as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            return f"--etcd-key {key} is not the key of --etcd-cert {cert}"
        return f"--etcd-cert {cert} and --etcd-key {key}: expected a certificate and its key, PEM, no password"
    return None


def _words(error: ssl.SSLError, credentials: Credentials) -> str:
    secure = credentials.ca is not None or credentials.cert is not None
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if any(sign in reason for sign in ("wrong version number", "record layer failure", "unexpected eof")):
        return _NOT_TLS if secure else ""
    if not secure:
        return _TLS
    if credentials.cert is not None and "certificate" in reason:
        return f"it does not trust our certificate, --etcd-cert {credentials.cert} ({reason})"
    if "certificate required" in reason or "bad certificate" in reason:
        return "it wants a certificate that it trusts: add --etcd-cert and --etcd-key"
    return f"TLS: {reason}"
