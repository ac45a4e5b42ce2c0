"""Measuring how fast rounds are: fedflat's engines, the bound they aim at, and other ways to simulate the same federation."""
