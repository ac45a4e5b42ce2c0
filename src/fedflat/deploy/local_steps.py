"""A decorator for the training function of an existing ClientApp: its local steps then follow fedflat's algorithm.

The server's ``Strategy`` sends the name of the algorithm and its server state along with the model. The client's state
stays in Flower's ``context.state``. The algorithm's messages return among the arrays of the reply.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor, nn

from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import Algorithm, States, flat_fields, flat_state, nested_state
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.state import Field
from fedflat.algorithms.teacher import Teacher
from fedflat.deploy.flower.wire import array_record, tensors_of
from fedflat.engines.problem.parameters import first_names
from fedflat.errors import UserError
from fedflat.models.layout import Layout

log = logging.getLogger("flwr")
STATISTICS = ("running_mean", "running_var")
"""Ends of the names of BatchNorm statistics, which are averaged but take no part in the server's step."""
SETTINGS, SERVER_STATE = "fedflat", "fedflat-server"
"""Records that the server adds to the task of a client: a ``ConfigRecord``, and the ``ArrayRecord`` of its state."""
NAME, ROUND, ROUNDS, STATE_VERSION = "algorithm", "round", "rounds", "state-version"
"""Names in the settings; a state's version is the number of its round, from 1, or 0 for the state of a new client."""
INITIAL = "initial"
"""Name of the initial model in the server's state; sent only if the state of a new client contains it."""
SENT = "fedflat/"
"""Prefix of the names of arrays that a client adds to those of its model."""
LR_SUM = "lr_sum"
"""Name of the sum of the learning rates of a client's steps."""
KEPT = "fedflat-client-"
"""Prefix of the record in ``context.state`` that holds the client's state; a version follows."""

MakeOptimiser = Callable[..., "LocalSteps"]
TrainFunction = Callable[[Message, Context, MakeOptimiser], Message]


def weight_layout(tensors: Mapping[str, Tensor]) -> Layout:
    """Names and shapes of the weights among a model's arrays, in their order: real numbers except statistics."""
    weights = {name: t for name, t in tensors.items() if t.is_floating_point() and not name.endswith(STATISTICS)}
    return Layout.of(weights)


def sent_fields(parts: Algorithm) -> dict[str, Field]:
    """Messages that a client sends along with its model, by full name."""
    return {LR_SUM: Field(LR_SUM, vector=False)} | flat_fields(parts.message_fields())


def starts_at_initial_model(parts: Algorithm) -> bool:
    """Whether the state of a client that has not participated yet contains the initial model."""
    return any(field.start == "model" for field in flat_fields(parts.client_fields()).values())


def client(train: TrainFunction) -> Callable[[Message, Context], Message]:
    """Let the algorithm of the server's ``Strategy`` take the local steps of a ClientApp's training function.

    The function owns the model, the data and the loss. It takes a third argument, which makes the optimiser, a
    ``LocalSteps``: ``make_optimiser(model, lr=0.1, steps=20)``. It returns the trained model's ``state_dict`` as usual.

    Args:
        train: a function of message, context and ``make_optimiser`` that returns the reply.

    Returns:
        A function of message and context, for Flower's ``@app.train()``.
    """

    @functools.wraps(train)
    def handler(message: Message, context: Context) -> Message:
        task = ClientTask(message, context)
        reply = train(message, context, functools.partial(LocalSteps, task))
        if not reply.has_error():
            task.finish(reply)
        return reply

    return handler


class ClientTask:
    """One round of one client: the server's message, the client's state and its reply.

    The records that fedflat's server added are removed from the message, so that the training function sees those of
    any Flower server.
    """

    def __init__(self, message: Message, context: Context) -> None:
        """Read the message; raise a ``UserError`` if it does not come from fedflat's strategy."""
        settings = message.content.config_records.get(SETTINGS)
        if settings is None:
            raise UserError(
                "the server sent no algorithm, but this client's training function is decorated with "
                "fedflat.deploy.client; use fedflat.deploy.Strategy in the ServerApp, or remove the decorator"
            )
        self.server = tensors_of(message.content.array_records.get(SERVER_STATE, ArrayRecord()))
        message.content = RecordDict(
            {name: record for name, record in message.content.items() if name not in (SETTINGS, SERVER_STATE)}
        )
        (arrays,) = message.content.array_records.values()
        self.model = tensors_of(arrays)
        self.layout = weight_layout(self.model)
        self.algorithm = algorithm(str(settings[NAME]))
        self.round, self.rounds = _integer(settings, ROUND), _integer(settings, ROUNDS)
        self._version = _integer(settings, STATE_VERSION)
        self._context = context
        self.steps: LocalSteps | None = None

    def client_state(self) -> dict[str, Tensor] | None:
        """The client's state after its last accepted update, by full name; None if it has none."""
        record = self._context.state.array_records.get(f"{KEPT}{self._version}")
        if record is not None:
            return tensors_of(record)
        if self._version and any(self.algorithm.client_fields().values()):
            log.warning("this node has lost its state after round %d and trains as a new client", self._version)
        return None

    def finish(self, reply: Message) -> None:
        """Add the algorithm's messages to the reply, and keep the client's new state."""
        if self.steps is None:
            raise UserError(
                "the training function took no steps of the algorithm; make its optimiser with its third argument: "
                "make_optimiser(model, lr=0.1, steps=20)"
            )
        state, tensors, correction = self.steps._finish()
        records = list(reply.content.array_records.values())
        if len(records) != 1:
            raise UserError(f"the reply has {len(records)} records of arrays; return the model's state_dict in one")
        record = records[0]
        for name, tensor in correction.items():
            if name in record:
                array = record[name].numpy()
                record[name] = Array((array + tensor.cpu().numpy()).astype(array.dtype))
        for name, array in array_record(tensors).items():
            record[SENT + name] = array
        if state:
            # The previous state is needed again if this reply is lost.
            saved = self._context.state
            for name in [name for name in saved if name.startswith(KEPT) and name != f"{KEPT}{self._version}"]:
                del saved[name]
            saved[f"{KEPT}{self.round + 1}"] = array_record(state)


class LocalSteps:
    """The local steps of a client, used like an optimiser of torch whose ``step`` takes a closure.

    Args:
        task: the client's task in this round; the decorator ``client`` supplies it.
        model: the model to train. Its trained parameters must be among the arrays that the server sends, under the
            names of its ``state_dict``. They are set to the received ones, or to where the algorithm starts.
        lr: base learning rate. The algorithm's schedule within a round and over rounds applies to it.
        steps: number of local steps in this round, e.g. ``epochs * len(loader)``.
        lr_decay: factor by which the learning rate is multiplied after every round.
        momentum: heavy-ball momentum of local SGD, reset in every round.
        weight_decay: weight decay of local steps.
        clip: largest l2 norm of a step's direction before the learning rate; None disables clipping.
    """

    def __init__(
        self,
        task: ClientTask,
        model: nn.Module,
        *,
        lr: float,
        steps: int,
        lr_decay: float = 1.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ) -> None:
        """Start the client's round; raise a ``UserError`` if the arguments do not suit the algorithm or the model."""
        if lr <= 0 or steps < 1:
            raise UserError(f"lr={lr:g} and steps={steps} were given; expected lr above 0 and at least one step")
        if task.steps is not None:
            raise UserError("make_optimiser was called twice in one round; train one model with one optimiser")
        task.steps = self
        self._task, self._algorithm, self._model = task, task.algorithm, model
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._layout = Layout.of(self._parameters)
        expected = dict(zip(task.layout.names, task.layout.shapes, strict=True))
        for name, shape in zip(self._layout.names, self._layout.shapes, strict=True):
            if expected.get(name) != shape:
                raise UserError(
                    f"the server sent no array '{name}' of shape {shape}, but the model trains this parameter; pass "
                    "the model whose state_dict the server sends to make_optimiser, or freeze other parameters"
                )
        self._descent = Descent(weight_decay, momentum, clip)
        conflict = self._algorithm.local_optimiser.run_conflict(self._descent, self._layout)
        if conflict:
            raise UserError(f"the server's algorithm does not suit this client: {conflict}")
        self._steps, self._schedule = steps, Schedule(lr, lr_decay, task.rounds)
        self._z = self._trained_entries(task.layout.flatten(task.model))
        round, count = (torch.tensor(n, dtype=self._z.dtype, device=self._z.device) for n in (task.round, steps))
        self._local = self._algorithm.begin(
            self._z,
            self._server_state(),
            self._client_state(),
            self._layout,
            self._schedule,
            round,
            count,
            self._descent,
        )
        self._write(self._local.drift.y)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ctx = self._local.drift
        return float(self._algorithm.lr_schedule(self._schedule, ctx.round, ctx.step, ctx.steps))

    def step(self, closure: Callable[[], Any]) -> Any:
        """Take one local step and return the result of the first call of ``closure``, the loss at the client's model.

        Args:
            closure: computes the loss of the step's batch with the model, calls ``backward`` and returns the loss. It
                is called more than once if the algorithm needs gradients at other points, and must use the same batch
                each time. Gradients are cleared before each call, and BatchNorm statistics change only in the first.
        """
        if int(self._local.drift.step) == self._steps:
            raise UserError(f"the optimiser was made for {self._steps} steps; pass the number of all steps as steps=")
        results: list[Any] = []

        def gradient(point: Tensor, teacher: Teacher | None = None) -> Tensor:
            """The gradient [parameters] at a point; the server's strategy refuses algorithms with a teacher."""
            result, gradient_at_point = self._gradient(point, closure, keep_buffers=bool(results))
            results.append(result)
            return gradient_at_point

        self._local = self._algorithm.step(self._local, gradient, self._schedule, self._descent)
        self._write(self._local.drift.y)
        return results[0]

    def _finish(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Finish the client's round, after the last step.

        Returns:
            The client's new state by full name; the messages to the server by full name; and what to add to the arrays
            of the trained model, by name, if the algorithm does not upload this model.
        """
        steps_taken = int(self._local.drift.step)
        if steps_taken != self._steps:
            raise UserError(
                f"the training function took {steps_taken} steps, but made its optimiser for {self._steps}; "
                "pass the number of all steps as steps=, e.g. epochs * len(loader)"
            )
        state, message = self._algorithm.finish(self._local)
        values = flat_state(message.sent) | {LR_SUM: message.lr_sum}
        fields = sent_fields(self._algorithm)
        sent = {name: self._expanded(values[name]) if field.vector else values[name] for name, field in fields.items()}
        correction = message.displacement - (self._local.drift.y - self._z)
        is_needed = bool(correction.any())
        return flat_state(state), sent, self._task.layout.views(self._expanded(correction)) if is_needed else {}

    def _server_state(self) -> States:
        """The server's state by slot, for the trained parameters."""
        fields = flat_fields(self._algorithm.server_fields())
        received = {name: value for name, value in self._task.server.items() if name != INITIAL}
        return nested_state(
            {
                name: self._trained_entries(v) if fields[name].vector else v.to(self._z.device)
                for name, v in received.items()
            }
        )

    def _client_state(self) -> States:
        """The client's state by slot: the saved one, or that of a new client."""
        saved = self._task.client_state()
        if saved is not None:
            return nested_state({name: value.to(self._z.device) for name, value in saved.items()})
        initial = self._task.server.get(INITIAL)
        return self._algorithm.new_client(self._z if initial is None else self._trained_entries(initial))

    def _trained_entries(self, vector: Tensor) -> Tensor:
        """The entries of the trained parameters in a vector of all weights that the server sends; at least float32."""
        entries = self._layout.flatten(self._task.layout.views(vector))
        device = next(iter(self._parameters.values())).device
        return entries.to(device, torch.promote_types(entries.dtype, torch.float32))

    def _expanded(self, vector: Tensor) -> Tensor:
        """The inverse of ``_trained_entries``: entries of frozen parameters are 0, and tied ones have equal entries."""
        layout, views, firsts = self._task.layout, self._layout.views(vector), first_names(self._model)
        zeros = layout.views(vector.new_zeros(layout.size))
        return layout.flatten({name: views.get(firsts.get(name, name), zero) for name, zero in zeros.items()})

    def _write(self, point: Tensor) -> None:
        """Set the trained parameters to a point [parameters]."""
        with torch.no_grad():
            for name, value in self._layout.views(point).items():
                self._parameters[name].copy_(value)

    def _gradient(self, point: Tensor, closure: Callable[[], Any], keep_buffers: bool) -> tuple[Any, Tensor]:
        """Call ``closure`` with the model at a point [parameters].

        Args:
            point: the parameters.
            closure: computes the gradient.
            keep_buffers: whether to undo the changes of buffers such as BatchNorm statistics.

        Returns:
            The result of the closure, and the gradient [parameters].
        """
        self._write(point)
        self._model.zero_grad()
        before = [(buffer, buffer.clone()) for buffer in self._model.buffers()] if keep_buffers else []
        with torch.enable_grad():
            result = closure()
        for buffer, value in before:
            buffer.copy_(value)
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if not gradients:
            raise UserError("the closure computed no gradient; it must call backward on the loss before it returns it")
        zeros = self._layout.views(torch.zeros_like(point))
        return result, self._layout.flatten(zeros | gradients).to(point.dtype)


def _integer(settings: ConfigRecord, name: str) -> int:
    """A whole number in the server's settings."""
    value = settings[name]
    assert isinstance(value, int)
    return value
