"""The site's half of a federation: Flower's ClientApp, local training, and the state that a client keeps on disk.

Imports ``fedflat.deploy.trust``, ``fedflat.deploy.flower`` and ``fedflat.deploy.settings``.
"""
