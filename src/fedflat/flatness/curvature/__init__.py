"""Hessian spectrum: operators, Lanczos, power iteration, trace and density estimates, second-order layers.

May import ``fedflat.flatness.objective`` and its helpers; nothing from the other sub-packages.
"""
