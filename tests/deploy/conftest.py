"""Without Flower, what helps its tests cannot be imported either."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") else ["direct.py"]
