"""The gateway of a federation: the only address that sites reach. It forwards what SuperNodes need, and nothing else.

A SuperLink serves sites, operators and its own processes on one port. Behind a gateway it listens on its own machine
only, so that nobody else can register keys or start runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fedflat.deploy.flower.address import host_and_port
from fedflat.deploy.flower.reach import tls_context
from fedflat.errors import UserError

log = logging.getLogger("fedflat")
FORWARDED = ("/v1/fleet/{path}", "/health")
"""Paths of a SuperLink that SuperNodes and ``fedflat deploy check`` request."""
TIMEOUT = 300.0
"""Seconds that the SuperLink has to answer a request."""
KEEP_ALIVE = 2.0
"""Seconds until the gateway closes an idle connection; if the SuperLink closed it first, a request could be lost."""
LONGEST_BODY = 64 * 2**20
"""Bytes of a request; Flower splits larger messages into requests of a few megabytes."""
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
"""Headers of a connection, which are not forwarded."""


def gateway_app(superlink: str, authority: Path) -> Starlette:
    """Return the web application that forwards requests.

    Args:
        superlink: HOST:PORT of the SuperLink.
        authority: certificate of the authority that signed the SuperLink's certificate.
    """
    host, port = host_and_port(superlink, "HOST:PORT, for example 127.0.0.1:8000")
    client = httpx.AsyncClient(
        base_url=httpx.URL(scheme="https", host=host, port=port),
        verify=tls_context(authority),
        timeout=TIMEOUT,
        limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE),
        trust_env=False,  # the SuperLink is never behind the proxy of $HTTPS_PROXY
    )

    async def forward(request: Request) -> Response:
        """Forward one request with its body."""
        if not re.fullmatch(r"[a-z-]*", request.path_params.get("path", "")):  # no way out of /v1/fleet/
            return Response(status_code=404)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LONGEST_BODY:
                return Response(status_code=413)
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        try:
            answer = await client.request(request.method, request.url.path, headers=headers, content=bytes(body))
        except httpx.TransportError as error:
            log.warning("the SuperLink at %s does not answer: %r", superlink, error)
            return Response(status_code=503)  # SuperNodes try again
        kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP | {"content-encoding"}}
        return Response(answer.content, answer.status_code, kept)

    return Starlette(routes=[Route(path, forward, methods=["GET", "POST"]) for path in FORWARDED])


def serve_gateway(certificates: Path, listen: str, superlink: str, announce: Callable[[], None]) -> None:
    """Forward requests until the process ends.

    Args:
        certificates: folder with ``ca.crt``, ``server.pem`` and ``server.key``.
        listen: HOST:PORT for sites.
        superlink: HOST:PORT of the SuperLink.
        announce: called before the first request.
    """
    host, port = host_and_port(listen, "HOST:PORT, for example 0.0.0.0:8443")
    files = [certificates / name for name in ("ca.crt", "server.pem", "server.key")]
    for path in files:
        if not path.is_file():
            raise UserError(f"{path} does not exist; expected a folder that fedflat deploy certificates has written")
    authority, certificate, key = files
    app = gateway_app(superlink, authority)
    announce()
    uvicorn.run(
        app,
        host=host,
        port=port,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="warning",
    )
