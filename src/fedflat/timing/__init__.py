"""Virtual time: clocks of clients, policies of the server, and the simulation of asynchronous arrivals.

Nothing here trains or imports torch. May import ``registry``, ``text`` and ``errors``.
"""

from fedflat.timing.clock import CLOCK_PARTS, WAIT_SECONDS, ClientClock, Clock, StepLimit, clock_spec
from fedflat.timing.events import ArrivalSimulation, Flight, ServerUpdate, SimulationState
from fedflat.timing.policies import POLICIES, Asynchronous, Policy, Synchronous, policy_spec

__all__ = [
    "CLOCK_PARTS",
    "POLICIES",
    "WAIT_SECONDS",
    "ArrivalSimulation",
    "Asynchronous",
    "ClientClock",
    "Clock",
    "Flight",
    "Policy",
    "ServerUpdate",
    "SimulationState",
    "StepLimit",
    "Synchronous",
    "clock_spec",
    "policy_spec",
]
