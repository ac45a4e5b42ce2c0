"""The buffers of a cohort, and the two other forms of a client's state.

State is nested by slot at the engine's interface (see ``contract.py``), rows of ``CohortBuffers`` during a round, and
flat numpy arrays between processes. It is converted only here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, Message, States, flat_fields, flat_state, nested_state
from fedflat.algorithms.state import Field, State
from fedflat.engines.round.contract import Client

Arrays = dict[str, np.ndarray]
"""Tensors as numpy arrays, by flat name, as they travel between processes."""


@dataclass
class CohortBuffers:
    """Memory of one cohort; all tensors have one dtype and device. Dictionaries have flat names, ``slot.field``.

    Attributes:
        z: the model that clients start from [parameters].
        server: server state sent in addition to z; each [parameters] or scalar.
        common_gradient: mean of the cohort's full-batch gradients at z [parameters]; empty unless the drift needs it.
        client_states: the clients' states; each [cohort, parameters] or [cohort].
        sent: client messages in addition to the displacement; each [cohort, parameters] or [cohort].
        displacement: the clients' displacements [cohort, parameters].
        gradient: each client's full-batch gradient at z [cohort, parameters]; empty unless the drift needs their mean.
        statistics: the clients' BatchNorm statistics [cohort, buffers].
    """

    z: Tensor
    server: dict[str, Tensor]
    common_gradient: Tensor
    client_states: dict[str, Tensor]
    sent: dict[str, Tensor]
    displacement: Tensor
    gradient: Tensor
    statistics: Tensor

    @classmethod
    def new(
        cls, algorithm: Algorithm, size: int, buffers: int, rows: int, like: Tensor, shared: bool = False
    ) -> CohortBuffers:
        """Allocate the memory for cohorts of up to ``rows`` clients, filled with zeros.

        Args:
            algorithm: declares the fields of clients, server and messages.
            size: number of parameters of the model.
            buffers: number of values in its floating-point buffers, i.e. BatchNorm statistics.
            rows: size of the largest cohort.
            like: gives dtype and device.
            shared: whether to allocate shared memory, for worker processes.
        """

        def zeros(*shape: int) -> Tensor:
            """A zero tensor with the dtype and device of ``like``, in shared memory if ``shared``."""
            tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if shared:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            return tensor

        def zeros_for(fields: dict[str, Field], *leading: int) -> dict[str, Tensor]:
            return {name: zeros(*leading, size) if field.vector else zeros(*leading) for name, field in fields.items()}

        # A client's own full-batch gradient needs no memory here: it is used where it is computed.
        gradient_size = size if algorithm.drift.full_gradient == "common" else 0
        received = {name: field for name, field in flat_fields(algorithm.server_fields()).items() if field.sent}
        return cls(
            z=zeros(size),
            server=zeros_for(received),
            common_gradient=zeros(gradient_size),
            client_states=zeros_for(flat_fields(algorithm.client_fields()), rows),
            sent=zeros_for(flat_fields(algorithm.message_fields()), rows),
            displacement=zeros(rows, size),
            gradient=zeros(rows, gradient_size),
            statistics=zeros(rows, buffers),
        )

    @property
    def rows(self) -> int:
        """Size of the largest cohort that fits."""
        return len(self.displacement)

    def part(self, rows: slice) -> CohortBuffers:
        """What the clients in some rows have written; views of this memory."""
        states = {name: values[rows] for name, values in self.client_states.items()}
        sent = {name: values[rows] for name, values in self.sent.items()}
        displacement, statistics = self.displacement[rows], self.statistics[rows]
        return replace(self, client_states=states, sent=sent, displacement=displacement, statistics=statistics)

    def copy_inputs(self, z: Tensor, server: States, buffers: Tensor, cohort: Sequence[Client]) -> None:
        """Copy everything that the clients of a cohort read into this memory; client i of the cohort gets row i.

        Args:
            z: the model that clients start from [parameters].
            server: server state by slot; fields that clients do not receive are skipped.
            buffers: BatchNorm statistics of the server's model [buffers], for clients that do not keep their own.
            cohort: the clients with their states and, if they keep their own, their BatchNorm statistics.
        """
        self.z.copy_(z)
        for name, value in flat_state(server).items():
            if name in self.server:
                self.server[name].copy_(value)
        for row, client in enumerate(cohort):
            for name, value in flat_state(client.state).items():
                self.client_states[name][row].copy_(value)
            self.statistics[row].copy_(buffers if client.statistics is None else client.statistics)

    def server_state(self) -> States:
        """What the server sends, by slot; views of this memory."""
        return nested_state(self.server)

    def client_state(self, row: int) -> States:
        """The state in a client's row, by slot; views of this memory."""
        return nested_state({name: rows[row] for name, rows in self.client_states.items()})

    def write(self, row: int, state: States, message: Message) -> None:
        """Copy a trained client's new state and its message into its row."""
        self.displacement[row].copy_(message.displacement)
        for name, value in flat_state(state).items():
            self.client_states[name][row].copy_(value)
        for name, value in flat_state(message.sent).items():
            self.sent[name][row].copy_(value)


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Tensors as numpy arrays; the array of a CPU tensor shares the tensor's memory."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def to_tensors(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Copies of arrays as tensors; the arrays may be read-only."""
    return {name: torch.tensor(array, device=device) for name, array in arrays.items()}


def state_to_arrays(state: Mapping[str, State]) -> Arrays:
    """A client's state as flat arrays on the CPU."""
    return to_arrays(flat_state(state))


def state_from_arrays(arrays: Mapping[str, np.ndarray], copy: bool = True) -> States:
    """A client's state by slot, from its arrays; without ``copy``, it shares their memory and must only be read."""
    return nested_state({name: torch.from_numpy(np.array(a) if copy else np.asarray(a)) for name, a in arrays.items()})
