"""Measures over clients and rounds: update drift, gradient disagreement, forgetting. Imports only torch and numpy."""
