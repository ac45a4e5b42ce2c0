"""The optimisation problem: model, task, data, and the gradient of one batch at any flat weight vector.

Imports no other sub-package of ``fedflat.engines``.
"""
