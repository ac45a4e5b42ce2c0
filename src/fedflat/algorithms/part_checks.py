"""Calls of a part's methods that turn mistakes in a user's part into clear errors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedflat.algorithms.slot import LocalContext
from fedflat.algorithms.state import State
from fedflat.errors import UserError


def finish(part: Any, ctx: LocalContext) -> tuple[State, State]:
    """Call ``part.finish``; returns what the client keeps and what it sends."""
    state, sent = _call_for_pair(part, "finish", ctx, returns="finish: what the client keeps and what it sends")
    return state, require_declared(part, sent)


def aggregate(part: Any, *arguments: object) -> tuple[Tensor, State]:
    """Call ``part.aggregate`` of a drift correction or server optimiser; returns a model and the state that changed."""
    methods = "step or aggregate" if hasattr(part, "step") else "aggregate"
    model, state = _call_for_pair(
        part, "aggregate", *arguments, returns=f"{methods}: a model and the state that changed ({{}} if none)"
    )
    return model, state


def _call_for_pair(part: Any, method: str, *arguments: object, returns: str) -> Any:
    """Call a method that returns two values.

    Args:
        part: the part.
        method: name of its method.
        arguments: its arguments.
        returns: the name of the method and the two values in words, for the error message.

    Raises:
        UserError: the method returns something else, or reads a field that the part does not declare.
    """
    name = type(part).__name__
    try:
        result = getattr(part, method)(*arguments)
    except KeyError as error:
        raise UserError(
            f"{name} reads {error}, which does not exist; declare what the server keeps in on_server, what clients "
            "keep in on_client and what they send in sends"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(f"{name} must return two values from {returns}")
    return result


def require_declared(part: Any, sent: State) -> State:
    """Return what a client sends for a part; raises ``UserError`` unless ``sends`` declares exactly these fields."""
    name, declared = type(part).__name__, {field.name for field in part.sends()}
    for field in sent.keys() - declared:
        raise UserError(f"{name} sends '{field}', which {name}.sends does not declare; add scalar('{field}') or vector")
    for field in declared - sent.keys():
        raise UserError(f"{name}.sends declares '{field}', but clients do not send it; return it in measure or finish")
    return sent
