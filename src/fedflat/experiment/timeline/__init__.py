"""Timelines: who trains in each round of a run, and how much virtual time passes.

May import ``timing``, ``engines`` and the ``setup`` and ``store`` of experiments.
"""

from fedflat.experiment.setup.timing import policy_of
from fedflat.experiment.timeline.asynchronous import AsynchronousTimeline
from fedflat.experiment.timeline.synchronous import SynchronousTimeline, Timeline, TimelineSetup, TrainedRound

__all__ = ["AsynchronousTimeline", "SynchronousTimeline", "Timeline", "TimelineSetup", "TrainedRound", "timeline_for"]


def timeline_for(setup: TimelineSetup) -> Timeline:
    """Build the timeline of a run; raises a ``UserError`` if its clock or policy does not suit its other settings."""
    return (AsynchronousTimeline if policy_of(setup.config).is_asynchronous else SynchronousTimeline)(setup)
