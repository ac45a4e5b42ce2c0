"""A complete, small Flower project: what ``fedflat deploy init`` writes."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from fedflat.errors import UserError
from fedflat.experiment.store.atomic_files import create_folder, write_whole

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

# The experiment: every key is a setting of fedflat (see fedflat settings). flwr run --run-config 'algorithm="scaffold"' changes those
# that stand here.
[tool.flwr.app.config]
algorithm = "{algorithm}"
model = "mlp"
seed = 0

[tool.flwr.app.config.data]
name = "digits"
partition = "dirichlet(alpha=0.5)"
clients = {clients}

[tool.flwr.app.config.federation]
clients_per_round = {clients}

[tool.flwr.app.config.training]
rounds = 5
epochs = 1
batch = 10
rate = 0.05

[tool.flwr.app.config.deploy]
out = "runs/{name}"  # from where the SuperLink was started
minimum = {minimum}  # least number of accepted updates for a round to count
timeout = 600.0  # seconds that a client has for a round
wait = 120.0  # seconds to wait for nodes that are not there yet
bound = 30.0  # refuse an update whose norm is this many times the cohort's median
score = true  # in the end, ask every site for the model's score on its own held-out data
"""

SERVER = '''\
"""The server: it never sees the sites' data."""

from fedflat.deploy import server_app

from {package} import plug

app = server_app(plug.held_out, plug.model)
'''

CLIENT = '''\
"""A site: it trains on its own data, and keeps to itself what its client remembers."""

from fedflat.deploy import client_app

from {package} import plug

app = client_app(plug.site_data, plug.model)
'''

PLUG = '''\
"""Where to plug in your own data and your own model. As it is, every site takes its part of the dataset that pyproject.toml names."""

# Your own data: a function from the number of a site (its partition-id) to a fedflat.data.Dataset. Its training examples are what the
# site trains on, its test examples what it holds out.
#
#     def site_data(number):
#         inputs, targets = read_my_files("/data/of/this/site")
#         return Dataset("mine", Examples(inputs[100:], targets[100:]), Examples(inputs[:100], targets[:100]), CLASSES)
site_data = None

# What the server evaluates on, when the sites have data of their own: a function without arguments to a Dataset of public or held-out
# examples, at least as many for training as there are sites (they are not trained on).
held_out = None

# Your own model: a function without arguments to a torch.nn.Module.
model = None
'''

README = """\
# {name}

`pyproject.toml` holds the experiment, `{package}/plug.py` is the place for your own data and model.

A federation: one SuperLink, a SuperNode at every site (here on one machine, each in a terminal of its own):

    flower-superlink --insecure --disable-runtime-dependency-installation
{supernodes}
    flwr run . sites --stream

or the same project in Flower's simulation (`pip install 'flwr[simulation]'`), without any SuperNode:

    flower-superlink --insecure --simulation --disable-runtime-dependency-installation
    flwr run . sites --stream --federation-config 'num-supernodes={clients}'

where `sites` stands in Flower's configuration (`flwr config list` says where that file is):

    [superlink.sites]
    address = "127.0.0.1:8000"
    insecure = true

Then `fedflat show runs/{name}`.

`--insecure` is for one machine. For more, `fedflat deploy certificates certificates --host SERVER` makes certificates and says how to start
everything with them, and `fedflat deploy check SERVER:8000 --root-certificates ca.crt` what keeps a site from its server.
"""


def write_project(folder: Path, algorithm: str, clients: int) -> list[Path]:
    """Write a Flower project into a new folder; the files that it consists of."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; choose another folder for the project")
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-")
    if not name or not name[0].isalpha():
        raise UserError(f"{folder.name!r} is no name for a project; expected one that begins with a letter")
    node = (
        "    flower-supernode --insecure --superlink 127.0.0.1:8000 --port {port} --node-config 'partition-id={number}'"
    )
    nodes = "\n".join(node.format(port=8100 + number, number=number) for number in range(clients))
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or getattr(find_spec(package), "origin", None):
        raise UserError(
            f"{folder.name!r} is no name for a project: Python has a {package} of its own, which it would hide; choose another"
        )
    words = {
        "name": name,
        "package": package,
        "algorithm": algorithm,
        "clients": clients,
        "minimum": min(2, clients),
        "supernodes": nodes,
    }
    inside = folder / package
    create_folder(inside)
    texts = {
        folder / "pyproject.toml": PYPROJECT,
        folder / "README.md": README,
        inside / "__init__.py": '"""A federation of sites."""\n',
        inside / "server.py": SERVER,
        inside / "client.py": CLIENT,
        inside / "plug.py": PLUG,
    }
    for path, text in texts.items():
        write_whole(path, text.format(**words))
    return list(texts)
