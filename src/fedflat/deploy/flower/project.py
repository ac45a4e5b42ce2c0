"""The Flower project that ``fedflat deploy init`` writes."""

from __future__ import annotations

import keyword
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

from fedflat.errors import UserError
from fedflat.experiment.store.files import create_folder, write_atomically

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation of sites that train one model with fedflat."
license = "Apache-2.0"
dependencies = ["fedflat[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "{name}"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# The experiment: every key is a setting of fedflat (list them with fedflat settings).
# Override settings for a single run; put strings in double quotes and the whole argument in single quotes:
#   flwr run {folder} sites --run-config 'algorithm="scaffold" training.rounds=20'
# Flower accepts only keys that are in this file; for others it says "Invalid run configuration". Add them here first.
[tool.flwr.app.config]
algorithm = "{algorithm}"
model = "mlp"
seed = 0

[tool.flwr.app.config.data]
dataset = "digits"
partition = "dirichlet(alpha=0.5)"
clients = {clients}

[tool.flwr.app.config.federation]
clients_per_round = {clients}
{weighting}
[tool.flwr.app.config.training]
rounds = 5
{local_work}
batch_size = 10
lr = 0.05

[tool.flwr.app.config.deploy]
out = "runs/{name}"  # relative to where the SuperLink was started, like sites
sites = "certificates/sites.txt"  # who may take part, written by fedflat deploy certificates; "any": every node
minimum = {minimum}  # minimum number of accepted updates per round
timeout = 600.0  # time limit of a client in a round, in seconds
wait = 120.0  # seconds to wait for nodes that have not connected yet
bound = 30.0  # reject an update whose norm is more than this many times the cohort's median norm
validation = false  # at every evaluation, ask sites for the model's metrics on their held-out data
track = "none"  # log every evaluation to tensorboard, mlflow or wandb
score = true  # finally, ask every site for the model's score on its held-out data
secure_aggregation = {secure_aggregation}  # true: the server sees only sums of what sites send
"""

SERVER = '''\
"""The server: it never sees the sites' data."""

from fedflat.deploy import server_app

from {package} import hooks

app = server_app(hooks.held_out, hooks.model)
'''

CLIENT = '''\
"""A site: it trains on its own data and keeps its client's state to itself."""

from fedflat.deploy import client_app

from {package} import hooks

app = client_app(hooks.site_data, hooks.model)
'''

HOOKS = '''\
"""Your own data and model; by default, every site takes its part of the dataset in pyproject.toml."""

from torch import nn

from fedflat.data import Dataset, load

# Your own data: a function from the number of a site (its partition-id) to its dataset. If it takes a second argument,
# that is the dictionary of the site's --node-config.
# The site trains on its training examples and holds out its test examples. Use absolute paths.
#
#     def site_data(site: int) -> Dataset:
#         return load("arrays(path=/data/mine.npz)")  # the same path at every site, with that site's data
site_data = None

# What the server evaluates on if sites have their own data: a function that returns a dataset of public examples.
# It needs at least as many training examples as there are sites; they are not trained on.
#
#     def held_out() -> Dataset:
#         return load("arrays(path=/data/public.npz)")
held_out = None

# Your own model: a function that returns it.
#
#     def model() -> nn.Module:
#         return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
model = None
'''

README = """\
# {name}

`pyproject.toml` holds the experiment; add your own data and model in `{package}/hooks.py`.

A federation has one SuperLink and a SuperNode at every site. Run these commands in the folder that contains this
project:

1. `fedflat deploy certificates certificates --sites {clients}` creates certificates, a key for every site and the list
   of sites. It prints the commands that start the SuperLink and the SuperNodes with TLS, each in its own terminal. If
   sites are on other machines, use `--host SERVER` instead of `--sites`: they create their own keys, and connect to the
   gateway, whose command is printed as well.
2. `fedflat deploy check {folder}` checks settings, hooks and data; `--site 0` also loads the data of site 0.
3. `flwr run {folder} sites --stream` starts the run. It exits with 0 even if the run fails;
   `flwr list sites --format json` shows the status and the reason.
4. `fedflat show runs/{name}` shows the result.

If a site cannot connect, run `fedflat deploy check SERVER:8443 --root-certificates ca.crt` there.

## Without certificates, on one machine only

`--insecure` and `deploy.sites="any"` let every process on the machine take part:

    flower-superlink --insecure --database superlink.db --disable-runtime-dependency-installation
{supernodes}
    flwr run {folder} sites --stream --run-config 'deploy.sites="any"'

Or run the project in Flower's simulation (`pip install 'flwr[simulation]'`), without SuperNodes:

    flower-superlink --insecure --simulation --disable-runtime-dependency-installation
    flwr run {folder} sites --stream --run-config 'deploy.sites="any"' --federation-config 'num-supernodes={clients}'

Both need this entry in Flower's configuration (`flwr config list` shows where the file is):

    [superlink.sites]
    address = "127.0.0.1:8000"
    insecure = true
"""


def write_project(folder: Path, algorithm: str, clients: int, secure_weighting: str | None = None) -> list[Path]:
    """Write a Flower project into a new or empty folder.

    Args:
        folder: the folder, whose name becomes the name of the project.
        algorithm: the algorithm in the project's config.
        clients: number of sites.
        secure_weighting: weights of sites in secure sums, ``samples`` or ``uniform``; None for no secure aggregation.

    Returns:
        The files written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another folder for the project")
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-")
    if not name or not name[0].isalpha():
        raise UserError(f"{folder.name!r} is not a valid project name; expected one that begins with a letter")
    package = name.replace("-", "_")
    # Importable modules have an origin; a mere folder of this name has a spec, but no origin.
    if keyword.iskeyword(package) or getattr(find_spec(package), "origin", None):
        raise UserError(
            f"{folder.name!r} is not a valid project name: it would hide Python's own {package}; choose another"
        )
    supernodes = [
        f"    flower-supernode --insecure --superlink 127.0.0.1:8000 --port {8100 + number} "
        f"--node-config 'partition-id={number}'"
        for number in range(clients)
    ]
    values = {
        "name": name,
        "folder": shlex.quote(folder.absolute().name),
        "package": package,
        "algorithm": algorithm,
        "clients": clients,
        "minimum": min(2, clients),
        "supernodes": "\n".join(supernodes),
        "weighting": f'weighting = "{secure_weighting}"\n' if secure_weighting else "",
        "local_work": (
            "local_steps = 20  # instead of local_epochs, so that all sites take the same number of steps"
            if secure_weighting
            else "local_epochs = 1"
        ),
        "secure_aggregation": "true" if secure_weighting else "false",
    }
    source = folder / package
    create_folder(source)
    texts = {
        folder / "pyproject.toml": PYPROJECT,
        folder / "README.md": README,
        source / "__init__.py": '"""A federation of sites."""\n',
        source / "server.py": SERVER,
        source / "client.py": CLIENT,
        source / "hooks.py": HOOKS,
    }
    for path, text in texts.items():
        write_atomically(path, text.format(**values))
    return list(texts)
