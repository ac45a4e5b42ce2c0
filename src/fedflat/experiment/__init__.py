"""Experiments: configuration, the training run, run folders, analysis of runs and campaigns of many runs.

``setup`` and ``store`` come first, then ``analysis``, ``run``, ``rounds`` and ``campaign``.
Imports the engines, algorithms, data, models and flatness; nothing from ``reporting``, ``papers`` or ``cli``.
"""
