"""Measures seconds per round: fedflat's engines, the bound they aim at, a plain PyTorch loop and other simulators.

May import ``fedflat.experiment`` and lower layers; only the CLI imports it.
"""
