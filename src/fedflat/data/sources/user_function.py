"""User data from a function, registered with ``fedflat.register``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import getdoc
from pathlib import Path

from fedflat.data.dataset import Dataset
from fedflat.data.sources.source import DatasetSource
from fedflat.errors import UserError


@dataclass(frozen=True)
class FunctionSource(DatasetSource):
    """A dataset that a function returns.

    Attributes:
        function: takes no arguments; its result is renamed to the registered name.
    """

    function: Callable[[], Dataset] = field(kw_only=True)

    def read(self, data_dir: Path) -> Dataset:
        """Call the function, and give its dataset the registered name; the interface requires ``data_dir``."""
        dataset = self.function()
        if not isinstance(dataset, Dataset):
            raise UserError(
                f"the function of the dataset '{self.name}' returns a {type(dataset).__name__}; "
                "expected the result of fedflat.data.from_arrays, from_clients or from_torch"
            )
        return replace(dataset, name=self.name)


def function_source(name: str, function: Callable[[], Dataset]) -> FunctionSource:
    """Return a source for the dataset that ``function`` returns; its docstring's first line is the title in lists."""
    title = (getdoc(function) or "your own data").splitlines()[0]
    return FunctionSource(name, title, function=function)
