"""A canary: Flower's private modules and options on which fedflat depends are as expected in the installed version."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedflat[flower]'")

from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.types import ExecutionSpec

from fedflat.deploy.flower.forks import ENTRY_POINTS
from fedflat.deploy.flower.gateway import FORWARDED
from fedflat.deploy.flower.version import NEWEST, OLDEST, check_version
from fedflat.deploy.trust.certificates import start_commands
from fedflat.errors import UserError

PRIVATE = {
    "flwr.common.config": ("parse_config_args",),
    "flwr.supercore.constant": ("TASK_TYPE_TO_APPIO_API_ADDRESS_ARG", "TASK_TYPE_TO_COMMAND", "TaskType"),
    "flwr.supercore.superexec.run_superexec": ("get_executor", "run_superexec"),
    "flwr.supercore.superexec.executor.subprocess_executor": ("SubprocessExecutor",),
    "flwr.supercore.superexec.executor.types": ("ExecutionSpec", "LaunchResult"),
    "flwr.supercore.tls": ("get_client_tls_args",),
}
"""Names that fedflat imports from modules that Flower does not document."""


def test_private_names_exist() -> None:
    for module, names in PRIVATE.items():
        for name in names:
            assert hasattr(import_module(module), name), f"{module}.{name}"
    for entry_point in ENTRY_POINTS.values():
        module, name = entry_point.split(":")
        assert callable(getattr(import_module(module), name))
    assert "parent_pid" in inspect.signature(run_superexec.run_superexec).parameters
    used = {"task_type", "runtime_api_address", "token", "insecure", "root_certificates_path", "parent_pid"}
    assert used <= set(inspect.signature(ExecutionSpec).parameters)


def test_the_list_of_private_names_is_complete() -> None:
    """Public are flwr.app, flwr.clientapp and flwr.serverapp."""
    source = Path(__file__).parents[2] / "src" / "fedflat" / "deploy"
    imported = {
        line.split()[1]
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("from flwr.")
    }
    private = {module for module in imported if module.split(".")[1] not in ("app", "clientapp", "serverapp")}
    assert private <= PRIVATE.keys() | {"flwr.supercore.superexec"}


def test_routes_of_supernodes_pass_the_gateway() -> None:
    """Every request of a SuperNode is a single name below the forwarded path."""
    router = import_module("flwr.superlink.routers.fleet.router").router
    names = [route.path.removeprefix("/v1/fleet/") for route in router.routes]
    assert len(names) >= 10
    assert all(name.replace("-", "").isalpha() and name.islower() for name in names), names
    assert "/v1/fleet/{path}" in FORWARDED


def test_printed_options_exist() -> None:
    """The commands that fedflat prints have no option that Flower lacks."""
    commands = start_commands(Path("/c"), "server.example.org", 1).splitlines()
    for program, module in {
        "flower-superlink": "flwr.superlink.cli.flower_superlink:_parse_args_run_superlink",
        "flower-supernode": "flwr.supernode.cli.flower_supernode:_parse_args_run_supernode",
    }.items():
        name, function = module.split(":")
        known = import_module(name)
        options = {option for action in getattr(known, function)()._actions for option in action.option_strings}
        line = next(line for line in commands if line.split()[:1] == [program])
        used = {word for word in line.split() if word.startswith("--")}
        assert used <= options, used - options
        assert "--host" not in used
    assert "--database" in commands[2]


def test_versions_have_limits() -> None:
    for version in (OLDEST, NEWEST):
        check_version(".".join(map(str, version)) + ".3")
    for version in ("1.40.0", f"{NEWEST[0]}.{NEWEST[1] + 1}.0", "2.0.0"):
        with pytest.raises(UserError, match=r"needs 1\.41 to 1\.42"):
            check_version(version)
