"""Flower's ClientApp: answers the server's messages with the work of a ``Site``."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedflat.data import Dataset
from fedflat.data.scaling import own_statistics_advice
from fedflat.deploy.flower.wire import (
    ARRAYS,
    BASE,
    GRADIENT,
    HEADER,
    STATE_VERSION,
    client_header,
    message_content,
    refusal,
    tensors_of,
)
from fedflat.deploy.settings import deployment_of, experiment_of
from fedflat.deploy.site.client_memory import require_writable
from fedflat.deploy.site.secure_aggregation import SiteSum, summable
from fedflat.deploy.site.site import Site, load_site_data
from fedflat.deploy.trust.signatures import add_receipt, arrays_digest, read_private_key
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError

log = logging.getLogger("flwr")
KEY, FRESH_STATE, SECURE_ONLY = "key", "fresh-state", "secure-aggregation"
"""Keys of a node config: the file of the site's private key, whether a client without its state may start anew, and
whether the site takes part only if the server cannot see its update."""
PATH = re.compile(r"""(?<![\w.~])(~|[A-Za-z]:)?[/\\][^\s'",;()]*""")
"""An absolute path, or one in the home folder."""
RECEIVED, RECEIVED_ROUND = "fedflat", "fedflat-round"
"""Keys in a node's context: the arrays of the first phase of a round (not sent again), and the round."""


def client_app(
    data: Callable[..., Dataset] | None = None,
    model: Callable[[], nn.Module] | None = None,
    task: Callable[[], Task] | None = None,
) -> ClientApp:
    """Return the ClientApp of a federation's sites.

    Args:
        data: returns a site's own data, given its number and, if it takes a second argument, the node config (a
            dictionary) of its SuperNode; by default a site takes its part of the config's dataset.
        model: returns a user-supplied model.
        task: returns a user-supplied task.
    """
    app = ClientApp()

    def build_site(context: Context) -> Site:
        """Build the site for one message: Flower handles every message in a new process."""
        client = _client_number(context)
        _require_wanted_secrecy(context)
        return Site(
            experiment_of(context.run_config),
            client,
            state_folder(context),
            _load_own_data(data, client, context.node_config) if data else None,
            model() if model else None,
            task() if task else None,
            may_start_afresh=bool(context.node_config.get(FRESH_STATE, False)),
        )

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return _reply(message, context, lambda: _join(build_site(context), message))

    @app.query("keys")
    def keys(message: Message, context: Context) -> Message:
        return _reply(message, context, lambda: SiteSum(message.content, context).offer_keys(_private_key(context)))

    @app.query("shares")
    def shares(message: Message, context: Context) -> Message:
        return _reply(message, context, lambda: SiteSum(message.content, context).offer_shares())

    @app.query("unmask")
    def unmask(message: Message, context: Context) -> Message:
        return _reply(message, context, lambda: SiteSum(message.content, context).reveal_shares())

    @app.train("gradient")
    def gradient(message: Message, context: Context) -> Message:
        return _reply(message, context, lambda: _compute_gradient(build_site(context), message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _reply(message, context, lambda: _train(build_site(context), message, context))

    @app.evaluate()
    def score(message: Message, context: Context) -> Message:
        return _reply(message, context, lambda: _score(build_site(context), message))

    return app


def state_folder(context: Context) -> Path:
    """Return the folder for the client's state: ``--node-config state=...``, $FEDFLAT_STATE or ~/.fedflat/state."""
    folder = context.node_config.get("state") or os.environ.get("FEDFLAT_STATE") or "~/.fedflat/state"
    return Path(str(folder)).expanduser().absolute()


class UnreadableData(UserError):
    """A site cannot load its data; the message, which may name its files and columns, stays in the site's log."""

    def __init__(self, client: int, error: Exception) -> None:
        super().__init__(f"client {client} cannot load its data (site_data in hooks.py): {error}")
        self.public = f"client {client} cannot load its data; the log of its SuperNode says why"


def _load_own_data(data: Callable[..., Dataset], client: int, node_config: Mapping[str, Any]) -> Dataset:
    """Load a site's own data; raises ``UnreadableData`` if a file is missing or unsuitable."""
    try:
        return load_site_data(data, client, node_config)
    except (UserError, OSError) as error:
        raise UnreadableData(client, error) from None


def _client_number(context: Context) -> int:
    """Return the client's number, with which the SuperNode was started."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int):
        raise UserError(
            "this node does not say which client it is; start its SuperNode with --node-config 'partition-id=N'"
        )
    return number


def _reply(message: Message, context: Context, work: Callable[[], RecordDict]) -> Message:
    """Reply to a message with the result of ``work`` and a receipt, signed with the key in the node config."""
    records = _answer(work)
    try:
        add_receipt(records, message.content, _private_key(context))
    except UserError as error:
        log.error("fedflat: %s", error)
        records = refusal(without_paths(str(error)))
    return Message(records, reply_to=message)


def _private_key(context: Context) -> EllipticCurvePrivateKey | None:
    """Return the key in the node config, if it names one."""
    path = context.node_config.get(KEY)
    return read_private_key(Path(str(path)).expanduser().absolute()) if path else None


def _require_wanted_secrecy(context: Context) -> None:
    """Raise ``UserError`` if the node config demands secure aggregation, but the run has none."""
    if context.node_config.get(SECURE_ONLY, False) and not deployment_of(context.run_config).secure_aggregation:
        raise UserError(
            f"this node takes part only in runs with secure aggregation ({SECURE_ONLY} in its --node-config); "
            "set deploy.secure_aggregation=true"
        )


def _answer(work: Callable[[], RecordDict]) -> RecordDict:
    """Return the result of ``work``, or a refusal that says why there is none.

    Error messages may contain paths of the site, or even data. They are logged here and not sent, except the messages
    of fedflat, from which paths are removed.
    """
    try:
        return work()
    except UnreadableData as error:
        log.error("fedflat: %s", error)
        return refusal(error.public)
    except UserError as error:
        log.error("fedflat: %s", error)
        return refusal(without_paths(str(error)))
    except Exception as error:
        log.exception("fedflat: this node cannot answer")
        return refusal(f"{type(error).__name__} at the site, whose SuperNode has the details in its log")


def without_paths(text: str) -> str:
    """Replace the absolute paths in a text.

    >>> without_paths('cannot write to /home/ann/state (read-only); use state="/path"')
    'cannot write to [path] (read-only); use state="[path]"'
    """
    return PATH.sub("[path]", text)


def _header(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records[HEADER])


def _arrays(message: Message) -> ArrayRecord:
    """Return the arrays of a message; raises ``UserError`` if they are not those that its header describes."""
    arrays = message.content.array_records[ARRAYS]
    if arrays_digest(arrays) != _header(message)[BASE]:
        raise UserError("the arrays of the message were changed on the way to this node")
    return arrays


def _join(site: Site, message: Message) -> RecordDict:
    """Answer the server's greeting with the site's identity; raises ``UserError`` if the site cannot take part."""
    identity = site.identity()
    if site.has_state or site.has_local_privacy:
        require_writable(site.folder)
    if site.has_own_data and (advice := own_statistics_advice(site.problem.data)):
        log.warning("fedflat: %s", advice)
    differences = identity.differences(_header(message), "at the node", "at the server")
    if differences:
        raise UserError(
            f"client {site.client} cannot take part: {differences}; "
            "use the same experiment, the same version and the same mean and std of the data on both sides"
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
    header, arrays = _header(message), _arrays(message)
    _require_same_client(site, header)
    context.state[RECEIVED] = arrays
    context.state[RECEIVED_ROUND] = ConfigRecord({"round": int(header["round"])})
    gradient, numbers = site.full_gradient(int(header["round"]), tensors_of(arrays, site.problem.device))
    if deployment_of(context.run_config).secure_aggregation:
        return SiteSum(message.content, context).mask(site, {GRADIENT: gradient}, numbers)
    return message_content({GRADIENT: gradient}, numbers=numbers)


def _train(site: Site, message: Message, context: Context) -> RecordDict:
    """Train a round and return the content of the reply, which contains the update.

    Some algorithms need the mean gradient of the cohort; their rounds have two phases. A message that
    contains this gradient starts the second phase; ``_compute_gradient`` stored the other arrays in the first phase.
    """
    header, device = _header(message), site.problem.device
    _require_same_client(site, header)
    received = tensors_of(_arrays(message), device)
    if GRADIENT in received:
        if RECEIVED not in context.state or context.state.config_records[RECEIVED_ROUND]["round"] != header["round"]:
            raise UserError(
                "this node was restarted during the round and lost what it received; it waits for the next round"
            )
        received |= tensors_of(context.state.array_records[RECEIVED], device)
    sent, numbers = site.train(str(header["experiment"]), int(header["round"]), int(header[STATE_VERSION]), received)
    if deployment_of(context.run_config).secure_aggregation:
        return SiteSum(message.content, context).mask(site, summable(site.training, sent, received), numbers)
    return message_content(sent, numbers=numbers)


def _score(site: Site, message: Message) -> RecordDict:
    """Return the content of the reply: the metrics of the received model on the site's held-out data."""
    received = tensors_of(_arrays(message), site.problem.device)
    return message_content(numbers=site.score(received))
