"""Measurements on trained models: evaluation, replayed rounds, landscapes, stability and theory.

Works on finished or running runs. May import ``experiment.setup``, ``experiment.store``, ``engines`` and ``flatness``.
"""
