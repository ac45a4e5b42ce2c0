"""Run folders: configs, metrics, checkpoints, client states, models, locks and exports.

May import ``stopping``, the configuration, ``engines`` and lower layers; nothing else of ``experiment``.
"""
