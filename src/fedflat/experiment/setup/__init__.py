"""Builds the objects of a run from its config: problem, network, initial weights, training and engine.

May import ``store``, ``stopping``, the configuration and lower layers; nothing else of ``experiment``.
"""
