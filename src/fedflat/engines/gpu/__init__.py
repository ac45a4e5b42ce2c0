"""The lanes engine: clients train side by side on one GPU, each replaying a captured local step on its own CUDA stream.

Imports ``fedflat.engines.round`` and ``fedflat.engines.problem``.
"""
