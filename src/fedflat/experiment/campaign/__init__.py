"""Several runs at once: comparisons, sweeps, searches and branches, in one process, in several or on a Ray cluster.

Also estimates what runs cost. May import the rest of ``fedflat.experiment`` and lower layers, but not reporting or the
CLI.
"""
