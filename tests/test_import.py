"""Importing fedflat is quick: nothing heavy comes along until it is used."""

import subprocess
import sys

import fedflat

HEAVY = (
    "matplotlib",
    "pandas",
    "plotly",
    "scipy",
    "sklearn",
    "pydantic",
    "typer",
    "rich",
    "yaml",
    "jinja2",
    "PIL",
    "ray",
    "flwr",
)


def loaded_by(code: str) -> set[str]:
    program = f"{code}; import sys; print(' '.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


def test_importing_fedflat_imports_nothing_heavy() -> None:
    assert not loaded_by("import fedflat") & set(HEAVY)


def test_completion_lists_the_api() -> None:
    assert {"run", "compare", "Result", "data", "flatness"} <= set(dir(fedflat))
    assert not {"importlib", "Any", "_NAMES"} & set(dir(fedflat))
    assert all(hasattr(fedflat, name) for name in dir(fedflat))


def test_algorithms_and_data_need_torch_and_numpy_alone() -> None:
    loaded = loaded_by("import fedflat.data; fedflat.algorithm('fedmoswa+asam')")
    assert {"torch", "numpy"} <= loaded
    assert not loaded & set(HEAVY)


def test_the_help_imports_neither_torch_nor_pydantic() -> None:
    loaded = loaded_by("from fedflat.cli.application import build; build(['--help'])")
    assert not loaded & ({"torch", "numpy", *HEAVY} - {"typer", "rich"})
