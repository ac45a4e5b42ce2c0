"""Certificates that are written, and what keeps a node from a SuperLink, in one sentence each."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedflat.cli.application import app
from fedflat.deploy.certificates import write_certificates
from fedflat.deploy.reach import reach
from fedflat.errors import UserError

from .processes import free_port


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    write_certificates(folder, ["localhost"], sites=1, days=30)
    return folder


@contextmanager
def answering(certificates: Path | None, answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") -> Iterator[str]:
    """Something that answers like a SuperLink does when it is asked for its health; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            try:
                connected, _ = listening.accept()
                with connected:
                    if certificates is not None:
                        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                        context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
                        connected = context.wrap_socket(connected, server_side=True)
                    connected.recv(1000)
                    connected.sendall(answer)
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def test_certificates_are_written_once_and_keys_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    asked = ["deploy", "certificates", str(folder), "--host", "server.example.org", "--sites", "2"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert f"--ssl-keyfile {folder / 'server.key'}" in done.output.replace("\n", " ")
    assert "flwr supernode register" in done.output
    private = {path.name for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert private == {"ca.key", "server.key", "site-0.key", "site-1.key"}
    key = load_ssh_private_key((folder / "site-1.key").read_bytes(), None)
    assert load_ssh_public_key((folder / "site-1.key.pub").read_bytes()).public_numbers() == key.public_key().public_numbers()  # type: ignore[union-attr]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 2
    assert "exists and is not written over" in again.output
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


def test_a_host_with_a_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'server:8000' is no host; expected a name or an address without a port"):
        write_certificates(tmp_path / "new", ["server:8000"], 0, 1)
    assert not (tmp_path / "new").exists()


def test_a_superlink_that_answers_and_is_trusted(valid: Path) -> None:
    with answering(valid) as address:
        done = CliRunner().invoke(app, ["deploy", "check", address, "--root-certificates", str(valid / "ca.crt")])
    assert done.exit_code == 0, done.output
    assert f"The SuperLink at {address} answers: its certificate is valid until " in done.output
    with answering(None) as address:
        assert reach(address, insecure=True).until is None


def test_an_expired_certificate_is_said(valid: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"], sites=0, days=-1)
    with answering(tmp_path) as address:
        done = CliRunner().invoke(app, ["deploy", "check", address, "--root-certificates", str(tmp_path / "ca.crt")])
    assert done.exit_code == 2
    assert f"the certificate of {address} has expired; its operator makes a new one with: fedflat deploy certificates" in done.output


def test_an_authority_that_is_not_the_federations_is_said(valid: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"], sites=0, days=1)
    with answering(valid) as address, pytest.raises(UserError, match=r"is not signed by .*ca\.crt"):
        reach(address, tmp_path / "ca.crt")
    with answering(valid) as address, pytest.raises(UserError, match=r"give the federation's with --root-certificates ca\.crt"):
        reach(address)


def test_what_cannot_be_reached_is_said(valid: Path, tmp_path: Path) -> None:
    ca = valid / "ca.crt"
    with pytest.raises(UserError, match=r"cannot be reached \(connection refused\); is its SuperLink running"):
        reach(f"127.0.0.1:{free_port()}", ca)
    with pytest.raises(UserError, match="there is no machine called 'nowhere"):
        reach("nowhere.invalid:8000", ca)
    with pytest.raises(UserError, match="'server' is no address of a SuperLink; expected host:port"):
        reach("server", ca)
    with answering(None) as address, pytest.raises(UserError, match="does not speak TLS"):
        reach(address, ca)
    with answering(valid) as address, pytest.raises(UserError, match="try it without --insecure"):
        reach(address, insecure=True)
    with (
        answering(None, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as address,
        pytest.raises(UserError, match="is no SuperLink"),
    ):
        reach(address, insecure=True)
    with pytest.raises(UserError, match=r"there is no file .*; expected the authority's certificate"):
        reach("localhost:1", tmp_path / "none.crt")
    (tmp_path / "empty.crt").write_text("nothing")
    with pytest.raises(UserError, match="is no certificate in PEM form"):
        reach("localhost:1", tmp_path / "empty.crt")
