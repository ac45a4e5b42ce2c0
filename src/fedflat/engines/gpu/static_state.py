"""Copies of a client's state in memory that does not move, as captured graphs need it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fedflat.algorithms.algorithm import LocalState


def with_static_tensors(local: LocalState) -> LocalState:
    """Copy a client's state so that captured graphs can update it in place.

    Tensors that change between steps or between clients are cloned; all others are shared with the original. The start
    z changes between clients only if each has its own; otherwise it is the broadcast model of the whole cohort. Several
    fields may hold the same tensor, e.g. the contexts of drift and perturbation both hold the client's model y. These
    fields share one clone, so that an update of one reaches the others.
    """
    clones: dict[Any, Tensor] = {}
    changing_fields = {"y", "local", "drift", "step", "lr_sum", "first_lr", "next_lr"}
    if local.drift.received is not None:
        changing_fields.add("z")

    def clone_if_changing(path: Any, leaf: Any) -> Any:
        """Return a leaf of the client's state, or its clone if it is a tensor that changes.

        A tensor that is reachable by several paths is cloned once. ``path`` is (slot, field of ``LocalContext``, name).
        """
        field = path[1].name
        if not isinstance(leaf, Tensor) or field not in changing_fields:
            return leaf
        # The field ``drift`` of a context holds the same tensors as the drift's ``local``. The key omits the field, so
        # that both get the same clone.
        key = tuple(path[2:]) if field in ("local", "drift") else tuple(path[1:])
        return clones.setdefault((key, id(leaf)), leaf.clone())

    copy: LocalState = pytree.tree_map_with_path(clone_if_changing, local)
    return copy


def copy_changed(source: LocalState, target: LocalState) -> None:
    """Copy the tensors of ``source`` into the static tensors of ``target``, which has the same structure.

    Tensors that both share need no copy, and a target that occurs twice is written once.
    """
    copied = set()
    for new, old in zip(pytree.tree_leaves(source), pytree.tree_leaves(target), strict=True):
        if isinstance(new, Tensor) and new is not old and id(old) not in copied:
            old.copy_(new)
            copied.add(id(old))
