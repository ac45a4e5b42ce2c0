"""Skip helpers that need Flower if it is not installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") else ["direct.py"]
