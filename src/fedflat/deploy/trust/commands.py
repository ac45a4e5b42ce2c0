"""The commands that start a federation with TLS, as a user would type them."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedflat.deploy.trust.certificates import AUTHORITY, ITSELF, SERVER, SERVER_KEY

PORT, FIRST_NODE_PORT = 8000, 8100


def secure_federation(folder: Path, host: str, sites: int) -> str:
    """Return instructions for starting a federation with the certificates in a folder.

    Args:
        folder: holds the certificates and keys.
        host: name or address of the server.
        sites: sites that have a key in the folder; with 0, sites make their own.
    """
    paths = {name: shlex.quote(str(folder / name)) for name in (AUTHORITY, SERVER, SERVER_KEY)}
    listen = "" if host in ITSELF else "--host 0.0.0.0 "
    superlink = (
        f"flower-superlink {listen}--port {PORT} --disable-runtime-dependency-installation --enable-supernode-auth "
        f"--ssl-ca-certfile {paths[AUTHORITY]} --ssl-certfile {paths[SERVER]} --ssl-keyfile {paths[SERVER_KEY]}"
    )
    supernode = f"flower-supernode --superlink {host}:{PORT} --root-certificates"
    with_keys = []
    for site in range(sites):
        private_key = shlex.quote(str(folder / f"site-{site}.key"))
        public_key = shlex.quote(str(folder / f"site-{site}.key.pub"))
        with_keys += [
            f"  flwr supernode register {public_key} sites",
            f"  {supernode} {paths[AUTHORITY]} --auth-supernode-private-key {private_key} "
            f"--port {FIRST_NODE_PORT + site} --node-config 'partition-id={site}'",
        ]
    without_keys = (
        f"  ssh-keygen -t ecdsa -b 384 -N '' -f site.key          # at the site, which sends you site.key.pub\n"
        f"  flwr supernode register site.key.pub sites            # here\n"
        f"  {supernode} {AUTHORITY} --auth-supernode-private-key site.key "
        f"--port {FIRST_NODE_PORT} --node-config 'partition-id=N'  # at the site, which has {AUTHORITY} from you"
    )
    site_commands = "\n".join(with_keys) or without_keys
    return f"""
Start the server:
  {superlink}

Add it to the Flower configuration (flwr config list shows where) of everyone who starts runs:
  [superlink.sites]
  address = "{host}:{PORT}"
  root-certificates = "{folder / AUTHORITY}"

Once the server is up, for every site:
{site_commands}

Give {AUTHORITY} to every site. Keep all files that end in .key secret."""
