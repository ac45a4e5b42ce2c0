"""Matplotlib and Plotly figures: curves, landscapes, spectra, datasets, partitions, clients."""

from fedflat.reporting.progress import notebook_shell


def enable_inline_figures() -> None:
    """Make the running notebook display matplotlib figures as images, as ``%matplotlib inline`` does."""
    shell = notebook_shell()
    if shell is not None:
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})


enable_inline_figures()
