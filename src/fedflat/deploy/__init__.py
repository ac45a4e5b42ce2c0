"""Deployment to real sites on Flower; a Flower project needs only ``server_app`` and ``client_app``.

``Strategy`` brings fedflat's algorithms to an existing Flower app, and ``client`` their local steps to its clients.

Layers, bottom to top: ``settings`` < ``flower`` < ``trust`` < ``site`` < ``server``, and ``flower`` < ``local_steps`` <
``strategy``.
Below them: experiment and engines.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.deploy.local_steps import LocalSteps, client
    from fedflat.deploy.server.app import server_app
    from fedflat.deploy.site.app import client_app
    from fedflat.deploy.strategy import Strategy

__all__ = ["LocalSteps", "Strategy", "client", "client_app", "server_app"]
_MODULES = {
    "LocalSteps": "local_steps",
    "Strategy": "strategy",
    "client": "local_steps",
    "client_app": "site.app",
    "server_app": "server.app",
}


def __getattr__(name: str) -> Any:
    """Import an object on first use, so that commands which only write a project do not need Flower."""
    if name not in __all__:
        raise AttributeError(f"module 'fedflat.deploy' has no attribute '{name}'")
    from fedflat.deploy.flower.version import require_flower

    require_flower()
    return getattr(importlib.import_module(f"fedflat.deploy.{_MODULES[name]}"), name)
