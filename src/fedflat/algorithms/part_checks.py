"""Calls a part's methods, and turns mistakes in a user-defined part into clear errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from traceback import walk_tb
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from fedflat.algorithms.slot import LocalContext, Slot
from fedflat.algorithms.state import State
from fedflat.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


def finish(part: Any, ctx: LocalContext) -> tuple[State, State]:
    """Call ``part.finish``; returns what the client keeps and what it sends."""
    state, sent = _require_pair(part, part.finish(ctx), "finish: what the client keeps and what it sends")
    return require_declared(part, "on_client", state, ctx.y), require_sent(part, sent, ctx.y)


def aggregate(part: Any, *arguments: object) -> tuple[Tensor, State]:
    """Call ``part.aggregate`` of a drift correction or server optimiser; returns a model and the state that changed."""
    methods = "step or aggregate" if hasattr(part, "step") else "aggregate"
    result = part.aggregate(*arguments)
    model, state = _require_pair(part, result, f"{methods}: a model and the state that changed ({{}} if none)")
    return model, require_declared(part, "on_server", state)


def _require_pair(part: Any, result: Any, returns: str) -> Any:
    """Return the result of a part's method; raises ``UserError`` unless it is a pair, which ``returns`` describes."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(f"{type(part).__name__} must return two values from {returns}")
    return result


def require_declared(part: Any, method: str, state: State, model: Tensor | None = None) -> State:
    """Return state or messages of a part; raises ``UserError`` if they are not declared, or have another shape.

    Args:
        part: the part.
        method: the method that declares the fields: ``on_server``, ``on_client`` or ``sends``.
        state: fields that the part returned.
        model: a model of shape (P,), to check the shapes; those of server state may change, so they are not checked.
    """
    name, declared = type(part).__name__, {field.name: field for field in getattr(part, method)()}
    if not isinstance(state, Mapping):
        raise UserError(
            f"{name} returns {state!r} for the fields of {name}.{method}; return a dictionary, {{}} if none"
        )
    for key, value in state.items():
        if key not in declared:
            hint = _nearest(key, declared) or f"add vector('{key}') or scalar('{key}') there"
            raise UserError(
                f"{name} returns '{key}', but {name}.{method} declares {_listed(declared) or 'nothing'}; {hint}"
            )
        if model is not None:
            expected = tuple(model.shape) if declared[key].vector else ()
            shape = tuple(getattr(value, "shape", ()))  # a scalar may be a Python number
            if shape != expected:
                raise UserError(
                    f"'{key}' of {name} has shape {shape}, but {name}.{method} declares shape {expected}; "
                    "declare vectors with vector(...) and numbers with scalar(...)"
                )
    return state


def require_begun(part: Any, local: State, changed: State) -> None:
    """Raise a ``UserError`` if a step changes local state that the part's ``begin`` did not return."""
    for name in changed:
        if name not in local:
            raise UserError(
                f"{type(part).__name__} changes '{name}' in a local step, but begin does not return it; return its "
                "first value there"
            )


def require_sent(part: Any, sent: State, model: Tensor) -> State:
    """Return what a client sends for a part; raises ``UserError`` unless ``sends`` declares exactly these fields."""
    name = type(part).__name__
    require_declared(part, "sends", sent, model)
    for field in part.sends():
        if field.name not in sent:
            raise UserError(
                f"{name}.sends declares '{field.name}', but clients do not send it; return it in measure or finish"
            )
    return sent


def explain_key_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that calls parts: if a part reads a key that does not exist, the error lists the others."""

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the decorated function."""
        try:
            return function(*args, **kwargs)
        except KeyError as error:
            message = _explanation(error)
            if message is None:
                raise
            raise UserError(message) from error

    return explained


def _explanation(error: KeyError) -> str | None:
    """Say which part reads which missing key, and list its declared ones; None if the error is not in a part."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    in_parts = [index for index, frame in enumerate(frames) if isinstance(frame.f_locals.get("self"), Slot)]
    if not in_parts or any("fedflat.engines" in frame.f_globals["__name__"] for frame in frames[in_parts[-1] :]):
        return None  # raised elsewhere, perhaps in the user's model, whose gradient a part computes
    frame = frames[in_parts[-1]]
    part, key = frame.f_locals["self"], str(error.args[0])
    contexts = [value for value in frame.f_locals.values() if isinstance(value, LocalContext)]
    names = {
        "server state": [field.name for field in part.on_server()],
        "client state": [field.name for field in part.on_client()],
        "messages": [field.name for field in part.sends()],
        "values from begin": list(dict.fromkeys(name for ctx in contexts for name in {**ctx.local, **ctx.drift})),
    }
    known = "; ".join(f"{kind}: {_listed(keys)}" for kind, keys in names.items() if keys)
    advice = "declare what the server keeps in on_server, what clients keep in on_client and what they send in sends"
    hint = _nearest(key, {name for keys in names.values() for name in keys}) or advice
    method = f"{type(part).__name__}.{frame.f_code.co_name}"
    return f"{method} reads '{key}', which does not exist; {hint}" + (f" (available: {known})" if known else "")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Suggest a similar name; empty if there is none."""
    close = get_close_matches(name, sorted(set(known) - {name}), n=1)
    return f"did you mean '{close[0]}'?" if close else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
