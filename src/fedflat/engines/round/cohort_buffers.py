"""The table of rows that a cohort works on: what everyone reads, and one row per client to write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import Algorithm, States, flat_fields, flat_state
from fedflat.algorithms.slot import Field
from fedflat.engines.round.contract import Client, ModelState


@dataclass
class Table:
    """Vectors that the cohort reads, and a row per client for state and messages; shared between processes where asked."""

    z: Tensor
    server: dict[str, Tensor]
    common_gradient: Tensor
    client: dict[str, Tensor]
    sent: dict[str, Tensor]
    displacement: Tensor
    gradient: Tensor
    buffers: Tensor

    @classmethod
    def new(cls, algorithm: Algorithm, size: int, buffers: int, rows: int, like: Tensor, shared: bool) -> Table:
        """An empty table for cohorts of up to ``rows`` clients, in the precision and on the device of ``like``."""

        def empty(*shape: int) -> Tensor:
            tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if shared:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            return tensor

        def fields(of: dict[str, Field], *leading: int) -> dict[str, Tensor]:
            return {name: empty(*leading, *((size,) if field.vector else ())) for name, field in of.items()}

        common = algorithm.drift.whole_gradient == "common"
        received = {name: field for name, field in flat_fields(algorithm.server_fields()).items() if field.sent}
        return cls(
            z=empty(size),
            server=fields(received),
            common_gradient=empty(size if common else 0),
            client=fields(flat_fields(algorithm.client_fields()), rows),
            sent=fields(flat_fields(algorithm.message_fields()), rows),
            displacement=empty(rows, size),
            gradient=empty(rows, size if common else 0),
            buffers=empty(rows, buffers),
        )

    @property
    def rows(self) -> int:
        """How many clients fit."""
        return len(self.displacement)

    def fill(self, algorithm: Algorithm, model: ModelState, server: States, cohort: list[Client]) -> Tensor:
        """Put in what a cohort reads: z, which is returned, the server's vectors, and each client's own state."""
        z = algorithm.broadcast(model.weights, server)
        self.receive(z, server, model.buffers, cohort)
        return z

    def receive(self, z: Tensor, server: States, buffers: Tensor, cohort: list[Client]) -> None:
        """The same where z is known already."""
        self.z.copy_(z)
        for name, value in flat_state(server).items():
            if name in self.server:
                self.server[name].copy_(value)
        for row, client in enumerate(cohort):
            for name, value in flat_state(client.state).items():
                self.client[name][row].copy_(value)
            self.buffers[row].copy_(buffers if client.statistics is None else client.statistics)
