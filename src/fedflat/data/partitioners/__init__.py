"""Partitioners, which distribute a training set over clients, one module per family.

To add one, write a module here and name it in ``registry.py``.
"""
