"""The report of a search over algorithms: candidates, confirmation, selection bias, importance and Pareto fronts."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np

from fedflat.display import (
    counted,
    is_share,
    shown_bytes,
    shown_count,
    shown_difference,
    shown_interval,
    shown_metric,
    shown_p,
    shown_seconds,
    with_unit,
)
from fedflat.errors import UserError
from fedflat.experiment.campaign.discover import SEARCH, Discovery, Finalist, seconds_spent, settings_text
from fedflat.experiment.campaign.optuna_study import Study
from fedflat.experiment.campaign.ranking import last_score
from fedflat.experiment.campaign.sweep_file import SETTINGS, Values
from fedflat.experiment.campaign.tune import open_study
from fedflat.experiment.store.files import write_atomically
from fedflat.experiment.store.run_folder import Record, load_record
from fedflat.reporting.figures.discovery import COSTS, discovery_figure
from fedflat.reporting.figures.files import write_figure
from fedflat.reporting.page.repeat import plugin_options
from fedflat.reporting.tables.files import TextTable
from fedflat.reporting.tables.summary import compare_paired, holm_correction, seed_statistics
from fedflat.setting_names import flat
from fedflat.text import write_value

MIN_CANDIDATES = 8
"""Smallest number of scored candidates for which importances are estimated."""
SIGNIFICANT = 0.05


def discovery_document(
    discovery: Discovery, finalists: Sequence[Finalist], runs: Iterable[tuple[str, Finalist, Record]]
) -> Values:
    """All results of a search as JSON-compatible values.

    Args:
        discovery: the search.
        finalists: the winner, the tuned baselines and the ablations.
        runs: problem, finalist and record of each run of the confirmation.
    """
    confirmed: dict[str, dict[str, Values]] = {}
    records: dict[str, list[Record]] = {}
    metric, lower_is_better = "accuracy", False
    for problem, finalist, record in runs:
        metric, lower_is_better = record.metric, record.lower_is_better  # the same for all problems
        records.setdefault(finalist.label, []).append(record)
        row = confirmed.setdefault(problem, {}).setdefault(
            finalist.label, {"validation": {}, "test": {}, "diverged": [], **_costs(record.history[-1])}
        )
        for split in ("validation", "test"):
            score = last_score(record, split)
            if score is not None:
                row[split][record.config.seed] = score
        if record.status == "diverged":
            row["diverged"].append(record.config.seed)
    studies = {name: open_study(search) for name, search in discovery.searches.items()}
    candidates = {name: _candidates(discovery, name, study) for name, study in studies.items()}
    sign = -1 if lower_is_better else 1
    document: Values = {
        "metric": metric,
        "lower_is_better": lower_is_better,
        "combinations": {"valid": discovery.combinations, "excluded": discovery.excluded},
        "seeds": {"search": discovery.file.seeds, "confirmation": discovery.file.confirm.seeds},
        "seconds": seconds_spent(discovery),
        "finalists": [_finalist(discovery, finalist, records.get(finalist.label, [])) for finalist in finalists],
        "confirmation": confirmed,
        "differences": _differences(finalists, confirmed, ablations=False),
        "ablations": _differences(finalists, confirmed, ablations=True),
        "selection": _selection(finalists[0], confirmed[SEARCH], candidates[SEARCH], len(discovery.file.seeds), sign),
        "importance": _importance(discovery, studies[SEARCH], candidates[SEARCH]),
        "pareto": {cost: _pareto_front(candidates, cost, sign) for cost in COSTS},
        "candidates": candidates,
    }
    return document | {"verdict": verdict(document)}


def _costs(metrics: Values) -> Values:
    """Bytes sent in both directions and backward passes of a run up to an evaluation, over all clients."""
    return {"bytes": metrics["bytes_up"] + metrics["bytes_down"], "backward_passes": metrics["backward_passes"]}


def _candidates(discovery: Discovery, name: str, study: Study) -> list[Values]:
    """The trials of a search with their algorithms, and their costs by number of rounds."""
    search, listed = discovery.searches[name], study.candidates()
    for candidate in listed:
        candidate |= {"algorithm": "", "costs": {}}
        with suppress(UserError):  # a killed process may have stored only some of the values and files
            candidate["algorithm"] = search.config(candidate["values"], search.tune.seeds[0]).algorithm
            history = load_record(search.folder(candidate["trial"]) / f"seed-{search.tune.seeds[0]}").history
            candidate["costs"] = {metrics["round"]: _costs(metrics) for metrics in history}
    return listed


def _finalist(discovery: Discovery, finalist: Finalist, records: Sequence[Record]) -> Values:
    """A finalist with its algorithm, its other settings and the command that trains it.

    ``records`` are its runs of the confirmation, whose plugins the command needs.
    """
    search = discovery.searches[finalist.search]
    config = search.config(finalist.values, search.tune.seeds[0])
    resolved = dict(flat(config.model_dump(mode="json")))  # without placeholders
    settings = {name: resolved[name] for name in finalist.values if name in resolved}
    assignments = []
    for name in dict.fromkeys([*search.base, *settings]):
        if name in resolved and name != "algorithm":
            value = resolved[name]
            assignments += ["--set", f"{name}={value if isinstance(value, str) else write_value(value)}"]
    return {
        "label": finalist.label,
        "name": finalist.label if finalist.is_ablation else _name(config.algorithm, settings),
        "algorithm": config.algorithm,
        "settings": settings,
        "search": finalist.score,
        "trial": finalist.trial,
        "command": shlex.join(["fedflat", "run", config.algorithm, *assignments, *plugin_options(records)]),
    }


def _name(text: str, settings: Values) -> str:
    """An algorithm and the other drawn settings, rounded.

    >>> _name("fedsam(rho=0.12345)", {"training.lr": 0.1})
    'fedsam(rho=0.123), lr=0.1'
    """
    return _rounded(", ".join(filter(None, (text, settings_text(settings)))))


def _rounded(text: str) -> str:
    """A text with at most three significant digits per number.

    >>> _rounded("fedgmt(gamma=1.8240374646838284)")
    'fedgmt(gamma=1.82)'
    """
    return re.sub(r"\d+\.\d{3,}(e[-+]?\d+)?", lambda number: f"{float(number[0]):.3g}", text)


def _differences(finalists: Sequence[Finalist], confirmed: Values, ablations: bool) -> list[Values]:
    """Paired differences of the winner's test metric from those of the baselines, or of the ablations.

    P-values are Holm-corrected over all of them.
    """
    listed = []
    for problem, rows in confirmed.items():
        for finalist in finalists[1:]:
            if finalist.is_ablation != ablations or finalist.label not in rows:
                continue
            pair = compare_paired(rows[SEARCH]["test"], rows[finalist.label]["test"])
            if pair is not None:
                listed.append({"problem": problem, "label": finalist.label, **vars(pair)})
    for difference, corrected in zip(listed, holm_correction([difference["p"] for difference in listed]), strict=True):
        difference["holm"] = corrected
    return listed


def expected_maximum(count: int) -> float:
    """Expected maximum of ``count`` independent standard normal variables.

    >>> round(expected_maximum(1), 3), round(expected_maximum(2), 3), round(expected_maximum(100), 3)
    (0.0, 0.564, 2.508)
    """
    from scipy.stats import norm

    x = np.linspace(-10, 10, 20_001)
    return float(10 - np.trapezoid(norm.cdf(x) ** count, x))


def _selection(winner: Finalist, rows: Values, candidates: Sequence[Values], seeds: int, sign: int) -> Values:
    """How much of the winner's score in the search may be due to the selection of the best of many candidates.

    Args:
        winner: the best candidate.
        rows: the confirmation on the search's problem, by finalist.
        candidates: all candidates of the search.
        seeds: number of seeds of every candidate.
        sign: -1 if lower scores are better, otherwise 1.
    """
    scored = sum(candidate["state"] in ("complete", "pruned") for candidate in candidates)
    spreads = [variance(row["validation"].values()) for row in rows.values() if len(row["validation"]) > 1]
    deviation = math.sqrt(fmean(spreads) / seeds) if spreads else None
    values = list(rows[SEARCH]["validation"].values())
    mean = fmean(values) if values else None
    return {
        "candidates": scored,
        "seed_deviation": deviation,
        "expected_maximum": None if deviation is None else expected_maximum(max(scored, 1)) * deviation,
        "search": winner.score,
        "confirmed": mean,
        "regression": None if mean is None or winner.score is None else sign * (winner.score - mean),
    }


def _importance(discovery: Discovery, study: Study, candidates: Sequence[Values]) -> list[Values]:
    """Importances of slots and settings at every rung with enough candidates: rounds, candidates and shares."""
    search = discovery.searches[SEARCH]
    varied = [
        name for name in discovery.slots if not (isinstance(values := search.space[name], list) and len(values) < 2)
    ]
    if not varied:
        return []
    listed = []
    for rung in [*discovery.rungs, search.example_config().training.rounds]:
        scores = {}
        for candidate in candidates:
            later = [score for at, score in sorted(candidate["scores"].items()) if at >= rung and math.isfinite(score)]
            if later:
                scores[candidate["trial"]] = later[0]
        if len(scores) >= MIN_CANDIDATES and len(set(scores.values())) > 1:
            shares = study.importance(varied, scores)
            listed += [] if shares is None else [{"rounds": rung, "candidates": len(scores), "shares": shares}]
    return listed


def _pareto_front(candidates: dict[str, list[Values]], cost: str, sign: int) -> list[Values]:
    """The evaluations of all candidates that no other one beats in both score and cost, cheapest first."""
    points = [
        {
            "search": name,
            "trial": candidate["trial"],
            "name": _name(candidate["algorithm"], {k: v for k, v in candidate["values"].items() if k in SETTINGS}),
            "rounds": rounds,
            "score": score,
            **candidate["costs"][rounds],
        }
        for name, listed in candidates.items()
        for candidate in listed
        for rounds, score in candidate["scores"].items()
        if rounds in candidate["costs"] and math.isfinite(score)
    ]
    front: list[Values] = []
    for point in sorted(points, key=lambda point: (point[cost], -sign * point["score"])):
        if not front or sign * point["score"] > sign * front[-1]["score"]:
            front.append(point)
    return [point for point in front if point["rounds"]]


def verdict(document: Values) -> str:
    """One sentence: does the winner beat the baselines?"""
    sign = -1 if document["lower_is_better"] else 1
    differences, winner = document["differences"], document["finalists"][0]["name"]
    tested = [difference for difference in differences if difference["holm"] is not None]
    significant = [sign * difference["mean"] for difference in tested if difference["holm"] < SIGNIFICANT]
    better = sum(mean > 0 for mean in significant)
    if differences and not significant:
        return f"{winner} does not differ significantly from any baseline ({counted(len(differences), 'comparison')})."
    if differences and better == len(differences):
        return f"{winner} is better than every baseline (Holm-corrected p below {SIGNIFICANT})."
    return (
        f"{winner} is significantly better in {better} and worse in {len(significant) - better} of "
        f"{counted(len(differences), 'comparison')} with baselines."
    )


def _finalist_table(document: Values) -> TextTable:
    """The finalists: candidates, score in the search, and metrics on the unseen seeds."""
    metric, problems = document["metric"], document["confirmation"]
    states = {name: Counter(trial["state"] for trial in trials) for name, trials in document["candidates"].items()}
    rows = []
    for finalist in document["finalists"]:
        label = finalist["label"]
        cells = [
            f"winner: {finalist['name']}" if label == SEARCH else finalist["name"],
            str(sum(states.get(label, {}).values()) or "–"),
        ]
        cells.append(shown_metric(finalist["search"], metric))
        cells.append(_mean(problems[SEARCH][label], "validation", metric))
        tested = (_mean(rows[label], "test", metric) if label in rows else "–" for rows in problems.values())
        rows.append((*cells, *tested))
    tests = ["test" if problem == SEARCH else f"test, {problem}" for problem in problems]
    heads = ("algorithm", "candidates", "search", "unseen seeds", *tests)
    caption = (
        f"{with_unit(metric)}: score of the search and mean ± standard deviation over "
        f"{counted(len(document['seeds']['confirmation']), 'unseen seed')}; search and unseen seeds: validation data."
    )
    return _table(caption, heads, rows)


def _mean(row: Values, split: str, metric: str) -> str:
    """Mean and standard deviation of a finalist's metric over seeds, and the number of diverged runs."""
    diverged = f"{len(row['diverged'])} diverged" if row["diverged"] else ""
    shown = seed_statistics(list(row[split].values())).shown(metric) if row[split] else ""
    return ", ".join(filter(None, (shown, diverged)))


def _difference_table(document: Values, key: str) -> TextTable:
    """The winner's differences from the baselines (key ``differences``) or from its ``ablations``."""
    metric, rows = document["metric"], []
    names = {finalist["label"]: finalist["name"] for finalist in document["finalists"]}
    for pair in document[key]:
        problem = "as in the search" if pair["problem"] == SEARCH else pair["problem"]
        difference = (shown_difference(pair["mean"], metric), shown_interval(pair["t_interval"], metric))
        test = (str(len(pair["seeds"])), pair["test"], shown_p(pair["holm"]))
        rows.append((names[pair["label"]], problem, *difference, *test))
    unit = " in percentage points" if is_share(metric) else ""
    heads = ("compared with", "problem", "difference", "95 % Student", "pairs", "test", "p after Holm")
    return _table(f"Winner minus the algorithm in the row: test {metric}{unit}, paired by seed.", heads, rows)


def _table(caption: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> TextTable:
    return TextTable(caption, dict(zip(heads, heads, strict=True)), tuple(rows))


def _pareto_table(document: Values, cost: str) -> TextTable:
    """The Pareto front of validation metric and a cost, over all evaluations of all candidates."""
    metric, name = document["metric"], COSTS[cost]
    front = document["pareto"][cost]
    largest = max((point[cost] for point in front), default=0)
    rows = []
    for point in front:
        spent = shown_bytes(point[cost], largest) if cost == "bytes" else shown_count(point[cost])
        rows.append((point["name"], str(point["rounds"]), spent, shown_metric(point["score"], metric)))
    heads = ("algorithm", "rounds", name, with_unit(metric))
    return _table(f"Pareto front: validation {metric} and {name}, over all evaluations.", heads, rows)


def _importance_table(document: Values) -> TextTable:
    """The share of the variance between candidates that each slot and setting explains, by rung."""
    rungs = document["importance"]
    names = rungs[-1]["shares"] if rungs else {}
    rows = [(name, *(f"{100 * rung['shares'].get(name, 0):.0f} %" for rung in rungs)) for name in names]
    heads = (f"{counted(rung['rounds'], 'round')}, {counted(rung['candidates'], 'candidate')}" for rung in rungs)
    return _table("Share of the variance between candidates that each slot explains (fANOVA).", ("slot", *heads), rows)


def report_tables(document: Values) -> dict[str, TextTable]:
    """The tables of the report by title, without empty ones."""
    tables = {
        "Confirmation": _finalist_table(document),
        "Differences from the baselines": _difference_table(document, "differences"),
        "Ablation": _difference_table(document, "ablations"),
        "Importance of the slots": _importance_table(document),
        **{f"Cost: {name}": _pareto_table(document, cost) for cost, name in COSTS.items()},
    }
    return {title: table for title, table in tables.items() if table.rows}


def selection_text(document: Values) -> str:
    """How far the winner's score in the search overstates its performance."""
    metric, selection = document["metric"], document["selection"]
    text = f"The winner is the best of {counted(selection['candidates'], 'scored candidate')}"
    if selection["regression"] is None:
        return f"{text}, but it diverged on all unseen seeds."
    unit, points = (" %", " points") if is_share(metric) else ("", "")
    search, confirmed, regression, deviation, expected = (
        shown_metric(selection[name], metric)
        for name in ("search", "confirmed", "regression", "seed_deviation", "expected_maximum")
    )
    text += f". Its validation {metric} is {search}{unit} in the search and {confirmed}{unit} on unseen seeds"
    is_worse = selection["regression"] > 0
    text += f": a regression to the mean of {regression}{points}." if is_worse else ", so it did not regress."
    if selection["expected_maximum"] is None:
        return text
    return (
        f"{text} Selection alone leads to an expected regression of up to {expected}{points}, the expected maximum of "
        f"as many equally good, independent candidates with the standard deviation between seeds ({deviation}{points})."
    )


def markdown(document: Values) -> str:
    """The report as Markdown."""
    counts = {name: len(listed) for name, listed in document["candidates"].items()}
    winner, combinations = document["finalists"][0], document["combinations"]
    sections = [
        f"# Winner: {winner['name']}\n\n{document['verdict']}\n\n```bash\n{winner['command']}\n```\n",
        f"{counted(counts[SEARCH], 'candidate')}, and {counted(sum(counts.values()) - counts[SEARCH], 'candidate')} "
        f"of the baselines, in {shown_seconds(sum(document['seconds'].values()))}. The space has "
        f"{counted(combinations['valid'], 'valid combination')} of parts ({combinations['excluded']} excluded). "
        f"{selection_text(document)}\n",
        *(f"## {title}\n\n{table.markdown()}" for title, table in report_tables(document).items()),
        "![Importance of the slots and Pareto fronts](discover.png)\n",
    ]
    return "\n".join(sections)


def write_report(document: Values, out: Path) -> None:
    """Write ``discover.json``, ``discover.md`` and ``discover.png``."""
    write_figure(discovery_figure(document), out / "discover.png")
    write_atomically(out / "discover.md", markdown(document))
    write_atomically(out / "discover.json", json.dumps(document, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic) else str(value)
