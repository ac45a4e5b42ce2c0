"""The Ray engine: the cohort is spread over worker processes of a Ray cluster, each running a loop or lanes engine.

May import every other sub-package of ``fedflat.engines``.
"""
