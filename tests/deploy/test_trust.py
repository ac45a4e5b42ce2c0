"""Certificates, and errors when a SuperLink cannot be reached or trusted."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from ipaddress import ip_address
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedflat.cli.application import app
from fedflat.deploy.flower import gateway
from fedflat.deploy.flower.reach import reach
from fedflat.deploy.trust import certificates
from fedflat.deploy.trust.certificates import write_certificates
from fedflat.deploy.trust.signatures import read_site_list
from fedflat.errors import UserError

from .processes import free_port


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    write_certificates(folder, ["localhost"], sites=1, days=30)
    return folder


@contextmanager
def answering(
    certificates: Path | None, answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
) -> Iterator[str]:
    """A server that answers a health check like a SuperLink; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            try:
                connected, _ = listening.accept()
                with connected:
                    if certificates is not None:
                        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                        context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
                        connected = context.wrap_socket(connected, server_side=True)
                    request = connected.recv(1000)
                    while request.startswith(b"POST") and not request.endswith(b"x"):  # the body comes separately
                        request += connected.recv(1000)
                    connected.sendall(answer)
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def test_certificates_are_written_once_and_keys_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    asked = ["deploy", "certificates", str(folder), "--host", "server.example.org", "--sites", "2"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert f"--ssl-keyfile {folder / 'server.key'}" in done.output.replace("\n", " ")
    assert "flwr supernode register" in done.output
    assert f"fedflat deploy gateway {folder} --listen 0.0.0.0:8443" in " ".join(done.output.split())
    assert "/v1/fleet/ and /health, and nothing else" in done.output
    assert {client: site.name for client, site in read_site_list(folder / "sites.txt").items()} == {
        0: "site-0",
        1: "site-1",
    }
    private = {path.name for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert private == {"ca.key", "server.key", "site-0.key", "site-1.key"}
    key = load_ssh_private_key((folder / "site-1.key").read_bytes(), None)
    assert (
        load_ssh_public_key((folder / "site-1.key.pub").read_bytes()).public_numbers()
        == key.public_key().public_numbers()
    )  # type: ignore[union-attr]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 2
    assert "is not overwritten" in again.output
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


def test_the_gateway_needs_an_address_and_certificates(valid: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name in ("ca.crt", "server.pem", "server.key"):
        (damaged / name).write_text("nothing")
    for arguments, reason in {
        (str(valid), "--listen", "8443"): "'8443' is not an address; expected HOST:PORT",
        (str(valid), "--superlink", "127.0.0.1"): "'127.0.0.1' is not an address; expected HOST:PORT",
        (str(damaged),): "ca.crt is not a readable PEM certificate",
        (str(tmp_path),): "ca.crt does not exist; expected a folder that fedflat deploy certificates has written",
    }.items():
        done = CliRunner().invoke(app, ["deploy", "gateway", *arguments], env={"COLUMNS": "300"})
        assert done.exit_code == 2 and reason in " ".join(done.output.split()), done.output


def test_a_host_with_a_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'server:8000'.*without a port"):
        write_certificates(tmp_path / "new", ["server:8000"], 0, 1)
    with pytest.raises(UserError, match=r"'sérver'"):
        write_certificates(tmp_path / "new", ["sérver"], 0, 1)
    assert not (tmp_path / "new").exists()


def test_a_superlink_that_answers_and_is_trusted(valid: Path) -> None:
    with answering(valid) as address:
        done = CliRunner().invoke(app, ["deploy", "check", address, "--root-certificates", str(valid / "ca.crt")])
    assert done.exit_code == 0, done.output
    assert f"The SuperLink at {address} answers: its certificate is valid until " in done.output
    with answering(None) as address:
        assert reach(address, insecure=True) is None


def test_an_expired_certificate_is_reported(valid: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"], sites=0, days=-1)
    with answering(tmp_path) as address:
        done = CliRunner().invoke(app, ["deploy", "check", address, "--root-certificates", str(tmp_path / "ca.crt")])
    assert done.exit_code == 2
    output = " ".join(done.output.split())
    assert f"{address} has expired" in output and "fedflat deploy certificates" in output


def test_an_unknown_authority_is_reported(valid: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"], sites=0, days=1)
    with answering(valid) as address, pytest.raises(UserError, match=r"is not signed by .*ca\.crt"):
        reach(address, tmp_path / "ca.crt")
    with (
        answering(valid) as address,
        pytest.raises(UserError, match=r"--root-certificates ca\.crt"),
    ):
        reach(address)


def test_a_certificate_for_another_time_or_machine_is_reported(
    valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(days=1)

    monkeypatch.setattr(certificates, "datetime", Tomorrow)
    write_certificates(tmp_path / "tomorrow", ["localhost"], sites=0, days=2)
    with (
        answering(tmp_path / "tomorrow") as address,
        pytest.raises(UserError, match=r"not valid yet.*clocks"),
    ):
        reach(address, tmp_path / "tomorrow" / "ca.crt")
    monkeypatch.undo()
    monkeypatch.setattr(certificates, "ITSELF", ())
    write_certificates(tmp_path / "elsewhere", ["server.example.org", "10.0.0.7"], sites=0, days=1)
    for host in ("127.0.0.1", "localhost"):
        with answering(tmp_path / "elsewhere") as address:
            address = address.replace("127.0.0.1", host)
            with pytest.raises(UserError, match=f"{address} is not for {host}.*--host {host}"):
                reach(address, tmp_path / "elsewhere" / "ca.crt")


def test_the_contents_of_certificates(tmp_path: Path) -> None:
    """Valid for the hosts and for the machine itself; the authority signs servers only; clocks may differ."""
    write_certificates(tmp_path, ["server.example.org", "10.0.0.7"], sites=0, days=30)
    authority, server = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in ("ca.crt", "server.pem")
    )
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("10.0.0.7"), ip_address("127.0.0.1")]
    signs = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (signs.ca, signs.path_length) == (True, 0)
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for certificate in (authority, server):
        assert timedelta(minutes=4) < datetime.now(UTC) - certificate.not_valid_before_utc < timedelta(minutes=10)
        assert timedelta(days=29) < certificate.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=30)


def test_unreachable_servers_are_reported(valid: Path, tmp_path: Path) -> None:
    ca = valid / "ca.crt"
    with pytest.raises(UserError, match=r"connection refused.*10 seconds"):
        reach(f"127.0.0.1:{free_port()}", ca)
    with pytest.raises(UserError, match=r"\[::1\]:\d+"):
        reach(f"[::1]:{free_port()}", ca)
    with pytest.raises(UserError, match="'nowhere"):
        reach("nowhere.invalid:8000", ca)
    with pytest.raises(UserError, match=r"host 'server\.\.org' is unknown"):
        reach("server..org:8000", ca)
    for address in ("server", "server:70000", "https://server:8000", "server:port", ":8000", "my server:8000"):
        with pytest.raises(UserError, match=f"'{address}'.*folder.*HOST:PORT"):
            reach(address, ca)
    with pytest.raises(UserError, match="either --insecure or --root-certificates"):
        reach("server:8000", ca, insecure=True)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(UserError, match=r"no answer"),
    ):
        reach(f"127.0.0.1:{silent.getsockname()[1]}", insecure=True, timeout=0.2)
    with answering(None) as address, pytest.raises(UserError, match="TLS"):
        reach(address, ca)
    with answering(valid) as address, pytest.raises(UserError, match="without --insecure"):
        reach(address, insecure=True)
    with (
        answering(None, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as address,
        pytest.raises(UserError, match="not a SuperLink"),
    ):
        reach(address, insecure=True)
    with pytest.raises(UserError, match=r"none\.crt does not exist"):
        reach("localhost:1", tmp_path / "none.crt")
    (tmp_path / "empty.crt").write_text("nothing")
    with pytest.raises(UserError, match="PEM"):
        reach("localhost:1", tmp_path / "empty.crt")


def test_the_gateway_forwards_bounded_requests_and_ignores_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_certificates(tmp_path, ["127.0.0.1"], sites=1, days=30)
    monkeypatch.setattr(gateway, "LONGEST_BODY", 10)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there

    async def statuses(superlink: str) -> list[int]:
        transport = httpx.ASGITransport(app=gateway.gateway_app(superlink, tmp_path / "ca.crt"))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as site:
            answers = [
                await site.post("/v1/fleet/pull", content=b"x" * 11),
                await site.get("/v1/control/runs"),
                await site.post("/v1/fleet/pull", content=b"x" * 10),
            ]
        return [answer.status_code for answer in answers]

    with answering(tmp_path) as superlink:
        assert asyncio.run(statuses(superlink)) == [413, 404, 200]
