"""YAML without its traps: duplicate keys, excessive nesting and exploding aliases are errors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

MAX_DEPTH = 50
MAX_NODES = 1_000_000
"""Values in a document after all aliases are replaced by what they stand for."""
MERGE_TAG = "tag:yaml.org,2002:merge"
"""Tag of the key in ``<<: *other``, which takes over the entries of another mapping."""
_BASE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast


class _Loader(_BASE_LOADER):  # type: ignore[misc,valid-type]
    """A safe loader that rejects duplicate keys, of which YAML would silently use the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE_TAG:  # keys of the merged mapping may be given again
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key} is given twice", problem_mark=key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        values: dict[Any, Any] = super().construct_mapping(node, deep)
        return values


def load_yaml(text: str) -> Any:
    """Parse a YAML document; raises a ``yaml.YAMLError`` if it is malformed, or too deep or large to be a config.

    >>> load_yaml("{a: [1, 2]}")
    {'a': [1, 2]}
    """
    _check_depth(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MAX_NODES:
            raise yaml.YAMLError(f"its aliases stand for more than {MAX_NODES} values")
        return loader.construct_document(node)
    except (ValueError, OverflowError) as error:  # e.g. the date 2020-99-99
        raise yaml.YAMLError(str(error)) from None
    except (LookupError, AttributeError, TypeError) as error:  # raised by PyYAML, e.g. for !!bool x
        raise yaml.YAMLError("a value does not fit its tag (!!)") from error
    finally:
        loader.dispose()


def _check_depth(text: str) -> None:
    """Reject deep nesting, which would exhaust the stack when the document is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_BASE_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} levels deep")


def _size(node: Any, sizes: dict[int, int]) -> int:
    """Number of values in a node, with aliases replaced; ``sizes`` holds the sizes of nodes that were counted."""
    if id(node) in sizes:
        if not sizes[id(node)]:  # still being counted
            raise yaml.YAMLError("an alias contains itself")
        return sizes[id(node)]
    sizes[id(node)] = 0
    children = [] if isinstance(node, yaml.ScalarNode) else node.value  # of a mapping: (key, value) pairs
    parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
    sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]
