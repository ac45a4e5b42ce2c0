"""Generalisation bounds of the FedSWA paper and the constants they need. Imports nothing from the other
sub-packages.
"""
