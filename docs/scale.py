"""Write docs/scale.md: cost of clients, models and algorithms, computed from the code, and measured runs.

python docs/scale.py            write docs/scale.md
python docs/scale.py --check    fail if it is not up to date
python docs/scale.py --measure  rerun the experiments of the page's "Measured" table (a few minutes) and save the results
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from making.markdown import table

from fedflat.algorithms.algorithm import Fields, flat_fields
from fedflat.algorithms.named import NAMED
from fedflat.display import shown_bytes

HERE = Path(__file__).parent
MEASURED = HERE / "scale_measured.json"
LARGE = 10**6
"""A model size at which scalars are negligible compared with vectors."""
CLIENTS = (10**2, 10**3, 10**4, 10**5, 10**6, 10**7)
MODELS = {
    "lenet5": ((3, 32, 32), 10),
    "resnet18": ((3, 32, 32), 10),
    "vit-s16": ((3, 224, 224), 100),
    "vit-b16": ((3, 224, 224), 100),
}
COMPARED = ("fedavg", "scaffold", "mime-sgdm", "fedwmsam")
RUNS = [(clients, algorithm) for clients in (10**4, 10**6) for algorithm in ("fedavg", "scaffold")]
COHORT, ROUNDS = 10, 100

ONE_RUN = """
import json, resource, sys, tempfile, time
import torch
torch.set_num_threads(1)
import fedflat
from pathlib import Path

clients, algorithm, rounds, cohort = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

class Timer(fedflat.Callback):
    def round_done(self, run):
        if run.server.rounds == 10:
            self.start = time.perf_counter()
        if run.server.rounds == rounds:
            self.seconds = time.perf_counter() - self.start

with tempfile.TemporaryDirectory() as folder:
    timer, out = Timer(), Path(folder) / "run"
    result = fedflat.run(algorithm, dataset="digits", model="mlp", clients=None, clients_per_round=cohort, rounds=rounds,
        partition=f"virtual(clients={clients},size=50,alpha=0.1)", local_steps=5, eval_every=rounds, engine="loop",
        workers=1, out=out, callbacks=[timer])
    state_files = [file for file in out.rglob("*") if file.is_file() and "clients" in str(file.relative_to(folder))]
    stored = sum(file.stat().st_blocks * 512 for file in state_files)
print(json.dumps({
    "clients": clients,
    "algorithm": algorithm,
    "parameters": len(result.record.models["server"].weights),
    "milliseconds": round(1000 * timer.seconds / (rounds - 10), 1),
    "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    "kept": stored,
}))
"""


def sizes() -> dict[str, int]:
    """Number of parameters of each model, counted without allocating them."""
    import torch

    from fedflat import models

    with torch.device("meta"):
        return {name: sum(p.numel() for p in models.build(name, *shape).parameters()) for name, shape in MODELS.items()}


def vectors(fields: dict[str, Fields]) -> int:
    """Number of model-sized vectors in the state of a client or the server."""
    return round(sum(field.scalars(LARGE) for field in flat_fields(fields).values()) / LARGE)


def algorithm_table() -> list[str]:
    """Algorithms grouped by state, communication and backward passes."""
    groups: dict[tuple[int, int, int, int, int], list[str]] = {}
    for name, algorithm in NAMED.items():
        down, up = (round(floats / LARGE) for floats in (algorithm.floats_down(LARGE), algorithm.floats_up(LARGE)))
        state, server = vectors(algorithm.client_fields()), vectors(algorithm.server_fields())
        key = (state, down, up, server, algorithm.backward_passes)
        groups.setdefault(key, []).append(name)
    rows = [
        (state or "none", down, up, server or "-", passes, ", ".join(f"`{name}`" for name in names))
        for (state, down, up, server, passes), names in sorted(groups.items())
    ]
    return table(("client state", "down", "up", "server state", "backward passes per step", "algorithms"), rows)


def state_table(parameters: dict[str, int]) -> list[str]:
    """Bytes of one float32 vector per client, for each model and number of clients."""
    rows = [
        (f"`{name}`", f"{size:,}", *(shown_bytes(4 * size * clients) for clients in CLIENTS))
        for name, size in parameters.items()
    ]
    return table(("model", "parameters", *(f"{clients:,} clients" for clients in CLIENTS)), rows)


def round_table(parameters: dict[str, int]) -> list[str]:
    """Bytes down and up in a round of ``COHORT`` clients."""

    def traffic(name: str, size: int) -> str:
        down, up = NAMED[name].floats_down(size), NAMED[name].floats_up(size)
        return f"{shown_bytes(4 * COHORT * down)} + {shown_bytes(4 * COHORT * up)}"

    rows = [(f"`{model}`", *(traffic(name, size) for name in COMPARED)) for model, size in parameters.items()]
    return table(("model", *(f"`{name}`" for name in COMPARED)), rows)


def measured_table() -> list[str]:
    """Measured time, memory and state on disk, with the computed upper bound of the state."""
    rows = []
    for run in json.loads(MEASURED.read_text(encoding="utf-8")):
        # Two slots per client, so that a killed run finds the rows of its last checkpoint.
        bound = 2 * 4 * vectors(NAMED[run["algorithm"]].client_fields()) * run["parameters"] * COHORT * ROUNDS
        time, memory = f"{run['milliseconds']:g}", f"{run['memory']} MB"
        rows.append((f"{run['clients']:,}", f"`{run['algorithm']}`", time, memory, shown_bytes(run["kept"]), shown_bytes(bound)))
    return table(("clients", "algorithm", "ms per round", "peak memory", "state on disk", "computed upper bound"), rows)


def page() -> str:
    """The text of docs/scale_text.md with its tables filled in."""
    parameters = sizes()
    tables = {
        "algorithms": algorithm_table(),
        "state": state_table(parameters),
        "rounds": round_table(parameters),
        "measured": measured_table(),
    }
    text = (HERE / "scale_text.md").read_text(encoding="utf-8")
    for name, lines in tables.items():
        text = text.replace(f"{{{{{name}}}}}", "\n".join(lines[:-1]))
    return text


def measure() -> None:
    """Run the experiments of the "Measured" table, each in a new process."""
    runs = []
    for clients, algorithm in RUNS:
        command = [sys.executable, "-c", ONE_RUN, str(clients), algorithm, str(ROUNDS), str(COHORT)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(output.splitlines()[-1]))
        print(runs[-1])
    MEASURED.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Write the page, or compare it with the file; return the exit code."""
    if "--measure" in sys.argv:
        measure()
    file, text = HERE / "scale.md", page()
    if "--check" in sys.argv:
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            print("docs/scale.md is not up to date; run python docs/scale.py", file=sys.stderr)
            return 1
        return 0
    file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
