"""The loop engine: clients train one after another, in this process or in worker processes.

Imports ``fedflat.engines.round`` and ``fedflat.engines.problem``.
"""
