"""Matplotlib and Plotly figures: curves, landscapes, spectra, datasets, partitions, clients."""

from fedflat.display import show_figures

show_figures()
