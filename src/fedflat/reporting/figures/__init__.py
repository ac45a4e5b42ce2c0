"""Matplotlib and Plotly figures: curves, landscapes, spectra, partitions, clients."""
