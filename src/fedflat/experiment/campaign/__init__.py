"""Several runs at once: comparisons, sweeps, searches and branches, in one process, in several or on a Ray cluster.

Also estimates the cost of runs. May import the rest of ``fedflat.experiment`` and lower layers.
"""
