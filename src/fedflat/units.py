"""Which metrics are shares of one, so that everything that shows them says per cent."""

from __future__ import annotations

SHARES = frozenset({"accuracy", "miou", "iou", "pixel_accuracy"})


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and is shown in per cent.

    >>> is_share("miou"), is_share("loss")
    (True, False)
    """
    return metric in SHARES
