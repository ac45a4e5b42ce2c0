"""From a config to the objects of a run: problem, network, initial weights, training and engine.

Imports the configuration, engines, algorithms, data and models; nothing else of ``experiment``.
"""
