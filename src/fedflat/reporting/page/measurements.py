"""Stored results of ``fedflat flatness`` commands as tables, and sharpness over the radius as lines."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress, count
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedflat.errors import UserError
from fedflat.experiment.analysis.landscapes import load_landscapes
from fedflat.experiment.store.run_folder import Record
from fedflat.flatness.landscapes.path import barrier
from fedflat.flatness.sharpness import describe_kind
from fedflat.reporting.distinct import relative_paths
from fedflat.reporting.figures.landscape_scale import label_with_unit
from fedflat.reporting.figures.style import COLOURS, algorithm_of, without_seed
from fedflat.reporting.page.over_seeds import Measured, Origin, measured_at_seed, seed_means

if TYPE_CHECKING:
    from fedflat.reporting.page.gather import Group

SEED_TABLE = "Flatness over seeds"
"""Title of the table of means over seeds."""
MAX_ROWS = 200
"""Maximum number of rows of a table; further rows are left out."""

Values = dict[str, Any]
Rises = dict[tuple[str, float], float | None]
"""Rise of the loss by kind and radius."""


def measurement_files(records: Sequence[Record], name: str) -> Iterator[tuple[Record, Path]]:
    """Yield each file of this name below a run's ``flatness`` folder, together with the run."""
    for record in records:
        if record.folder is not None:
            for path in sorted((record.folder.path / "flatness").rglob(name)):
                yield record, path


@contextmanager
def left_out_if_damaged(path: Path) -> Iterator[None]:
    """Turn an error that a measurement file causes into a warning, so that the report does not fail because of it.

    All warnings have the same location, so Python shows that of a file once, even if the file is read several times.
    """
    try:
        yield
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError):
        file = relative_paths(str(path))
        warnings.warn(f"{file} is damaged or of another version, and left out; measure again", stacklevel=1)


def mean_of_numbers(values: Iterable[Any]) -> float | None:
    """Average the values that are numbers; None if there are none."""
    numbers = [value for value in values if isinstance(value, (int, float))]
    return fmean(numbers) if numbers else None


def spread_over_subsets(values: Iterable[Any], estimates: Sequence[Values | None] = ()) -> float | None:
    """Return the standard deviation of a quantity over subsets of examples; None if there is no spread.

    Args:
        values: the quantity on each subset; None where it is unknown.
        estimates: the quantity on each subset as a random estimate, if it is one. For a single subset, the result is
            the half-width of the estimate's confidence interval.
    """
    numbers = [value for value in values if isinstance(value, (int, float))]
    if len(numbers) > 1:
        return stdev(numbers)
    (estimate,) = estimates if len(estimates) == 1 else (None,)
    return estimate["high"] - estimate["value"] if estimate and isfinite(estimate.get("high", inf)) else None


def distinct_label(name: str, taken: Iterable[str], path: Path) -> str:
    """Return the name of a model, followed by the folder of its measurement if another model has the same name."""
    return name if name not in taken else f"{name} ({relative_paths(str(path.parent))})"


def styles_of(group: Group, labels: Iterable[str]) -> dict[str, int]:
    """Choose a colour and marker for each measured model, by number.

    A model has the style of the report's row with its label, or else of the row with its algorithm if no other model
    has it. Models that differ only in the seed share a colour. Other models have unused styles.
    """
    rows, labels = {label: style.number for label, style in group.styles.items()}, list(labels)
    chosen = {label: rows[label] for label in labels if label in rows}
    for label in labels:
        if label not in chosen:
            used = {*rows.values(), *chosen.values()}
            seeds = [number for other, number in chosen.items() if without_seed(other) == without_seed(label)]
            candidates = count(seeds[0], len(COLOURS)) if seeds else count()  # same colour: every eighth number
            unused = next(number for number in candidates if number not in used)
            algorithm = rows.get(algorithm_of(label))
            chosen[label] = unused if algorithm is None or algorithm in chosen.values() else algorithm
    return chosen


def measurements_of(group: Group, spectra: Sequence[Measured]) -> Values:
    """Collect the stored measurements of a group's runs.

    Args:
        group: the runs.
        spectra: values of measured spectra, for the table of means over seeds.

    Returns:
        ``tables`` is a list of tables with a title, a note, column headings and rows; a row has a label, a description,
        its numbers and, if known, their ``spreads``. ``rises`` holds, by kind of sharpness, one line per model: the
        rise of the loss over rho. Models that differ only in their seed share a line, with its standard deviation.
    """
    sharpness, norms = _sharpness(group), _norms(group)
    measured = [model["measured"] for model in (*sharpness.values(), *norms.values()) if model["measured"]]
    heads, rows = seed_means((*spectra, *measured))
    note = "Means over seeds; ± is the standard deviation over seeds. A value without ± is of a single seed."
    tables = [
        _table(SEED_TABLE, note, ("model", "measured", "seeds", *heads), rows),
        _norms_table(norms),
        _sharpness_table(sharpness),
        _layers_table(group),
        _similarity_table(group.records),
        _paths_table(group.records),
    ]
    return {"tables": [table for table in tables if table["rows"]], "rises": _rises(group, sharpness)}


def _table(title: str, note: str, heads: Sequence[str], rows: Sequence[Values]) -> Values:
    """Return a table without columns that have no number, and without rows beyond ``MAX_ROWS``."""
    omitted = f" The first {MAX_ROWS} of {len(rows)} rows." if len(rows) > MAX_ROWS else ""
    columns = zip(*(row["numbers"] for row in rows), strict=True)
    is_known = [any(number is not None for number in column) for column in columns]
    kept_heads = [*heads[:2], *compress(heads[2:], is_known)]
    kept = [row | {key: list(compress(row[key], is_known)) for key in ("numbers", "spreads")} for row in rows]
    return {"title": title, "note": note + omitted, "heads": kept_heads, "rows": kept[:MAX_ROWS]}


def _row(
    label: str,
    described: str,
    numbers: Iterable[float | None],
    spreads: Iterable[float | None] = (),
    **more: Any,
) -> Values:
    return {"label": label, "described": described, "numbers": list(numbers), "spreads": list(spreads), **more}


def models_in_files(group: Group, file: str, taken: Iterable[str]) -> Iterator[tuple[str, Values, Path]]:
    """Yield label, measurements and file of each model in the files of this name; ``taken`` are the labels so far.

    The measurements include the settings of the command, e.g. ``on``, the name of the data, such as ``train``, and a
    function ``measured`` of the number of examples and the values by name, for means over seeds.
    """
    for record, path in measurement_files(group.records, file):
        with left_out_if_damaged(path):
            document = json.loads(path.read_text())
            for name, model in document["models"].items():
                measured = partial(measured_at_seed, group, record, document, model)
                yield distinct_label(name, taken, path), {"on": None, **document, **model, "measured": measured}, path


NORMS = {
    "loss": "loss",
    "fisher_rao": "Fisher-Rao norm",
    "sigma": "sigma",
    "magnitude_sigma": "magnitude-aware sigma",
}
"""Columns of the table of norms before relative flatness."""


def _norms(group: Group) -> dict[str, Values]:
    """Return the results of ``fedflat flatness norms`` as rows by model."""
    rows: dict[str, Values] = {}
    for label, model, path in models_in_files(group, "norms.json", rows):
        with left_out_if_damaged(path):
            subsets, first = model["subsets"], model["subsets"][0]
            estimates = [subset["relative_flatness"] for subset in subsets]
            layer, suffix = f"relative flatness of {first['layer']}", f" (rise {first['rise']:g})"
            columns = {title: [subset[name] for subset in subsets] for name, title in NORMS.items()}
            spreads = [*map(spread_over_subsets, columns.values())]
            columns[layer] = [estimate["value"] for estimate in estimates]
            spreads.append(spread_over_subsets(columns[layer], estimates))
            means = {title: mean_of_numbers(values) for title, values in columns.items()}
            values = {title + suffix * ("sigma" in title): mean for title, mean in means.items()}
            about = {"on": model["on"], "loss": means["loss"], "parameters": model.get("parameters")}
            about["measured"] = model["measured"](first["examples"], values)
            described = f"{model.get('described') or model['model']}; {layer}"
            rows[label] = _row(label, described, [*means.values(), first["rise"], first["examples"]], spreads, **about)
    return rows


def _norms_table(norms: dict[str, Values]) -> Values:
    heads = ("model", "measured", *NORMS.values(), "relative flatness", "accepted rise", "examples")
    note = (
        "Sigma is the largest noise that raises the loss by at most the accepted rise. Flat models have a large sigma. "
        "± is the standard deviation over subsets of examples; with a single subset, the 95 % confidence interval of "
        "relative flatness."
    )
    rows = [{key: value for key, value in row.items() if key != "measured"} for row in norms.values()]
    return _table("Norms", note, heads, rows)


def _sharpness(group: Group) -> dict[str, Values]:
    """Return the results of ``fedflat flatness sharpness`` by model; ``rises`` and ``spreads`` by kind and radius."""
    models: dict[str, Values] = {}
    for label, model, path in models_in_files(group, "sharpness.json", models):
        with left_out_if_damaged(path):
            rises: Rises = {}
            spreads: Rises = {}
            for subsets in model["sharpness"]:
                first = subsets[0]
                groups = f", m = {first['m']}" if first.get("m") else ""
                steps = f", {first['steps']} steps" if first["steps"] > 1 else ""
                kind = describe_kind(first["kind"], model.get("scope", "weight"), model.get("eta", 0.0))
                measure, values = (kind + groups + steps, first["rho"]), [subset["value"] for subset in subsets]
                rises[measure] = mean_of_numbers(values)
                spreads[measure] = spread_over_subsets(values, [subset.get("interval") for subset in subsets])
            losses = [subset["loss"] for subset in model["sharpness"][0]]
            about = {"described": model["described"], "on": model["on"], "parameters": model.get("parameters")}
            about |= {"loss": mean_of_numbers(losses), "loss_spread": spread_over_subsets(losses)}
            means = {"loss": about["loss"]} | {f"{kind}, rho {rho:g}": rise for (kind, rho), rise in rises.items()}
            about["measured"] = model["measured"](model["sharpness"][0][0].get("examples"), means)
            models[label] = {**about, "rises": rises, "spreads": spreads}
    return models


def _sharpness_table(models: dict[str, Values]) -> Values:
    measures = sorted({measure for model in models.values() for measure in model["rises"]})
    rows = []
    for label, model in models.items():
        numbers = [model["loss"], *(model["rises"].get(measure) for measure in measures)]
        spreads = [model["loss_spread"], *(model["spreads"].get(measure) for measure in measures)]
        about = {key: model[key] for key in ("on", "loss", "parameters")}
        rows.append(_row(label, model["described"], numbers, spreads, **about))
    heads = ("model", "measured", "loss", *(f"{kind}, rho {rho:g}" for kind, rho in measures))
    note = (
        "Rise of the loss within the radius rho. ± is the standard deviation over subsets of examples; with a single "
        "subset, the 95 % confidence interval over random directions or groups of examples."
    )
    return _table("Sharpness", note, heads, rows)


def _rises(group: Group, models: dict[str, Values]) -> dict[str, list[Values]]:
    """Return the lines over rho by kind of sharpness, for models that were measured at several radii.

    A line with several seeds has the mean, and the standard deviation ``std``, at the radii that all seeds share.
    """
    by_origin: dict[Origin | str, dict[int, Rises]] = {}  # by seed; a model outside of the report's rows is alone
    labels: dict[Origin | str, str] = {}
    for label, model in models.items():
        origin, seed = (model["measured"].origin, model["measured"].seed) if model["measured"] else (label, 0)
        labels.setdefault(origin, label)
        by_seed = by_origin.setdefault(origin, {})
        by_seed[seed] = model["rises"] | by_seed.get(seed, {})  # of values that were measured twice, the first counts
    averaged = [origin for origin, by_seed in by_origin.items() if isinstance(origin, Origin) and len(by_seed) > 1]
    styled = labels | {origin: origin.row for origin in averaged}
    styles, rows = styles_of(group, styled.values()), [origin.row for origin in averaged]
    for row, described, examples in averaged:
        is_ambiguous = rows.count(row) > 1
        labels[Origin(row, described, examples)] = f"{row}, {described}, {examples} examples" if is_ambiguous else row
    lines: dict[str, list[Values]] = {}
    for kind in dict.fromkeys(kind for model in models.values() for kind, _ in model["rises"]):
        for origin, by_seed in by_origin.items():
            seeds = [{rho: rise for (other, rho), rise in rises.items() if other == kind} for rises in by_seed.values()]
            seeds = [rises for rises in seeds if rises]
            radii = sorted(rho for rho in set().union(*seeds) if all(rises.get(rho) is not None for rises in seeds))
            values = [[rises[rho] for rises in seeds] for rho in radii]
            means = [mean_of_numbers(each) for each in values]
            line = {"label": labels[origin], "style": styles[styled[origin]], "x": radii, "y": means}
            if len(seeds) > 1:
                line["label"] = f"{labels[origin]}, mean of {len(seeds)} seeds"
                line["std"] = [spread_over_subsets(each) for each in values]
            if len(radii) > 1:
                lines.setdefault(kind, []).append(line)
    return lines


def _layers_table(group: Group) -> Values:
    """Return the curvature of single parameters, from ``fedflat flatness spectrum --per-layer``."""
    rows: dict[str, list[Values]] = {}
    for label, model, path in models_in_files(group, "spectrum.json", rows):
        with left_out_if_damaged(path):
            matrix = model["subsets"][0].get("matrix", "hessian")
            for layer in zip(*(subset.get("layers", ()) for subset in model["subsets"]), strict=True):
                means = [
                    fmean(block["lambda_max"] for block in layer),
                    fmean(block["trace"]["value"] for block in layer),
                ]
                parameter = layer[0]["name"] if matrix == "hessian" else f"{layer[0]['name']} ({matrix})"
                rows.setdefault(label, []).append(_row(label, parameter, [layer[0]["size"], *means]))
    heads = ("model", "parameter", "weights", "lambda_max", "trace")
    note = "Diagonal blocks of the Hessian, or of the named matrix: the other parameters are fixed."
    return _table("Curvature of single parameters", note, heads, [row for blocks in rows.values() for row in blocks])


def _similarity_table(records: Sequence[Record]) -> Values:
    """Return the results of ``fedflat flatness similarity``, as means over clients."""
    rows = []
    for record, path in measurement_files(records, "similarity.json"):
        with left_out_if_damaged(path):
            document = json.loads(path.read_text())
            clients = document["clients"]
            columns = ("overlap_at_server", "overlap", "cka")
            means = [mean_of_numbers(client[name] for client in clients) for name in columns]
            label = f"{record.config.algorithm}, seed {record.config.seed}"
            sizes = [document["expected_of_random"], document["eigenvectors"], len(clients)]
            rows.append(_row(label, relative_paths(document["model"]), [*means, *sizes]))
    overlaps = ("overlap at the server model", "overlap at the clients' models", "CKA of features")
    heads = ("model", "measured", *overlaps, "overlap of random subspaces", "eigenvectors", "clients")
    note = "Top eigenspaces of the clients' losses and of the global loss, and features; means over clients."
    return _table("Similarity of clients and server", note, heads, rows)


def _paths_table(records: Sequence[Record]) -> Values:
    """Return the barriers between two models, from ``fedflat flatness path``."""
    paths = []
    for _, path in measurement_files(records, "landscape.json"):
        with left_out_if_damaged(path):
            for name, grid in load_landscapes(path).items():
                if grid.kind == "path":
                    heights = {}
                    for value, values in grid.values.items():
                        height = barrier(grid.axes[0], values).height * (100 if value.endswith("error") else 1)
                        heights[value] = height if isfinite(height) else None
                    kind = "trained curve" if grid.metadata["curved"] else "straight line"
                    kind += ", after alignment" if grid.metadata.get("aligned") else ""
                    paths.append((name, kind, heights, grid.metadata["distance"]))
    names = list(dict.fromkeys(value for _, _, heights, _ in paths for value in heights))
    rows = [_row(name, kind, [*map(heights.get, names), distance]) for name, kind, heights, distance in paths]
    heads = ("models", "path", *(f"barrier of {label_with_unit(value)}" for value in names), "distance of weights")
    return _table("Paths between models", "Largest rise above the line between the values at both ends.", heads, rows)
