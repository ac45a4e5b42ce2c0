"""Certificates and keys of a federation: its own authority, the server's certificate, and a key pair per site.

The authority signs only the certificate of this federation's server, and TLS within the federation needs no other one.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedflat.errors import UserError
from fedflat.experiment.store.files import create_folder, write_atomically

AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.pem", "server.key"
CURVE = ec.SECP384R1()
"""Curve of all keys; Flower accepts NIST curves for nodes."""
ITSELF = ("127.0.0.1", "localhost")
"""Names of the server on its own machine, for which a SuperLink's certificate must be valid too."""
CLOCK_SKEW = timedelta(minutes=5)
"""Certificates become valid this long before now, for machines whose clocks are behind."""
HOST_NAME = re.compile(r"(?!.{254})(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")

SITE_LIST = "sites.txt"
SITE_LIST_HEADER = """\
# The sites that may take part, one per line: number of the client, name of the site, public key (site.key.pub).
# To add one: echo "0 hospital-a $(cat site.key.pub)" >> sites.txt
"""
DATABASE = "superlink.db"
PORT, SITES_PORT, FIRST_NODE_PORT = 8000, 8443, 8100
"""Ports of the SuperLink, of the gateway for sites, and of the first site's own Runtime API."""


def write_certificates(folder: Path, hosts: Sequence[str], sites: int, days: float) -> list[Path]:
    """Write an authority, the server's certificate, a key pair for each site and the list of sites with public keys.

    Existing files are never overwritten.

    Args:
        folder: where to write.
        hosts: names and addresses of the server, for which its certificate is valid.
        sites: number of sites.
        days: validity of the certificates in days.

    Returns:
        The files written.
    """
    names = [_certificate_name(host) for host in dict.fromkeys((*hosts, *ITSELF))]
    files = [AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY, SITE_LIST]
    for site in range(sites):
        files += [f"site-{site}.key", f"site-{site}.key.pub"]
    existing = [name for name in files if (folder / name).exists()]
    if existing:
        raise UserError(f"{folder / existing[0]} exists and is not overwritten; choose another folder or move it away")
    create_folder(folder)
    authority_key, server_key = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    authority, until = _authority_certificate(authority_key, days)
    server = _server_certificate(server_key, names, authority_key, authority, until)
    contents = {
        AUTHORITY: authority.public_bytes(Encoding.PEM),
        AUTHORITY_KEY: _private_bytes(authority_key),
        SERVER: server.public_bytes(Encoding.PEM),
        SERVER_KEY: _private_bytes(server_key),
    }
    site_list = SITE_LIST_HEADER
    for site in range(sites):
        key = ec.generate_private_key(CURVE)
        public_key = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        contents[f"site-{site}.key"] = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        contents[f"site-{site}.key.pub"] = public_key + b"\n"
        site_list += f"{site} site-{site} {public_key.decode()}\n"
    contents[SITE_LIST] = site_list.encode()
    for name in files:
        _write(folder / name, contents[name])
    return [folder / name for name in files]


def _certificate_name(host: str) -> x509.GeneralName:
    """Return a host in the notation of certificates: an address or a name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not HOST_NAME.fullmatch(host):
        raise UserError(
            f"{host!r} is not a host; expected a name or an address without a port, for example server.example.org"
        )
    return x509.DNSName(host)


def _authority_certificate(key: ec.EllipticCurvePrivateKey, days: float) -> tuple[x509.Certificate, datetime]:
    """Return the self-signed authority, and the time at which it and the certificates it signs expire."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedflat federation authority")])
    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - CLOCK_SKEW)  # with negative days, for tests, ``until`` is earlier
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder.sign(key, hashes.SHA384()), until


def _server_certificate(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    until: datetime,
) -> x509.Certificate:
    """Return the server's certificate, signed by the authority.

    Args:
        key: the server's private key.
        names: host names and addresses that the certificate is valid for.
        authority_key: the authority's private key.
        authority: the authority's certificate.
        until: when the certificate expires.
    """
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedflat federation server")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(until)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    return builder.sign(authority_key, hashes.SHA384())


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    """Return what a key may be used for: signing certificates, or the handshakes of TLS connections."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically; a private key is readable by its owner only, from the start."""
    write_atomically(path, data, mode=0o600 if path.suffix == ".key" else 0o666)


def start_commands(folder: Path, host: str, sites: int) -> str:
    """Return the commands that start a federation with the certificates in a folder, as text.

    Args:
        folder: holds the certificates and keys.
        host: name or address of the server; sites on other machines connect to its gateway.
        sites: number of sites that have a key in the folder; with 0, sites create their own keys.
    """
    paths = {name: shlex.quote(str(folder / name)) for name in (AUTHORITY, SERVER, SERVER_KEY, DATABASE)}
    superlink = (
        f"flower-superlink --port {PORT} --database {paths[DATABASE]} --disable-runtime-dependency-installation "
        f"--enable-supernode-auth --ssl-ca-certfile {paths[AUTHORITY]} --ssl-certfile {paths[SERVER]} "
        f"--ssl-keyfile {paths[SERVER_KEY]}"
    )
    sites_address, gateway = f"127.0.0.1:{PORT}", ""
    if host not in ITSELF:
        sites_address = f"{host}:{SITES_PORT}"
        gateway = f"""
Start the gateway, the only port that sites reach. On all addresses of this machine (0.0.0.0) it offers the SuperLink's
/v1/fleet/ and /health, and nothing else: registering keys and starting runs is possible on this machine only.
  fedflat deploy gateway {shlex.quote(str(folder))} --listen 0.0.0.0:{SITES_PORT} --superlink 127.0.0.1:{PORT}
"""
    supernode = f"flower-supernode --superlink {sites_address} --root-certificates"
    with_keys = []
    for site in range(sites):
        key = folder / f"site-{site}.key"
        with_keys += [
            f"  flwr supernode register {shlex.quote(f'{key}.pub')} sites",
            f"  {supernode} {paths[AUTHORITY]} --auth-supernode-private-key {shlex.quote(str(key))} "
            f"--port {FIRST_NODE_PORT + site} --node-config " + shlex.quote(f'partition-id={site} key="{key}"'),
        ]
    without_keys = (
        f"  ssh-keygen -t ecdsa -b 384 -N '' -f site.key          # at the site, which sends you site.key.pub\n"
        f"  flwr supernode register site.key.pub sites            # here\n"
        f'  echo "N NAME $(cat site.key.pub)" >> {shlex.quote(str(folder / SITE_LIST))}  # here\n'
        f"  {supernode} {AUTHORITY} --auth-supernode-private-key site.key --port {FIRST_NODE_PORT} "
        f"--node-config 'partition-id=N key=\"site.key\"'  # at the site, which has {AUTHORITY} from you"
    )
    site_commands = "\n".join(with_keys) or without_keys
    return f"""
Start the server:
  {superlink}
{gateway}
Add this entry to the Flower configuration (flwr config list shows where) on this machine, from which runs are started,
in place of an earlier entry with this name:
  [superlink.sites]
  address = "127.0.0.1:{PORT}"
  root-certificates = "{folder / AUTHORITY}"

Once the server is up, for every site:
{site_commands}

The server accepts updates only from the sites in {folder / SITE_LIST} (setting deploy.sites of the project).
Give {AUTHORITY} to every site. Keep all files that end in .key secret.
With secure aggregation, every site should have its own copy of {SITE_LIST}, with keys that it got from the other sites,
and 'secure-aggregation=true sites="{SITE_LIST}"' in its --node-config."""
