"""Trust between server and sites: certificates, matching experiments, inspection of updates.

Imports ``fedflat.deploy.flower`` and ``fedflat.deploy.settings``.
"""
