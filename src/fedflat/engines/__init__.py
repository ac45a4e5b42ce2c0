"""Engines train cohorts of clients and evaluate models, behind one interface: ``Engine`` in ``round/contract.py``.

Layers, bottom to top: ``problem`` < ``round`` < ``cpu``, ``gpu`` < ``ray``. Below them: algorithms, data and models.
"""
