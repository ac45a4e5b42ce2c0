"""Whether a SuperLink can be reached and trusted; if not, the error says why and what to do."""

from __future__ import annotations

import http.client
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path

from fedflat.deploy.flower.address import host_and_port
from fedflat.errors import UserError, system_reason

HEALTH = "/health"
"""Path that a SuperLink answers without authentication."""
EXPIRED, NOT_YET, WRONG_NAME, WRONG_ADDRESS = 10, 9, 62, 64
"""OpenSSL's codes for untrusted certificates; any other means an unknown authority."""


def reach(
    address: str, root_certificates: Path | None = None, insecure: bool = False, timeout: float = 10.0
) -> datetime | None:
    """Connect to a SuperLink and request its health page; raises ``UserError`` if that fails.

    Args:
        address: HOST:PORT.
        root_certificates: certificate of the authority that signed the SuperLink's; default: the system's authorities.
        insecure: whether to connect without TLS.
        timeout: seconds to wait.

    Returns:
        When the SuperLink's certificate expires; None without TLS.
    """
    host, port = host_and_port(address, "a project folder, or HOST:PORT, for example server.example.org:8443")
    if insecure and root_certificates is not None:
        raise UserError("use either --insecure or --root-certificates: without TLS there is no certificate to check")
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    if not insecure:
        context = tls_context(root_certificates)
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    try:
        connection.connect()
        expiry = _certificate_expiry(connection.sock)
        connection.request("GET", HEALTH)
        answer = connection.getresponse()
    except ssl.SSLError as error:
        raise UserError(_explain_tls_failure(address, host, error, root_certificates)) from None
    except (http.client.HTTPException, ConnectionResetError):
        raise UserError(
            f"{address} closes the connection or uses another protocol; {_suggest_alternative(insecure)}; check the "
            "port, and try again if the server has just been started"
        ) from None
    except (socket.gaierror, UnicodeError):  # the latter for names such as server..org
        raise UserError(f"host {host!r} is unknown; check its spelling and this machine's network") from None
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else system_reason(error)
        raise UserError(
            f"{address} cannot be reached ({reason}); is its SuperLink, or the gateway for sites, running on this port?"
            " A SuperLink needs about 10 seconds to start"
        ) from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise UserError(f"{address} answers, but is not a SuperLink of Flower 1.41 or newer; check the port")
    return expiry


def tls_context(root_certificates: Path | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the given authority, or the system's authorities."""
    if root_certificates is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=root_certificates)
    except FileNotFoundError:
        raise UserError(
            f"{root_certificates} does not exist; ask the server's operator for the authority's certificate, ca.crt"
        ) from None
    except OSError:  # includes the errors of ssl
        raise UserError(
            f"{root_certificates} is not a readable PEM certificate; expected the authority's certificate, ca.crt"
        ) from None


def _certificate_expiry(connected: socket.socket) -> datetime | None:
    """Return when the certificate of the other side expires; None without TLS."""
    certificate = connected.getpeercert() if isinstance(connected, ssl.SSLSocket) else None
    if not certificate:
        return None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)


def _explain_tls_failure(address: str, host: str, error: ssl.SSLError, root_certificates: Path | None) -> str:
    """Say why TLS with an address fails, and what to do."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"{address} does not use TLS; {_suggest_alternative(insecure=False)}"
    certificate = f"the certificate of {address}"
    if error.verify_code == EXPIRED:
        return f"{certificate} has expired; make a new one on the server: fedflat deploy certificates DIR --host {host}"
    if error.verify_code == NOT_YET:
        return f"{certificate} is not valid yet; set the clocks of both machines"
    if error.verify_code in (WRONG_NAME, WRONG_ADDRESS):
        return f"{certificate} is not for {host}; use a name that it is for, or make a new one with --host {host}"
    if root_certificates is None:
        return f"{certificate} is signed by an unknown authority; pass the federation's with --root-certificates ca.crt"
    return f"{certificate} is not signed by {root_certificates}; ask the server's operator for the right ca.crt"


def _suggest_alternative(insecure: bool) -> str:
    return "try without --insecure" if insecure else "its SuperLink runs with --insecure, or it is another service"
