"""Datasets as their publishers give them out: the files, where they come from, and how to read them."""
