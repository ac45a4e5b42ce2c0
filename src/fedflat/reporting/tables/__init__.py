"""Summary values, statistics over seeds, and table files."""
