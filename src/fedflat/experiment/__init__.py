"""Experiments: configuration, the training run, run folders, analysis of runs and campaigns of many runs.

Layers, bottom to top: ``store``, ``setup``, ``timeline``, ``analysis``, ``run``, ``rounds``, ``campaign``.
May import ``engines`` and lower layers; nothing from ``reporting``, ``papers`` or ``cli``.
"""
