"""Deployment to real sites on Flower; a Flower project needs only ``server_app`` and ``client_app``.

``Strategy`` brings fedflat's server steps and averages to an existing Flower app.

Layers, bottom to top: ``settings`` < ``flower`` < ``trust`` < ``site`` < ``server``; ``strategy`` uses only ``flower``.
Below them: experiment and engines.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.deploy.server.app import server_app
    from fedflat.deploy.site.app import client_app
    from fedflat.deploy.strategy import Strategy

__all__ = ["Strategy", "client_app", "server_app"]
_MODULES = {"Strategy": "strategy", "client_app": "site.app", "server_app": "server.app"}


def __getattr__(name: str) -> Any:
    """Import an app or the strategy on first use, so that commands which only write a project do not need Flower."""
    if name not in __all__:
        raise AttributeError(f"module 'fedflat.deploy' has no attribute '{name}'")
    from fedflat.deploy.flower.version import require_flower

    require_flower()
    return getattr(importlib.import_module(f"fedflat.deploy.{_MODULES[name]}"), name)
