"""Run the notebooks and store their outputs, which the documentation shows.

make notebooks
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def main() -> None:
    """Run every notebook in an empty folder and write it with its outputs."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(
                notebook, timeout=600, kernel_name="python3", resources=resources, record_timing=False
            ).execute()
        notebook.metadata["language_info"] = {"name": "python"}  # the rest depends on the machine
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
