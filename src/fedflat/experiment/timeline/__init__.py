"""Timelines: who trains in each round of a run, and how much virtual time passes.

May import ``timing``, ``engines`` and the ``setup`` and ``store`` of experiments.
"""

from fedflat.experiment.timeline.timeline import Timeline, TimelineSetup, TrainedRound, timeline_for

__all__ = ["Timeline", "TimelineSetup", "TrainedRound", "timeline_for"]
