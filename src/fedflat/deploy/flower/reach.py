"""Whether a SuperLink can be reached, and trusted: what keeps a node or ``flwr run`` from it, in one sentence."""

from __future__ import annotations

import http.client
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from fedflat.errors import UserError

HEALTH = "/health"
"""What a SuperLink answers to anybody."""
EXPIRED, NOT_YET, WRONG_NAME, WRONG_ADDRESS = 10, 9, 62, 64
"""What OpenSSL calls the reasons for not trusting a certificate; any other is an authority that is not ours."""


class Reached(NamedTuple):
    """A SuperLink that answers."""

    address: str
    until: datetime | None
    """Until when its certificate is valid; none where there is none."""


def reach(
    address: str, root_certificates: Path | None = None, insecure: bool = False, timeout: float = 10.0
) -> Reached:
    """Ask a SuperLink whether it is there, by TLS unless told otherwise."""
    host, port = _parts(address)
    if insecure and root_certificates is not None:
        raise UserError(
            "either --insecure or --root-certificates, not both: without TLS there is no certificate to check"
        )
    connection = (
        http.client.HTTPConnection(host, port, timeout=timeout)
        if insecure
        else http.client.HTTPSConnection(host, port, timeout=timeout, context=_context(root_certificates))
    )
    try:
        connection.connect()
        until = _valid_until(connection.sock)
        connection.request("GET", HEALTH)
        answer = connection.getresponse()
    except ssl.SSLError as error:
        raise UserError(_untrusted(address, host, error, root_certificates)) from None
    except (http.client.HTTPException, ConnectionResetError):
        raise UserError(f"{address} speaks something else; {_other_way(insecure)}, and look at the port") from None
    except socket.gaierror:
        raise UserError(
            f"there is no machine called {host!r}; look at how it is written, and at this machine's network"
        ) from None
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise UserError(
            f"{address} cannot be reached ({why}); is its SuperLink running, on this port and with --host 0.0.0.0?"
        ) from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise UserError(f"{address} answers, but is no SuperLink of Flower 1.41 or newer; look at the port")
    return Reached(address, until)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"{address!r} is no address of a SuperLink; expected host:port, as in server.example.org:8000")
    return host.strip("[]"), int(port)


def _context(root_certificates: Path | None) -> ssl.SSLContext:
    if root_certificates is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=root_certificates)
    except FileNotFoundError:
        raise UserError(
            f"there is no file {root_certificates}; expected the authority's certificate, ca.crt, from the server's operator"
        ) from None
    except ssl.SSLError:
        raise UserError(
            f"{root_certificates} is no certificate in PEM form; expected the authority's, ca.crt"
        ) from None


def _valid_until(connected: socket.socket) -> datetime | None:
    found = connected.getpeercert() if isinstance(connected, ssl.SSLSocket) else None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(found["notAfter"])), UTC) if found else None


def _untrusted(address: str, host: str, error: ssl.SSLError, root_certificates: Path | None) -> str:
    """Why there is no TLS with an address, and what to do."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"{address} does not speak TLS; {_other_way(insecure=False)}"
    if error.verify_code == EXPIRED:
        return f"the certificate of {address} has expired; its operator makes a new one with: fedflat deploy certificates DIR --host {host}"
    if error.verify_code == NOT_YET:
        return f"the certificate of {address} is not valid yet; set the clocks of both machines"
    if error.verify_code in (WRONG_NAME, WRONG_ADDRESS):
        return (
            f"the certificate of {address} is not for {host}; use a name that it is for, or make one with --host {host}"
        )
    if root_certificates is None:
        return f"this machine does not know who signed the certificate of {address}; give the federation's with --root-certificates ca.crt"
    return f"the certificate of {address} is not signed by {root_certificates}; ask the server's operator for the ca.crt that it is signed by"


def _other_way(insecure: bool) -> str:
    return (
        "try it without --insecure"
        if insecure
        else "its SuperLink was started with --insecure, or this is another service"
    )
