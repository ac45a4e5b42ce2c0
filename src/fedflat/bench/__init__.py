"""Measures seconds per round of contenders, the implementations of federated training that a benchmark compares.

Contenders are fedflat's engines, other simulators such as Flower, the plain loop (a straightforward PyTorch loop over
clients), and the bound (the least time that a round could take).

May import ``fedflat.experiment`` and lower layers; only the CLI imports it.
"""
