"""Write the page on scale: what clients, models and algorithms cost, from the code, with measured runs beside.

python docs/scale.py            write docs/scale.md
python docs/scale.py --check    fail if it is not up to date
python docs/scale.py --measure  run the experiments of the page's last table again (a few minutes) and keep their figures
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fedflat.algorithms.algorithm import flat_fields
from fedflat.algorithms.named import NAMED

HERE = Path(__file__).parent
MEASURED = HERE / "scale_measured.json"
LARGE = 10**6
"""A model large enough that scalars vanish beside vectors."""
CLIENTS = (10**2, 10**3, 10**4, 10**5, 10**6, 10**7)
MODELS = {"lenet5": ((3, 32, 32), 10), "resnet18": ((3, 32, 32), 10), "vit-s16": ((3, 224, 224), 100), "vit-b16": ((3, 224, 224), 100)}
RUNS = [(clients, algorithm) for clients in (10**4, 10**6) for algorithm in ("fedavg", "scaffold")]
COHORT, ROUNDS = 10, 100

ONE_RUN = """
import json, resource, sys, tempfile, time
import torch
torch.set_num_threads(1)
import fedflat
from pathlib import Path

clients, algorithm, rounds, cohort = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

class Watch(fedflat.Callback):
    def round_done(self, run):
        if run.server.rounds == 10:
            self.begun = time.perf_counter()
        if run.server.rounds == rounds:
            self.seconds = time.perf_counter() - self.begun

with tempfile.TemporaryDirectory() as folder:
    watch = Watch()
    result = fedflat.run(algorithm, data="digits", model="mlp", partition=f"virtual(clients={clients},size=50,alpha=0.1)", clients=None,
        clients_per_round=cohort, rounds=rounds, steps=5, every=rounds, engine="loop", workers=1, out=Path(folder) / "run", callbacks=[watch])
    kept = sum(f.stat().st_blocks * 512 for f in (Path(folder) / "run").rglob("*") if f.is_file() and "clients" in str(f.relative_to(folder)))
size = len(result.record.models["server"].weights)
print(json.dumps({"clients": clients, "algorithm": algorithm, "parameters": size, "milliseconds": round(1000 * watch.seconds / (rounds - 10), 1),
    "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "kept": kept}))
"""


def sizes() -> dict[str, int]:
    """The number of parameters of each model, without the memory for them."""
    import torch

    from fedflat import models

    with torch.device("meta"):
        return {name: sum(p.numel() for p in models.build(name, *of).parameters()) for name, of in MODELS.items()}


def shown(size: float) -> str:
    """A number of bytes, in two or three figures.

    >>> shown(248_024), shown(4.5e13)
    ('248 kB', '45 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} PB"


def state_vectors(name: str) -> int:
    """How many vectors as long as the model a client keeps between rounds."""
    fields = flat_fields(NAMED[name].client_fields()).values()
    return round(sum(field.scalars(LARGE) for field in fields) / LARGE)


def server_vectors(name: str) -> int:
    """How many vectors the server keeps beside the model."""
    fields = flat_fields(NAMED[name].server_fields()).values()
    return round(sum(field.scalars(LARGE) for field in fields) / LARGE)


def algorithm_table() -> list[str]:
    groups: dict[tuple[int, int, int, int, int], list[str]] = {}
    for name, algorithm in NAMED.items():
        down, up = (round(floats / LARGE) for floats in (algorithm.floats_down(LARGE), algorithm.floats_up(LARGE)))
        groups.setdefault((state_vectors(name), down, up, server_vectors(name), algorithm.backward_passes), []).append(name)
    lines = ["| a client keeps | down | up | the server keeps | backward passes a step | algorithms |", "|---|---|---|---|---|---|"]
    for (state, down, up, server, passes), names in sorted(groups.items()):
        lines.append(f"| {state or 'nothing'} | {down} | {up} | {server or '-'} | {passes} | {', '.join(f'`{name}`' for name in names)} |")
    return lines


def state_table(found: dict[str, int]) -> list[str]:
    lines = ["| model | parameters | " + " | ".join(f"{clients:,}" for clients in CLIENTS) + " |", "|---|---|" + "---|" * len(CLIENTS)]
    for name, size in found.items():
        cells = [shown(4 * size * clients) for clients in CLIENTS]
        lines.append(f"| `{name}` | {size:,} | " + " | ".join(cells) + " |")
    return lines


def round_table(found: dict[str, int]) -> list[str]:
    lines = [
        "| model | " + " | ".join(f"`{name}`" for name in ("fedavg", "scaffold", "mime-sgdm", "fedwmsam")) + " |",
        "|---|" + "---|" * 4,
    ]
    for model, size in found.items():
        cells = []
        for name in ("fedavg", "scaffold", "mime-sgdm", "fedwmsam"):
            down, up = (COHORT * 4 * floats for floats in (NAMED[name].floats_down(size), NAMED[name].floats_up(size)))
            cells.append(f"{shown(down)} + {shown(up)}")
        lines.append(f"| `{model}` | " + " | ".join(cells) + " |")
    return lines


def measured_table() -> list[str]:
    runs = json.loads(MEASURED.read_text(encoding="utf-8"))
    lines = ["| clients | algorithm | ms a round | peak memory | state kept | by the arithmetic, at most |", "|---|---|---|---|---|---|"]
    for run in runs:
        # Two places per client, so that a killed run finds those of its last checkpoint.
        most = 2 * 4 * state_vectors(run["algorithm"]) * run["parameters"] * COHORT * ROUNDS
        cells = [
            f"{run['clients']:,}",
            f"`{run['algorithm']}`",
            f"{run['milliseconds']:g}",
            f"{run['memory']} MB",
            shown(run["kept"]),
            shown(most),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page() -> str:
    found = sizes()
    text = (HERE / "scale_text.md").read_text(encoding="utf-8")
    tables = {"algorithms": algorithm_table(), "state": state_table(found), "rounds": round_table(found), "measured": measured_table()}
    for name, lines in tables.items():
        text = text.replace(f"{{{{{name}}}}}", "\n".join(lines))
    return text


def measure() -> None:
    runs = []
    for clients, algorithm in RUNS:
        command = [sys.executable, "-c", ONE_RUN, str(clients), algorithm, str(ROUNDS), str(COHORT)]
        runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
        print(runs[-1])
    MEASURED.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")


def main() -> int:
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
