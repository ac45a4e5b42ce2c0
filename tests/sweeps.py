"""A sweep of small runs, whose processes tests kill."""

FILE = """
base: {rounds: 2, local_steps: 2, clients_per_round: 3, clients: 8, model: mlp(hidden=8), workers: 1, device: cpu,
  evaluation.examples: 50}
grid:
  algorithm: [fedavg, fedsam, scaffold, fedavg+wima(window=2)]
  seed: [0, 1]
"""
RUNS = 8
