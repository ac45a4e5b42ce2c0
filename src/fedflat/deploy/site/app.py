"""Flower's ClientApp: answers the server's messages with the work of a ``Site``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedflat.data import Dataset
from fedflat.data.scaling import own_statistics_advice
from fedflat.deploy.flower.wire import (
    ARRAYS,
    GRADIENT,
    HEADER,
    STATE_VERSION,
    client_header,
    message_content,
    refusal,
    tensors_of,
)
from fedflat.deploy.settings import experiment_of
from fedflat.deploy.site.client_memory import require_writable
from fedflat.deploy.site.site import Site
from fedflat.deploy.trust.privacy import Mod, apply_mods, check_mods
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError

RECEIVED, RECEIVED_ROUND = "fedflat", "fedflat-round"
"""Keys in a node's context: the arrays of the first phase of a round (not sent again), and the round."""


def client_app(
    data: Callable[[int], Dataset] | None = None,
    model: Callable[[], nn.Module] | None = None,
    task: Callable[[], Task] | None = None,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Return the ClientApp of a federation's sites.

    Args:
        data: returns a site's own data, given its number; by default a site takes its part of the config's dataset.
        model: returns a user-supplied model.
        task: returns a user-supplied task.
        mods: Flower's mods for differential privacy, such as ``LocalDpMod`` and ``fixedclipping_mod``; they are applied
            to the displacement that a site sends.
    """
    app = ClientApp()

    def build_site(context: Context) -> Site:
        """Build the site for one message: Flower handles every message in a new process."""
        client = _client_number(context)
        return Site(
            experiment_of(context.run_config),
            client,
            state_folder(context),
            data(client) if data else None,
            model() if model else None,
            task() if task else None,
        )

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _join(build_site(context), message, mods))

    @app.train("gradient")
    def gradient(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _compute_gradient(build_site(context), message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        """Train one round and reply with the update, after the mods for privacy."""

        def train_and_reply() -> Message:
            return _reply(message, lambda: _train(build_site(context), message, context))

        return apply_mods(mods, message, context, train_and_reply)

    @app.evaluate()
    def score(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _score(build_site(context), message))

    return app


def state_folder(context: Context) -> Path:
    """Return the folder for the client's state: ``--node-config state=...``, $FEDFLAT_STATE or ~/.fedflat/state."""
    folder = context.node_config.get("state") or os.environ.get("FEDFLAT_STATE") or "~/.fedflat/state"
    return Path(str(folder)).expanduser().absolute()


def _client_number(context: Context) -> int:
    """Return the client's number, with which the SuperNode was started."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int):
        raise UserError(
            "this node does not say which client it is; start its SuperNode with --node-config 'partition-id=N'"
        )
    return number


def _reply(message: Message, work: Callable[[], RecordDict]) -> Message:
    """Reply to a message with the result of ``work``; a ``UserError`` is sent to the server as a refusal."""
    try:
        records = work()
    except UserError as error:
        records = refusal(str(error))
    return Message(records, reply_to=message)


def _header(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records[HEADER])


def _join(site: Site, message: Message, mods: Sequence[Mod]) -> RecordDict:
    """Answer the server's greeting with the site's identity; raises ``UserError`` if the site cannot take part."""
    identity = site.identity()
    check_mods(mods, site.problem, site.training)
    if site.has_state:
        require_writable(site.folder)
    if site.has_own_data and (advice := own_statistics_advice(site.problem.data)):
        logging.getLogger("flwr").warning("fedflat: %s", advice)
    differences = identity.differences(_header(message), "at the node", "at the server")
    if differences:
        raise UserError(
            f"client {site.client} cannot take part: {differences}; use the same experiment and version on both sides"
        )
    return message_content(header={**identity.values(), **client_header(site.client, len(site.indices))})


def _require_same_client(site: Site, header: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if this node was restarted since it joined, as another client or with other data."""
    client, examples = header["client"], header["examples"]
    if (site.client, len(site.indices)) != (client, examples):
        raise UserError(
            f"this node is client {site.client} with {len(site.indices)} examples, but joined as client {client} "
            f"with {examples}; it was restarted and waits for a new greeting"
        )


def _compute_gradient(site: Site, message: Message, context: Context) -> RecordDict:
    """Do the first of two phases of a round: return the gradient of all of the site's data at the received model.

    The received arrays are kept in Flower's context for the second phase, ``_train``.
    """
    header, arrays = _header(message), message.content.array_records[ARRAYS]
    _require_same_client(site, header)
    context.state[RECEIVED] = arrays
    context.state[RECEIVED_ROUND] = ConfigRecord({"round": int(header["round"])})
    gradient, numbers = site.full_gradient(int(header["round"]), tensors_of(arrays, site.problem.device))
    return message_content({GRADIENT: gradient}, numbers=numbers)


def _train(site: Site, message: Message, context: Context) -> RecordDict:
    """Train a round and return the content of the reply, which contains the update.

    Some algorithms need the mean gradient of the cohort; their rounds have two phases. A message that
    contains this gradient starts the second phase; ``_compute_gradient`` stored the other arrays in the first phase.
    """
    header, device = _header(message), site.problem.device
    _require_same_client(site, header)
    received = tensors_of(message.content.array_records[ARRAYS], device)
    if GRADIENT in received:
        if RECEIVED not in context.state or context.state.config_records[RECEIVED_ROUND]["round"] != header["round"]:
            raise UserError(
                "this node was restarted during the round and lost what it received; it waits for the next round"
            )
        received |= tensors_of(context.state.array_records[RECEIVED], device)
    sent, numbers = site.train(str(header["experiment"]), int(header["round"]), int(header[STATE_VERSION]), received)
    return message_content(sent, numbers=numbers)


def _score(site: Site, message: Message) -> RecordDict:
    """Return the content of the reply: the metrics of the received model on the site's held-out data."""
    received = tensors_of(message.content.array_records[ARRAYS], site.problem.device)
    return message_content(numbers=site.score(received))
