"""The HTML report: gathering runs, computing its content, rendering the page."""
