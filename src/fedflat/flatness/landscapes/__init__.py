"""Loss landscapes: random directions around a model, planes through three models, paths between two.

May import ``fedflat.flatness.objective`` and ``fedflat.models.layout``.
"""
