"""The clients from which the data originates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.data.partitioners.partitioner import IntArray, LabelledExamples, Partitioner
from fedflat.errors import UserError
from fedflat.text import param


@dataclass(frozen=True)
class Natural(Partitioner):
    """Every writer, role, city or domain of the dataset is a client.

    If a natural client (a writer, role, city or domain) has more than ``largest`` examples, it is divided into several
    clients. With ``clients``, the natural clients with the most examples per client are divided until there are that
    many. Omit ``data.clients`` (or pass null), or set it to the partition's own number; any other number is rejected.
    """

    by_label = False
    fixes_clients = True
    sizes = "as in the data"
    citation = "Caldas et al. 2018 (LEAF), Hsu et al. 2020 (Landmarks)"
    examples = ("natural",)
    largest: int | None = param(
        None, "divide natural clients with more examples than this into several of nearly equal size", low=1
    )
    clients: int | None = param(None, "divide natural clients until there are this many", low=1)

    def divide(self, data: LabelledExamples, clients: int | None, rng: np.random.Generator) -> list[IntArray]:
        """Return the indices of each natural client's examples; divide clients above ``largest`` at random.

        Args:
            data: the examples, with their natural clients in ``data.groups``.
            clients: None, or the number of clients, which must agree with the data.
            rng: source of randomness for dividing clients.
        """
        if data.groups is None:
            raise UserError(
                "this dataset has no natural clients; in a table (.csv, .parquet), name the client column with "
                "group=COLUMN; in an .npz file, store the array train_groups; for image files, use "
                "domains(path=FOLDER) with folders <client>/<class>; or choose another partition, e.g. iid"
            )
        sizes = np.bincount(data.groups, minlength=data.num_groups)
        # Number of clients that each natural client becomes.
        divisions = np.ones_like(sizes) if self.largest is None else np.ceil(sizes / self.largest).astype(np.int64)
        if self.clients is not None and not divisions.sum() <= self.clients <= sizes.sum():
            raise UserError(
                f"natural has clients={self.clients}; expected {divisions.sum()}, the number of natural clients, to "
                f"{sizes.sum()}, the number of examples"
            )
        while self.clients is not None and divisions.sum() < self.clients:
            divisions[np.argmax(sizes / divisions)] += 1
        if clients not in (None, int(divisions.sum())):
            raise UserError(
                f"the natural partition of this dataset has {divisions.sum()} clients, not {clients}; "
                "leave clients out, or set it to null"
            )
        if not sizes.all():
            raise UserError(
                f"natural client {sizes.argmin()} has no training examples left after validation and longtail; "
                "choose a smaller validation share or factor"
            )
        by_group = np.split(np.argsort(data.groups, kind="stable"), np.cumsum(sizes)[:-1])
        if self.largest is None and self.clients is None:
            return by_group
        divided: list[IntArray] = []
        for indices, count in zip(by_group, divisions, strict=True):
            divided += map(np.sort, np.array_split(rng.permutation(indices), count))
        return divided
