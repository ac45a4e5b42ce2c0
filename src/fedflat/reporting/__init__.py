"""Results, tables, figures and the HTML report.

Reads run records and measurements; may import ``experiment`` and below, never ``cli`` or ``papers``.
"""
