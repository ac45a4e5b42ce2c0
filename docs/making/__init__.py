"""Pages of the documentation that are made from the code, a module for each kind of page."""
