"""Every cell of every table is a valid experiment; names, rules and data files are read correctly."""

from __future__ import annotations

import pytest

from fedflat.algorithms import algorithm
from fedflat.averaging import average_name
from fedflat.data import augmentation, canonical_dataset, canonical_partition
from fedflat.errors import UserError
from fedflat.models import canonical_model
from fedflat.papers import Paper, PaperTable, find, find_table, papers
from fedflat.papers.cells import substitute
from fedflat.papers.library import _validate, slug
from fedflat.papers.numbers import Gain, Mean, RoundsTo, parse_number, parse_statistic
from fedflat.papers.schema import PaperFile, Rule, TableFile

TABLES = [table for paper in papers().values() for table in paper.tables.values()]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.full_name)
def test_every_cell_is_a_valid_experiment(table: PaperTable):
    assert len(table.cells) == len(table.rows) * len(table.columns)
    assert table.file.representative in table.cells
    for cell in table.cells.values():
        if isinstance(cell.statistic, Gain):
            assert all(source.configs for source in table.sources(cell))
            continue
        for config in cell.configs:
            evaluated = {"server", *map(average_name, algorithm(config.algorithm).averages)}
            assert cell.evaluated in evaluated, cell.name
            if not cell.needs:
                canonical_dataset(config.data.dataset)
                canonical_model(config.model)
                canonical_partition(config.data.partition)
                augmentation(config.data.augmentation)
            until = cell.statistic.until if isinstance(cell.statistic, Mean) else None
            assert until is None or until <= config.training.rounds


@pytest.mark.parametrize("paper", list(papers().values()), ids=list(papers()))
def test_every_protocol_and_every_method_is_used(paper: Paper):
    cells = [cell for table in paper.tables.values() for cell in table.cells.values()]
    assert {cell.words["protocol"] for cell in cells} == set(paper.file.protocols)
    rows = {method for table in paper.tables.values() for _, method in table.rows if method not in table.file.methods}
    assert rows == set(paper.file.methods)


def test_numbers_of_tables_and_cells():
    cells = [cell for table in TABLES for cell in table.cells.values()]
    assert len(TABLES) == 29 + 35
    assert sum(cell.published is not None for cell in cells) > 1900
    assert not any(cell.needs for cell in cells)


@pytest.mark.parametrize(
    ("table", "cell", "algorithm_text", "settings"),
    [
        (
            "fedswa/table3",
            "fedmoswa/cifar100-dirichlet-0.1-accuracy",
            "fedmoswa",
            {"partition": "dirichlet-reuse(alpha=0.1)", "rounds": 1000},
        ),
        (
            "fedswa/table4",
            "fedswa/rho-1.0",
            "fedswa(final_lr=1.0,server_lr=1.0)",
            {"partition": "dirichlet-reuse(alpha=0.6)", "rounds": 1000},
        ),
        (
            "fedwmsam/table5",
            "nothing/accuracy",
            "fedwmsam(lam=0.0,personal=false,rho=0.0)",
            {"partition": "dirichlet-reuse(alpha=0.1)", "rounds": 500},
        ),
        ("wima/table4", "w-5/cifar100", None, {"partition": "dirichlet-lda(alpha=0)", "rounds": 10000}),
        (
            "eccv/table2",
            "cifar10-fedasam/alpha-0-5cl",
            "fedasam(rho=0.7)",
            {"partition": "dirichlet-lda(alpha=0)", "rounds": 10000},
        ),
        (
            "eccv/table2",
            "cifar10-fedsam/alpha-1000-100-20cl",
            "fedsam(rho=0.02)",
            {"partition": "dirichlet-lda(alpha=100)", "rounds": 10000},
        ),
        (
            "eccv/table2",
            "cifar100-fedavg-swa/alpha-0.5-0.05-10cl",
            "fedavg+cyclic+swa",
            {"partition": "dirichlet-lda(alpha=0.5)", "rounds": 20000},
        ),
        (
            "eccv/table3",
            "mixup-fedasam/e-1-10-clients-10k",
            "fedasam(eta=0.0)",
            {"partition": "pachinko", "rounds": 10000},
        ),
        ("eccv/table5", "asam/accuracy-centr", "fedasam", {"partition": "centralised", "rounds": 200}),
        (
            "eccv/table13",
            "adagrad-lr-0.01/alpha-1k",
            "fedadagrad(server_lr=0.01,tau=0.01,v_init=0.0)",
            {"rounds": 20000},
        ),
    ],
)
def test_configs_of_cells(table, cell, algorithm_text, settings):
    config = find_table(table).cells[cell].configs[0]
    assert algorithm_text is None or algorithm(config.algorithm) == algorithm(algorithm_text)
    assert config.data.partition == settings.get("partition", config.data.partition)
    assert config.training.rounds == settings["rounds"]


def test_cells_of_one_run_share_its_config():
    cells = find_table("fedswa/table3").cells
    assert (
        cells["fedavg/cifar100-dirichlet-0.1-accuracy"].configs == cells["fedavg/cifar100-dirichlet-0.1-rounds"].configs
    )
    wima = find_table("wima/table4").cells
    assert len({id(wima[f"w-{window}/cifar10"].configs[0]) for window in (5, 10, 50, 100, 200)}) == 1


def test_a_cell_may_be_the_best_of_several():
    assert [c.algorithm for c in find_table("fedwmsam/table1").cells["fedlesam-s-d/cifar-10-beta-0.1"].configs] == [
        "fedlesam",
        "fedlesam-s",
        "fedlesam-d",
    ]


def test_names():
    assert isinstance(find("FedSWA"), Paper)
    assert find_table("eccv/Table 13").full_name == "eccv/table13"
    assert slug("CIFAR10 α=0.05 (ours)") == "cifar10-alpha-0.05-ours"
    chosen = find_table("fedswa/table2").choose(["fedavg/*-rounds", "fedswa/cifar10-vgg-11-accuracy"])
    assert [cell.name for cell in chosen][-1] == "fedswa/cifar10-vgg-11-accuracy"
    assert len(chosen) == 7
    assert find_table("eccv/table1").choose(["FedSAM"]) == find_table("eccv/table1").choose(["fedsam/*"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fedsaw", "'fedsaw'; did you mean fedswa"),
        ("fedswa/table1", "table2, table3, table4, table5, table6, table8, figure1"),
        ("fedswa", "fedswa/table2"),
    ],
)
def test_unknown_names_list_the_known_ones(name, message):
    with pytest.raises(UserError) as mistake:
        find_table(name)
    assert message in str(mistake.value)


def test_unknown_cells_list_the_known_ones():
    with pytest.raises(UserError, match=r"did you mean fedavg/accuracy.*fedflat papers fedswa/table6 --list-cells"):
        find_table("fedswa/table6").choose(["fedavg/acuracy"])


def test_words_in_braces_are_replaced():
    words = {"a": "{b}", "b": 3, "text": "x({a})", "nothing": None}
    assert substitute("{a}", words) == 3
    assert substitute("f({text},{b})", words) == "f(x(3),3)"
    assert substitute("{nothing}", words) is None
    with pytest.raises(UserError, match=r"\{c\}"):
        substitute("{c}", words)


def test_rules_apply_if_all_their_conditions_hold():
    rule = Rule.model_validate({"if": {"data": ["cifar10", "mnist"], "skew": "high"}, "then": {"rho": 0.1}})
    assert rule.holds({"data": "mnist", "skew": "high"})
    assert not rule.holds({"data": "mnist", "skew": "none"})
    assert not rule.holds({"skew": "high"})


def small_paper(rows: str = "1.0 2.0", **more: object) -> PaperTable:
    protocol = {
        "says": "s",
        "number": "last",
        "settings": {"algorithm": "{algorithm}", "training.rounds": "{rounds}"},
        "words": {"rounds": 5},
    }
    protocol["rules"] = [{"if": {"rounds": 5}, "then": {"rounds": 7}}]
    file = {
        "title": "t",
        "authors": ["a"],
        "venue": "v",
        "year": 1,
        "documents": [],
        "methods": {"A": "fedavg"},
        "protocols": {"p": protocol},
    }
    table = {"caption": "c", "protocol": "p", "header": [{"x": None, "y": {"rounds": 5}}], "rows": {"A": rows}, **more}
    return PaperTable(Paper("own", PaperFile.model_validate(file)), "table1", TableFile.model_validate(table))


def test_header_overrides_rules_and_rules_override_protocol():
    cells = small_paper().cells
    assert [cell.configs[0].training.rounds for cell in cells.values()] == [7, 5]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rows": "1.0"}, "1 numbers for 2 columns"),
        ({"rows": "1.0 2,0"}, "'2,0'"),
        ({"header": [{"x": None, "X": None}]}, "two cells named a/x"),
        ({"methods": {"A": {"protocol": "q"}}}, "own has no protocol 'q'"),
    ],
)
def test_errors_in_data_files_are_reported(table, message):
    with pytest.raises(UserError) as mistake:
        _ = small_paper(**table).cells
    assert message in str(mistake.value)


def test_invalid_data_files_are_rejected():
    with pytest.raises(UserError, match=r"own .*surprise"):
        _validate(TableFile, "own", "caption: c\nprotocol: p\nrows: {A: '1'}\nsurprise: 1")
    with pytest.raises(UserError, match="either rows or groups"):
        _validate(TableFile, "own", "caption: c\nprotocol: p")


def test_printed_numbers_and_statistics():
    assert parse_number("0.7664").rounding == pytest.approx(0.00005)
    assert parse_number("1000+").rounding == 0.5
    assert parse_number("+3.02").value == 3.02
    assert parse_number("-20.3").value == -20.3
    assert isinstance(parse_statistic("rounds-to(target=0.55)"), RoundsTo)
    with pytest.raises(UserError, match="statistic 'median'"):
        parse_statistic("median")
