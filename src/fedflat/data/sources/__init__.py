"""Datasets, one module per file format or publisher; each module lists its datasets in ``SOURCES``.

To add a dataset, write a module here and name it in ``fedflat.data.registry``.
"""
