"""Flower's ClientApp: messages in, messages out; the work is the site's."""

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
from fedflat.deploy.server.settings import experiment_of
from fedflat.deploy.site.client_memory import require_writable
from fedflat.deploy.site.site import Site, own_device
from fedflat.deploy.trust.privacy import Mod, refuse_mods, through
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError

HELD, HELD_ROUND = "fedflat", "fedflat-round"
"""In a node's context: what it received in the first of a round's two phases, so that it is not sent twice; and of which round."""


def client_app(
    data: Callable[[int], Dataset] | None = None,
    model: Callable[[], nn.Module] | None = None,
    task: Callable[[], Task] | None = None,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """The nodes' side of a federation. ``data`` gives a site its own data by its number; without it, it takes its part of the config's.

    ``mods`` are Flower's own for differential privacy, such as ``LocalDpMod`` and ``fixedclipping_mod``: they see what a site would send.
    """
    app = ClientApp()

    def site(context: Context) -> Site:
        client = _number(context)
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
        return through(
            mods, message, context, lambda: _answer(message, lambda: _train(site(context), message, context))
        )

    @app.evaluate()
    def score(message: Message, context: Context) -> Message:
        return _answer(message, lambda: _score(site(context), message))

    return app


def state_folder(context: Context) -> Path:
    """Where a node keeps its clients' vectors: its ``--node-config state=...``, $FEDFLAT_STATE, or the user's own folder."""
    chosen = context.node_config.get("state") or os.environ.get("FEDFLAT_STATE") or "~/.fedflat/state"
    return Path(str(chosen)).expanduser().absolute()


def _number(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if not isinstance(number, int):
        raise UserError(
            "this node does not say which client it is; start its SuperNode with --node-config 'partition-id=N', N from 0"
        )
    return number


def _answer(message: Message, work: Callable[[], RecordDict]) -> Message:
    """The answer to a message; what a user can mend is said in it, in a sentence."""
    try:
        records = work()
    except UserError as mistake:
        records = refusal(str(mistake))
    return Message(records, reply_to=message)


def _words(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records[WORDS])


def _hello(site: Site, message: Message, mods: Sequence[Mod]) -> RecordDict:
    own = site.identity()
    refuse_mods(mods, site.problem, site.training)
    if site.remembers:
        require_writable(site.folder)
    different = own.differences(_words(message), "at the node", "at the server")
    if different:
        raise UserError(
            f"client {site.client} cannot take part: {different}; bring both sides to the same experiment and version"
        )
    return content(words={**own.values(), **joined_as(site.client, len(site.indices))})


def _require_seat(site: Site, words: Mapping[str, Any]) -> None:
    """Refuse a task for what this node was when it joined, where it was started again as another client or with other data."""
    if joined_as(site.client, len(site.indices)).items() <= words.items():
        return
    raise UserError(
        f"this node is client {site.client} with {len(site.indices)} examples, but joined as client {words['client']} with "
        f"{words['examples']}; it was started again and waits to be greeted"
    )


def _gradient(site: Site, message: Message, context: Context) -> RecordDict:
    words, arrays = _words(message), message.content.array_records[ARRAYS]
    _require_seat(site, words)
    context.state[HELD], context.state[HELD_ROUND] = arrays, ConfigRecord({"round": int(words["round"])})
    value, numbers = site.whole_gradient(int(words["round"]), own_device(tensors_of(arrays), site.problem.device))
    return content({GRADIENT: value}, numbers=numbers)


def _train(site: Site, message: Message, context: Context) -> RecordDict:
    words, received = _words(message), tensors_of(message.content.array_records[ARRAYS])
    _require_seat(site, words)
    if GRADIENT in received:
        if HELD not in context.state or context.state.config_records[HELD_ROUND]["round"] != words["round"]:
            raise UserError(
                "this node was restarted in the middle of a round and has lost what it received; it waits for the next"
            )
        received |= tensors_of(context.state.array_records[HELD])
    tensors = own_device(received, site.problem.device)
    sent, numbers = site.train(str(words["experiment"]), int(words["round"]), int(words["before"]), tensors)
    return content(sent, numbers=numbers)


def _score(site: Site, message: Message) -> RecordDict:
    return content(
        numbers=site.score(own_device(tensors_of(message.content.array_records[ARRAYS]), site.problem.device))
    )
