"""One round, independent of the hardware: the engine interface, sampling, a client's local training, and the reduction.

Imports ``fedflat.engines.problem`` only.
"""
