"""Pages on algorithms: overview, slots and parts, one page per algorithm, differences from published code."""

from __future__ import annotations

import re
from typing import Any

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import SLOTS
from fedflat.algorithms.cards import CARDS
from fedflat.algorithms.cards.four_papers import FOUR_PAPERS
from fedflat.algorithms.composition import SLOT_NAMES, part_name, parts, released_text
from fedflat.algorithms.description import DIFFERENCES, describe
from fedflat.algorithms.named import RELEASED
from fedflat.algorithms.start import Start
from fedflat.algorithms.weights import Weights
from fedflat.cli.lookup.algorithm_card import cost_of, parameter_rows, slot_texts, specs_of
from fedflat.text import parameters
from making.citations import full_citations
from making.curve import LEARNING_RATES, curve, measured
from making.markdown import block, code, joined, symbols_as_code, table

SYMBOLS = {
    "x": "server model",
    "z": "model that clients receive, and from which they start unless the slot `start` sets another one; z = x unless a "
    "method looks ahead",
    "y_k": "a client's model after k of its K local steps; y_0 = z unless the slot `start` sets "
    "another model",
    "g": "gradient of the loss on the client's current batch, at y_k or, with a perturbation e, at y_k + e",
    "e": "perturbation: offset from y_k to the point at which the gradient is evaluated",
    "d_k": "direction of local step k; with SGD, y_(k+1) = y_k - eta_k d_k",
    "eta_k": "local learning rate of step k; H is the sum of eta_k over a client's steps in a round",
    "D_i": "client i's displacement in a round, y_K - y_0",
    "q": "target - x, the vector along which the server optimiser moves x; the drift correction defines the target",
    "S, N": "the round's cohort, and the number of all clients; mean_S is the mean over the cohort, weighted by "
    "federation.weighting (or the client weights) for displacements and uniform for everything else",
    "c_i, c, m, a_i, h_i, Delta": "state that a client (with index i) or the server keeps between rounds, initially 0; each "
    "part defines its own",
    "unit(v)": "v / ||v|| with one l2 norm over all parameters",
    "t, T": "round, counted from 0, and number of rounds",
}
ROUND = """\
server   broadcasts z and the slots' state to the cohort S
client   y_0 = z, or another model if the slot `start` sets one;  for k = 0 .. K-1:
           e         from the perturbation; 0 if there is none
           g         the batch's gradient at y_k + e
           d_k       from the drift correction, then clipping
           y_(k+1)   from the local optimiser; by default y_k - eta_k (d_k + weight_decay y_k)
         sends D_i = y_K - y_0 and the slots' messages; keeps its state
server   target    from the drift correction; by default z + mean_S D_i
         x        ← from the server optimiser, with q = target - x
averages are updated with x and evaluated along with it; they do not affect training"""
FULL_GRADIENT = {
    "own": ", plus one pass over the client's data per round",
    "common": ", plus one pass over the client's data before each round",
}
BY_DEFAULT = "By default, "
"""Start of the title of a slot's default."""
SYMBOLS_LINK = "[Symbols](../algorithms.md#symbols) are defined on the overview page."


def pages() -> dict[str, str]:
    """All pages on algorithms, and their curves, by path."""
    found = {"algorithms.md": overview(), "algorithms/parts.md": parts_page(), "differences.md": differences_page()}
    for name in CARDS:
        found[f"algorithms/{name}.md"] = algorithm_page(name)
        if (drawn := curve(name)) is not None:
            found[f"images/curves/{name}.svg"] = drawn
    return found


def overview() -> str:
    """The table of all algorithms, the symbols, and the steps of a round."""
    rows = []
    for name, card in CARDS.items():
        cost, slots = cost_of(card.algorithm), " + ".join(map(code, slot_texts(card.algorithm).values()))
        link = f"[{card.name}](algorithms/{name}.md)"
        rows.append([link, code(name), card.title, slots, cost["down"], cost["up"], cost["passes"], card.paper])
    return joined(
        [
            "# Algorithm overview",
            "",
            "An algorithm consists of slots: drift correction, perturbation, learning-rate schedule, local optimiser, server",
            "optimiser, start of local training, client weights and averages. [Parts](algorithms/parts.md) fill these slots.",
            "To add a part to any compatible algorithm, write `+`, e.g. `fedmoswa+asam(rho=0.3)+wima(window=50)` or `fedprox+adamw`. `fedflat algorithms",
            "NAME` describes an algorithm or a composition. This page is generated from the code.",
            "",
            "*Down* and *up* are the numbers of values that a client receives and sends per round, for a model of P",
            "parameters; *passes* is the number of backward passes per local step.",
            "",
        ],
        table(("algorithm", "name", "description", "parts", "down", "up", "passes", "paper"), rows),
        ["## Symbols", "", "All equations, in the code and on these pages, use the same symbols:", ""],
        table(("symbol", "meaning"), [(code(symbol), meaning) for symbol, meaning in SYMBOLS.items()]),
        ["## A round", "", "Every algorithm performs these steps:", ""],
        block(ROUND.splitlines()),
    )


def parts_page() -> str:
    """Every part, by slot."""
    lines = [
        "# Slots and parts",
        "",
        f"Parts fill the slots of an algorithm; `fedavg+sam` adds the part `sam` to `fedavg`. {SYMBOLS_LINK}",
        "",
    ]
    for slot, title in SLOT_NAMES.items():
        lines += [f"## {_capital(title)}", ""]
        for name, (where, spec) in parts().items():
            if where == slot:
                lines += [f"### {name}", "", *_equations(spec), *_parameters([(slot, spec())])]
                users = [user for user, card in CARDS.items() if type(getattr(card.algorithm, slot)) is spec]
                links = ", ".join(f"[{CARDS[user].name}]({user}.md)" for user in users)
                lines += [f"Algorithms that use `{name}`: {links}.", ""] if users else []
    return joined(lines)


def algorithm_page(name: str) -> str:
    """The page of one algorithm."""
    card, algorithm = CARDS[name], CARDS[name].algorithm
    slots = [
        f"{SLOT_NAMES[slot]} [`{text}`](parts.md#{text.partition('(')[0]})"
        for slot, text in slot_texts(algorithm).items()
    ]
    citations = full_citations(card.paper)
    papers = f"{'Papers' if len(citations) > 1 else 'Paper'}: {'; '.join(citations)}."
    lines = [f"# {card.name}", "", f"**{card.title}.** {papers}", ""]
    slots_text = f"{', '.join(slots)}. All other slots have" if slots else "none. All slots have"
    lines += [f"[Slots](../algorithms.md) that this algorithm sets: {slots_text} their defaults, those of FedAvg.", ""]
    compared = name if name != "fedavg" else "fedsam"
    commands = [f"fedflat run {name} --rounds 50", f"fedflat compare fedavg {compared} --rounds 50"]
    if name in LEARNING_RATES:  # with this learning rate, FedAvg would train too slowly
        commands = [f"fedflat run {name} --rounds 50 --lr {LEARNING_RATES[name]}"]
    lines += block(commands, "bash")
    lines += _curve(name)
    lines += ["## Equations", "", SYMBOLS_LINK, ""]
    if algorithm.start != Start():
        lines += ["### Start of local training", "", *_slot(algorithm, "start")]
    lines += ["### Local step", ""]
    for slot in ("perturbation", "drift", "lr_schedule", "local_optimiser"):
        lines += _slot(algorithm, slot)
    lines += ["### Server step", ""]
    if algorithm.weights != Weights():
        lines += _slot(algorithm, "weights")
    lines += _slot(algorithm, "server")
    lines += ["## Parameters", "", *(_parameters(specs_of(algorithm)) or ["None.", ""])]
    if card.values:
        lines += [f"Published values: {_with_links(card.values)}.", ""]
    lines += [
        "## Cost",
        "",
        "The first three rows of the table are numbers of floating-point values, in terms of P, the number of the model's "
        "parameters:",
        "",
    ]
    lines += [*_cost(algorithm), *_state(algorithm)]
    return joined([*lines, *_differences(name), *_source(name, algorithm)])


def _with_links(text: str) -> str:
    """A text with links from the numbers of differences in parentheses, such as (D3), to their descriptions."""
    return re.sub(r"\((D\d+)\)", lambda match: f"([{match[1]}](../differences.md#{match[1].lower()}))", text)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _slot(algorithm: Algorithm, slot: str) -> list[str]:
    """The description of the part that fills a slot, under its name; only default parts have no name."""
    value = getattr(algorithm, slot)
    name = part_name(value)
    title, *rest = _equations(value)
    title = _capital(title.removeprefix(BY_DEFAULT))
    return [f"**{_capital(SLOT_NAMES[slot])}{' (default)' if name is None else f': `{name}`'}.** {title}", *rest]


def _equations(spec: Any) -> list[str]:
    """The title, equations, symbols and remarks of a part, given as its class or an instance."""
    description = describe(spec)
    head = f"{description.title} ({description.source})" if description.source else description.title
    head = (head or "Undocumented").replace("``", "`")
    lines = [f"{head}.", ""]
    if description.equations:
        lines += block((line.replace(" <- ", " ← ") for line in description.equations), "equations")
    for paragraph in description.remarks.split("\n\n"):
        if paragraph.startswith("- "):
            paragraph = "\n".join([paragraph, *_parameters_in_equations(spec, paragraph)])
        lines += [_with_links(symbols_as_code(paragraph)).replace(" <- ", " ← "), ""] if paragraph else []
    return lines


def _parameters_in_equations(spec: Any, symbols: str) -> list[str]:
    """One list item for each parameter that occurs in the equations of a part and not yet in its list of symbols."""
    equations = " ".join(describe(spec).equations)
    return [
        f"- `{field.name}` (parameter): {field.metadata['help']}"
        for field in parameters(spec if isinstance(spec, type) else type(spec))
        if re.search(rf"(?<![\w]){field.name}(?!\w)", equations) and f"- {field.name}: " not in symbols
    ]


def _parameters(specs: list[tuple[str, Any]]) -> list[str]:
    rows = [
        (
            code(row["parameter"]),
            SLOT_NAMES.get(slot, slot),
            code(row["default"]),
            row["range"],
            _with_links(row["meaning"]),
        )
        for slot, spec in specs
        for row in parameter_rows(spec, spec)
    ]
    return table(("parameter", "slot", "default", "range", "meaning"), rows)


def _cost(algorithm: Algorithm) -> list[str]:
    cost = cost_of(algorithm)
    fields = [field for fields in algorithm.client_fields().values() for field in fields]
    vectors, scalars = sum(f.vector for f in fields), sum(not f.vector for f in fields)
    state = [f"{'' if vectors == 1 else vectors}P" if vectors else "", str(scalars) if scalars else ""]
    return table(
        ("cost per client", "amount"),
        [
            ("received per round", cost["down"]),
            ("sent per round", cost["up"]),
            ("kept between rounds", " + ".join(filter(None, state)) or "0"),
            ("backward passes per local step", f"{cost['passes']}{_passes_per_round(algorithm)}"),
        ],
    )


def _passes_per_round(algorithm: Algorithm) -> str:
    """What a client computes before local training, in addition to its local steps."""
    batches = algorithm.perturbation.pilot_batches
    pilot = f", plus {batches} passes before local training" if batches else ""
    return FULL_GRADIENT.get(algorithm.drift.full_gradient, "") + pilot


def _state(algorithm: Algorithm) -> list[str]:
    rows = [
        (where, code(field.name), SLOT_NAMES[slot], "vector" if field.vector else "scalar", sent(field))
        for where, by_slot, sent in (
            ("server", algorithm.server_fields(), lambda field: "to clients" if field.sent else "no"),
            ("client", algorithm.client_fields(), lambda field: "no"),
            ("message", algorithm.message_fields(), lambda field: "to the server"),
        )
        for slot, fields in by_slot.items()
        for field in fields
    ]
    intro = (
        "Each client sends its displacement, of P values. The following table lists all other messages, and the state that the "
        "server and the clients keep between rounds:"
    )
    return [intro, "", *table(("where", "name", "slot", "type", "sent"), rows)] if rows else []


def _differences(name: str) -> list[str]:
    lines = ["## Published code", ""]
    numbers = CARDS[name].differences
    if not numbers:
        return [*lines, "No differences between the paper and published code are known.", ""]
    unknown = [number for number in numbers if number not in DIFFERENCES]
    if unknown:
        raise ValueError(f"the card of {name} cites {', '.join(unknown)}, missing in algorithms/differences.yaml")
    found = [DIFFERENCES[number] for number in numbers]
    rows = [(f"[{d.number}](../differences.md#{d.number.lower()})", d.where, d.fault, d.here) for d in found]
    lines += [
        "Differences between the paper and published code, and what fedflat does:",
        "",
        *table(("", "where", "difference", "fedflat"), rows),
    ]
    if name in RELEASED:
        lines += [f"`{name}(variant=released)` selects the published code: `{released_text(name)}`.", ""]
    return lines


def _curve(name: str) -> list[str]:
    curves = measured()["curves"]
    if name not in curves:
        return []
    rows = [
        (
            code(label),
            *(f"{curves[label][figure][0]:.2f} ± {curves[label][figure][1]:.2f}" for figure in ("mean of all", "last")),
        )
        for label in dict.fromkeys((name, "fedavg"))
    ]
    compared = " and ".join(dict.fromkeys((CARDS[name].name, "FedAvg")))
    return [
        "## Results on digits",
        "",
        f"![Test accuracy of {compared} over 60 rounds on digits](../images/curves/{name}.svg)",
        "",
        "The table shows means and standard deviations over 3 seeds, from runs of 60 rounds on `digits`. The algorithm's",
        "parameters have their defaults and were not tuned, so this is not a ranking. *Mean of all evaluations* also",
        "rewards fast learning. The partition is `dirichlet(alpha=0.1)` over 50 clients, of which 10 participate in each",
        "round." + (f" The learning rate is {LEARNING_RATES[name]}; FedAvg's is 0.1." if name in LEARNING_RATES else ""),
        "The results of all algorithms are on [another page](../digits.md).",
        "",
        *table(("test accuracy in %", "mean of all evaluations", "last"), rows),
    ]


def _source(name: str, algorithm: Algorithm) -> list[str]:
    """The files with the algorithm's card and its parts."""
    card = f"algorithms/cards/{'four_papers' if name in FOUR_PAPERS else 'later_methods'}.py"
    values = [getattr(algorithm, slot) for slot in SLOTS if getattr(algorithm, slot) != getattr(Algorithm(), slot)]
    files = {type(value).__module__.removeprefix("fedflat.").replace(".", "/") + ".py": None for value in values}
    return ["## Source", "", ", ".join(map(code, [card, *files])) + ".", ""]


def differences_page() -> str:
    """All differences between papers and published code."""
    return joined(
        [
            "# Differences from published code",
            "",
            "Where a paper and its published code differ, fedflat follows the paper unless this page says otherwise. The last",
            "column says what fedflat does and, where the other behaviour is available, which parameter selects it;",
            "`variant=released` selects all choices of the published code at once. This page is generated from the code.",
            "",
        ],
        table(
            ("number", "where", "difference", "fedflat"),
            [
                (f"<span id='{d.number.lower()}'>{d.number}</span>", d.where, d.fault, d.here)
                for d in sorted(DIFFERENCES.values(), key=lambda d: int(d.number.removeprefix("D")))
            ],
        ),
        ["## Released variants", ""],
        table(
            ("variant", "equivalent to"),
            [(code(f"{name}(variant=released)"), code(released_text(name))) for name in RELEASED],
        ),
    )
