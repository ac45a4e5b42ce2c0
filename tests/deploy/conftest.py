"""Skip helpers that need Flower if it is not installed, share problems, poll often, and forget projects."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import build_problem

collect_ignore = [] if find_spec("flwr") else ["direct.py"]


@pytest.fixture(autouse=True)
def problems_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the problem of each config once per test; a site builds it for every message, each in a new process."""
    built: dict[str, Any] = {}

    def build_once(config: Config, *user_objects: Any) -> Any:
        if any(one is not None for one in user_objects):
            return build_problem(config, *user_objects)
        key = config.model_dump_json()
        if key not in built:
            built[key] = build_problem(config)
        return built[key]

    monkeypatch.setattr("fedflat.deploy.site.site.build_problem", build_once)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for missing answers for milliseconds; the others are there at once."""
    monkeypatch.setattr("fedflat.deploy.server.nodes.POLL", 0.01)


@pytest.fixture(autouse=True)
def projects_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Unload the packages of projects, which ``flwr run`` imports; another test may write a project of that name."""
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(written):
            del sys.modules[name]
