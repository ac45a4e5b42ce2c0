"""Everything about Flower that is independent of who runs it: messages, projects, versions, connections, fast start.

Imports no other sub-package of ``fedflat.deploy``.
"""
