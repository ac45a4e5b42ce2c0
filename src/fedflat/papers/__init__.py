"""The four works as data: their protocols, and every table and figure they print, cell by cell."""

from fedflat.papers.library import Paper, Table, find, find_table, papers

__all__ = ["Paper", "Table", "find", "find_table", "papers"]
