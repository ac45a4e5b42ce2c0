"""Timelines: who trains in each round of a run, and how much virtual time passes.

May import ``setup``, ``store``, ``timing``, ``engines`` and lower layers.
"""

from fedflat.experiment.setup.timing import has_time, policy_of
from fedflat.experiment.timeline.asynchronous import AsynchronousTimeline
from fedflat.experiment.timeline.synchronous import SynchronousTimeline
from fedflat.experiment.timeline.timeline import Timeline, TimelineSetup, TrainedRound


def timeline_for(setup: TimelineSetup) -> Timeline:
    """Build the timeline of a run; raises a ``UserError`` if its clock or policy does not suit its other settings."""
    if not has_time(setup.config):
        return Timeline(setup)
    return AsynchronousTimeline(setup) if policy_of(setup.config).is_asynchronous else SynchronousTimeline(setup)


__all__ = ["Timeline", "TimelineSetup", "TrainedRound", "timeline_for"]
