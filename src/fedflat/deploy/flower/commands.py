"""The commands that start a federation, as a user would type them."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedflat.deploy.trust.certificates import AUTHORITY, ITSELF, SERVER, SERVER_KEY

PORT, FIRST_NODE_PORT = 8000, 8100


def secure_federation(folder: Path, host: str, sites: int) -> str:
    """How to start a federation with the certificates of a folder."""
    here = {name: shlex.quote(str(folder / name)) for name in (AUTHORITY, SERVER, SERVER_KEY)}
    where = "" if host in ITSELF else "--host 0.0.0.0 "
    link = (
        f"flower-superlink {where}--port {PORT} --disable-runtime-dependency-installation --enable-supernode-auth "
        f"--ssl-ca-certfile {here[AUTHORITY]} --ssl-certfile {here[SERVER]} --ssl-keyfile {here[SERVER_KEY]}"
    )
    own = "\n".join(
        f"  flwr supernode register {shlex.quote(str(folder / f'site-{site}.key.pub'))} sites\n"
        f"  flower-supernode --superlink {host}:{PORT} --root-certificates {here[AUTHORITY]} --auth-supernode-private-key "
        f"{shlex.quote(str(folder / f'site-{site}.key'))} --port {FIRST_NODE_PORT + site} --node-config 'partition-id={site}'"
        for site in range(sites)
    )
    theirs = (
        f"  ssh-keygen -t ecdsa -b 384 -N '' -f site.key          # at the site, which gives site.key.pub to you\n"
        f"  flwr supernode register site.key.pub sites            # here\n"
        f"  flower-supernode --superlink {host}:{PORT} --root-certificates {AUTHORITY} --auth-supernode-private-key site.key "
        f"--port {FIRST_NODE_PORT} --node-config 'partition-id=N'  # at the site, which has {AUTHORITY} from you"
    )
    return f"""
The server:
  {link}

In Flower's configuration (flwr config list says where it is) of whoever starts runs:
  [superlink.sites]
  address = "{host}:{PORT}"
  root-certificates = "{folder / AUTHORITY}"

Every site, once the server runs:
{own or theirs}

Give {AUTHORITY} to every site. Keep every file that ends in .key to yourself."""
