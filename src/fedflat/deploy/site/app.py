"""Flower's ClientApp: answers the server's messages with the work of a ``Site``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedflat.data import Dataset
from fedflat.deploy.flower.wire import ARRAYS, GRADIENT, WORDS, content, joined_as, refusal, tensors_of
from fedflat.deploy.settings import experiment_of
from fedflat.deploy.site.client_memory import require_writable
from fedflat.deploy.site.site import Site
from fedflat.deploy.trust.privacy import Mod, apply_mods, check_mods
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError

HELD, HELD_ROUND = "fedflat", "fedflat-round"
"""Keys in a node's context: what it received in the first phase of a round (not sent again), and which round."""


def client_app(
    data: Callable[[int], Dataset] | None = None,
    model: Callable[[], nn.Module] | None = None,
    task: Callable[[], Task] | None = None,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """The ClientApp of a federation's sites.

    Args:
        data: returns a site's own data, given its number; by default a site takes its part of the config's dataset.
        model: returns a user-supplied model.
        task: returns a user-supplied task.
        mods: Flower's mods for differential privacy, such as ``LocalDpMod`` and ``fixedclipping_mod``; they are applied
            to what a site sends.
    """
    app = ClientApp()

    def site(context: Context) -> Site:
        client = _client_number(context)
        config = experiment_of(context.run_config)
        return Site(config, client, state_folder(context), data and data(client), model and model(), task and task())

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return _answer(message, lambda: _hello(site(context), message, mods))

    @app.train("gradient")
    def gradient(message: Message, context: Context) -> Message:
        return _answer(message, lambda: _gradient(site(context), message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        work = lambda: _answer(message, lambda: _train(site(context), message, context))  # noqa: E731
        return apply_mods(mods, message, context, work)

    @app.evaluate()
    def score(message: Message, context: Context) -> Message:
        return _answer(message, lambda: _score(site(context), message))

    return app


def state_folder(context: Context) -> Path:
    """Where a node saves its client's state: ``--node-config state=...``, $FEDFLAT_STATE or ~/.fedflat/state."""
    folder = context.node_config.get("state") or os.environ.get("FEDFLAT_STATE") or "~/.fedflat/state"
    return Path(str(folder)).expanduser().absolute()


def _client_number(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if not isinstance(number, int):
        raise UserError(
            "this node does not say which client it is; start its SuperNode with --node-config 'partition-id=N'"
        )
    return number


def _answer(message: Message, work: Callable[[], RecordDict]) -> Message:
    """The answer to a message; a ``UserError`` is sent to the server as a refusal."""
    try:
        records = work()
    except UserError as error:
        records = refusal(str(error))
    return Message(records, reply_to=message)


def _words(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records[WORDS])


def _hello(site: Site, message: Message, mods: Sequence[Mod]) -> RecordDict:
    identity = site.identity()
    check_mods(mods, site.problem, site.training)
    if site.has_state:
        require_writable(site.folder)
    differences = identity.differences(_words(message), "at the node", "at the server")
    if differences:
        raise UserError(
            f"client {site.client} cannot take part: {differences}; use the same experiment and version on both sides"
        )
    return content(words={**identity.values(), **joined_as(site.client, len(site.indices))})


def _check_joined_as(site: Site, words: Mapping[str, Any]) -> None:
    """Refuse a task if this node was restarted since it joined, as another client or with other data."""
    if joined_as(site.client, len(site.indices)).items() <= words.items():
        return
    raise UserError(
        f"this node is client {site.client} with {len(site.indices)} examples, but joined as client {words['client']} "
        f"with {words['examples']}; it was restarted and waits for a new greeting"
    )


def _gradient(site: Site, message: Message, context: Context) -> RecordDict:
    words, arrays = _words(message), message.content.array_records[ARRAYS]
    _check_joined_as(site, words)
    context.state[HELD], context.state[HELD_ROUND] = arrays, ConfigRecord({"round": int(words["round"])})
    gradient, numbers = site.full_gradient(int(words["round"]), tensors_of(arrays, site.problem.device))
    return content({GRADIENT: gradient}, numbers=numbers)


def _train(site: Site, message: Message, context: Context) -> RecordDict:
    words, device = _words(message), site.problem.device
    _check_joined_as(site, words)
    received = tensors_of(message.content.array_records[ARRAYS], device)
    if GRADIENT in received:
        if HELD not in context.state or context.state.config_records[HELD_ROUND]["round"] != words["round"]:
            raise UserError(
                "this node was restarted during the round and lost what it received; it waits for the next round"
            )
        received |= tensors_of(context.state.array_records[HELD], device)
    sent, numbers = site.train(str(words["experiment"]), int(words["round"]), int(words["before"]), received)
    return content(sent, numbers=numbers)


def _score(site: Site, message: Message) -> RecordDict:
    return content(numbers=site.score(tensors_of(message.content.array_records[ARRAYS], site.problem.device)))
