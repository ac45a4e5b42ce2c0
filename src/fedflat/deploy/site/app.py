"""Flower's ClientApp: answers the server's messages with the work of a ``Site``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedflat.data import Dataset
from fedflat.data.scaling import own_statistics_advice
from fedflat.deploy.flower.wire import (
    ARRAYS,
    BASE,
    CLIENT,
    EXPERIMENT,
    FIRST_BASE,
    GRADIENT,
    HEADER,
    REFUSAL,
    STATE_VERSION,
    client_header,
    message_content,
    refusal,
    tensors_of,
)
from fedflat.deploy.settings import Deployment, config_of, deployment_of
from fedflat.deploy.site.client_memory import ClientMemory, require_writable
from fedflat.deploy.site.policy import SCORES, SitePolicy
from fedflat.deploy.site.secure_aggregation import SiteSum, summable
from fedflat.deploy.site.site import Site, load_site_data
from fedflat.deploy.trust.secure_support import require_support
from fedflat.deploy.trust.signatures import add_receipt, arrays_digest
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError

log = logging.getLogger("flwr")
PATH = re.compile(r"""(?<![\w.~])(~|[A-Za-z]:)?[/\\]([^\s'",;()]| (?=[^'",;()]*[/\\]))*""")
"""An absolute path, or one in the home folder. A space belongs to the path if a further separator follows."""
RECEIVED = "fedflat"
"""Key in a node's context: the arrays of the first phase of a round, which are not sent again."""


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

    def build_site(context: Context, policy: SitePolicy) -> Site:
        """Build the site for one message: Flower handles every message in a new process."""
        return Site(
            config_of(context.run_config),
            policy.client,
            policy.folder,
            _load_own_data(data, policy.client, context.node_config) if data else None,
            model() if model else None,
            task() if task else None,
            may_start_afresh=policy.may_start_afresh,
        )

    def answers(work: Callable[[Message, Context, SitePolicy], RecordDict]) -> Callable[[Message, Context], Message]:
        return lambda message, context: _reply(message, context, work)

    def answers_as_site(work: Callable[[_Request], RecordDict]) -> Callable[[Message, Context], Message]:
        return answers(
            lambda message, context, policy: work(_Request(build_site(context, policy), message, context, policy))
        )

    def answers_in_sum(work: Callable[[SiteSum], RecordDict]) -> Callable[[Message, Context], Message]:
        return answers(lambda message, context, policy: work(SiteSum(message.content, context, policy)))

    app.query("hello")(answers_as_site(_join))
    app.query("keys")(answers_in_sum(SiteSum.offer_keys))
    app.query("shares")(answers_in_sum(SiteSum.offer_shares))
    app.query("confirm")(answers_in_sum(SiteSum.confirm))
    app.query("unmask")(answers_in_sum(SiteSum.reveal_shares))
    app.train("gradient")(answers_as_site(_compute_gradient))
    app.train()(answers_as_site(_train))
    app.evaluate()(answers_as_site(_score))
    return app


class _Request(NamedTuple):
    """A message that needs the site's data and model."""

    site: Site
    message: Message
    context: Context
    policy: SitePolicy

    @property
    def header(self) -> dict[str, Any]:
        return dict(self.message.content.config_records[HEADER])

    @property
    def deployment(self) -> Deployment:
        """The deployment's settings in the run config."""
        return deployment_of(self.context.run_config)

    def open_sum(self, kind: str) -> SiteSum | None:
        """Return the sum that the answer belongs to, before any work on it; None without secure aggregation."""
        if not self.deployment.secure_aggregation:
            return None
        algorithm = config_of(self.context.run_config).algorithm
        require_support(self.site.training, self.site.problem, algorithm, self.deployment)
        secure_sum = SiteSum(self.message.content, self.context, self.policy)
        secure_sum.open(kind, len(self.site.indices))
        return secure_sum


class UnreadableData(UserError):
    """A site cannot load its data; the message, which may name its files and columns, stays in the site's log."""

    def __init__(self, client: int, error: Exception) -> None:
        super().__init__(f"client {client} cannot load its data (site_data in hooks.py): {error}")
        self.public = "it cannot load its data; the log of its SuperNode says why"


def _load_own_data(data: Callable[..., Dataset], client: int, node_config: Mapping[str, Any]) -> Dataset:
    """Load a site's own data; raises ``UnreadableData`` if a file is missing or unsuitable."""
    try:
        return load_site_data(data, client, node_config)
    except (UserError, OSError) as error:
        raise UnreadableData(client, error) from None


def _reply(message: Message, context: Context, work: Callable[[Message, Context, SitePolicy], RecordDict]) -> Message:
    """Reply to a message that the site's policy permits, with the result of ``work`` and a signed receipt.

    If there is no result, the reply is a refusal that says why. Error messages may contain paths of the site, or even
    data. They are logged here and not sent, except the messages of fedflat, from which paths are removed.
    """
    policy: SitePolicy | None = None
    try:
        policy = SitePolicy.of(context)
        policy.require_compliance(context)
        records = work(message, context, policy)
    except UserError as error:
        log.error("fedflat: %s", error)
        records = refusal(error.public if isinstance(error, UnreadableData) else without_paths(str(error)))
    except Exception as error:
        log.exception("fedflat: this node cannot answer")
        records = refusal(f"{type(error).__name__} at the site, whose SuperNode has the details in its log")
    if policy is not None and REFUSAL in records:  # the server's log names the site
        records[HEADER] = ConfigRecord({CLIENT: policy.client})
    add_receipt(records, message.content, policy.key if policy else None)
    return Message(records, reply_to=message)


def without_paths(text: str) -> str:
    """Replace the absolute paths in a text.

    >>> without_paths('cannot write to /home/ann/state (read-only); use state="/path"')
    'cannot write to [path] (read-only); use state="[path]"'
    >>> without_paths("cannot read the key /home/ann smith/site.key (no such file)")
    'cannot read the key [path] (no such file)'
    """
    return PATH.sub("[path]", text)


def _arrays(request: _Request) -> ArrayRecord:
    """Return the arrays of a message; raises ``UserError`` if they are not those that its header describes."""
    arrays = request.message.content.array_records[ARRAYS]
    if arrays_digest(arrays) != request.header[BASE]:
        raise UserError("the arrays of the message were changed on the way to this node")
    return arrays


def _join(request: _Request) -> RecordDict:
    """Answer the server's greeting with the site's identity; raises ``UserError`` if the site cannot take part."""
    site = request.site
    identity, is_secure = site.identity(), request.deployment.secure_aggregation
    if site.has_state or site.has_local_privacy or is_secure:
        require_writable(site.folder)
    if site.has_own_data and (advice := own_statistics_advice(site.problem.data)):
        log.warning("fedflat: %s", advice)
    if is_secure and request.policy.sites is None:
        log.warning(
            "fedflat: this node trusts the server not to invent other sites; to check their keys, add "
            "'sites=\"sites.txt\"' to its --node-config"
        )
    differences = identity.differences(request.header, "at the node", "at the server")
    if differences:
        raise UserError(
            f"{differences}; use the same experiment, the same version and the same mean and std of the "
            "data on both sides"
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


def _compute_gradient(request: _Request) -> RecordDict:
    """Perform the first of two phases of a round: return the gradient of all of the site's data at the received model.

    The received arrays are kept in Flower's context for the second phase, ``_train``.
    """
    site, header, arrays, context = request.site, request.header, _arrays(request), request.context
    _require_same_client(site, header)
    if site.training.algorithm.drift.full_gradient != "common":  # it has no noise, and privacy would not count it
        raise UserError("the algorithm needs no gradient before training, so this node sends none")
    secure_sum = request.open_sum("gradient")
    context.state[RECEIVED] = arrays
    gradient, numbers = site.full_gradient(int(header["round"]), tensors_of(arrays, site.problem.device))
    if secure_sum:
        return secure_sum.mask(site, {GRADIENT: gradient}, numbers)
    return message_content({GRADIENT: gradient}, numbers=numbers)


def _train(request: _Request) -> RecordDict:
    """Train a round and return the content of the reply, which contains the update.

    Some algorithms need the mean gradient of the cohort; their rounds have two phases. A message that
    contains this gradient starts the second phase; ``_compute_gradient`` stored the other arrays in the first phase.
    """
    site, header, context = request.site, request.header, request.context
    _require_same_client(site, header)
    received = tensors_of(_arrays(request), site.problem.device)
    if GRADIENT in received:
        first = context.state.array_records.get(RECEIVED)
        if first is None or arrays_digest(first) != header[FIRST_BASE]:
            raise UserError(
                "this node was restarted during the round and lost what it received; it waits for the next round"
            )
        received |= tensors_of(first, site.problem.device)
    secure_sum = request.open_sum("update")
    sent, numbers = site.train(str(header["experiment"]), int(header["round"]), int(header[STATE_VERSION]), received)
    if secure_sum:
        return secure_sum.mask(site, summable(site.training, sent, received), numbers)
    return message_content(sent, numbers=numbers)


def _score(request: _Request) -> RecordDict:
    """Return the content of the reply: the metrics of the received model on the site's held-out data.

    A private run scores one model, because the scores have no noise.
    """
    site, arrays, header = request.site, _arrays(request), request.header
    if not request.policy.reports_scores:
        raise UserError(f"this node reports no scores; {SCORES}=true in its --node-config would permit them")
    if site.training.privacy:
        memory = ClientMemory(site.folder, str(header[EXPERIMENT]), site.client)
        if memory.write_once("scored.txt", str(header[BASE])) != header[BASE]:
            raise UserError(
                "this node has already scored another model of this private run; it scores only one, because scores "
                "have no noise"
            )
    return message_content(numbers=site.score(tensors_of(arrays, site.problem.device)))
