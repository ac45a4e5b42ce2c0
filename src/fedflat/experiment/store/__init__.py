"""Run folders: configs, metrics, checkpoints, client states, models, locks and exports.

Imports the configuration, engines, models and data; nothing from ``setup``, ``analysis``, ``campaign`` or ``run``.
"""
