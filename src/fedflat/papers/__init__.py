"""Four papers as data: their protocols and every table and figure, cell by cell.

Also plans the runs that reproduce a table, and compares measured with published numbers.

May import everything except the API and the CLI.
"""

from fedflat.papers.library import Paper, PaperTable, find, find_table, papers

__all__ = ["Paper", "PaperTable", "find", "find_table", "papers"]
