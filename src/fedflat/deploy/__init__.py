"""Deployment to real sites on Flower; a Flower project needs only ``server_app`` and ``client_app``.

Layers, bottom to top: ``settings`` < ``flower`` < ``trust`` < ``site`` < ``server``. Below them: experiment and
engines.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.deploy.server.app import server_app
    from fedflat.deploy.site.app import client_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Import an app on first use, so that commands which only write a project do not need Flower."""
    if name not in __all__:
        raise AttributeError(f"module 'fedflat.deploy' has no attribute '{name}'")
    from fedflat.deploy.flower.version import require_flower

    require_flower()
    package = "server" if name == "server_app" else "site"
    return getattr(importlib.import_module(f"fedflat.deploy.{package}.app"), name)
