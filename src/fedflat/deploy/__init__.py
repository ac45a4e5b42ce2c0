"""Real sites: the same algorithms on Flower. ``server_app`` and ``client_app`` are all that a Flower project needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.deploy.server.app import server_app
    from fedflat.deploy.site.app import client_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    # When first used, so that a command which only writes a project does not need Flower.
    if name in __all__:
        from fedflat.deploy.flower.version import require_flower

        require_flower()
        return getattr(
            importlib.import_module(f"fedflat.deploy.{'server' if name == 'server_app' else 'site'}.app"), name
        )
    raise AttributeError(f"module 'fedflat.deploy' has no attribute '{name}'")
