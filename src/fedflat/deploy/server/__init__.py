"""The server's half of a federation: Flower's ServerApp, the engine that asks sites to train, nodes and ledger.

May import every other sub-package of ``fedflat.deploy``.
"""
