"""Open the runs, models and weights files that flatness commands measure, and name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.cli.shared.downloads import fetch_if_missing
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.experiment.analysis.post_hoc import PostHoc
    from fedflat.experiment.analysis.run_model import RunModel


def open_run(run: Path, silent: bool, progress: Callable[[str], None], **options: Any) -> PostHoc:
    """Open a run for measurements after training; download its dataset first if it is missing.

    Args:
        run: folder of the run.
        silent: show no progress of the download.
        progress: receives descriptions of what is measured.
        options: numbers of examples and clients to measure on, and their seed.
    """
    from fedflat.experiment.analysis.post_hoc import post_hoc
    from fedflat.experiment.store.run_folder import load_record

    record = load_record(run)
    fetch_if_missing(record.config, silent)
    return post_hoc(record, progress=progress, **options)


def heading_of(run: PostHoc) -> str:
    """Return the algorithm, dataset and seed of a run."""
    return f"{run.config.algorithm}   {run.config.data.dataset}, seed {run.config.seed}"


def open_models(
    references: Sequence[str],
    silent: bool,
    device: str,
    precision: str | None,
    module: str | None,
    dataset: str | None,
    data_dir: Path | None,
) -> dict[str, RunModel]:
    """Open models by references such as ``RUN:wima@50`` or ``model.pt``; download missing datasets first.

    Args:
        references: models of runs, or weights files.
        silent: show no progress of downloads.
        device, precision: where and how to measure.
        module: for weights files, ``FILE.py:FUNCTION`` of the function that builds the module.
        dataset, data_dir: for weights files, the dataset and its folder.

    Returns:
        The models by their shortest distinct names.
    """
    from fedflat.experiment.analysis.external_model import (
        build_module,
        external_config,
        is_weights_file,
        open_external_model,
    )
    from fedflat.experiment.analysis.model_reference import parse_reference
    from fedflat.experiment.analysis.run_model import open_model_or_client
    from fedflat.experiment.store.run_folder import load_record

    files = [text for text in references if is_weights_file(text)]
    _require_module_and_dataset(files, module, dataset)
    for text in references:
        _require_once(text, references)
        if text not in files:
            fetch_if_missing(load_record(parse_reference(text).run).config, silent)
    config = external_config(dataset, data_dir) if dataset else None
    if config is not None:
        fetch_if_missing(config, silent)
    models: list[RunModel] = []
    for text in references:
        if text in files:
            assert module is not None and config is not None
            torch_module = build_module(module)
            models.append(open_external_model(Path(text), torch_module, config, device=device, precision=precision))
        else:
            models.append(open_model_or_client(text, device=device, precision=precision))
    labels = [model.label for model in models]
    for label in labels:
        _require_once(label, labels)
    return dict(zip(short_names(models), models, strict=True))


def _require_module_and_dataset(files: Sequence[str], module: str | None, dataset: str | None) -> None:
    """Reject weights files without --module and --dataset, and these flags without a weights file."""
    if files and (module is None or dataset is None):
        raise UserError(
            f"{files[0]} is a weights file and needs --module FILE.py:FUNCTION (a function that builds its module) and "
            "--dataset NAME; for a model of a run, name the run's folder"
        )
    if not files and (module is not None or dataset is not None):
        flag = "--dataset" if module is None else "--module"
        raise UserError(f"{flag} is for weights files (.pt, .safetensors), and none is listed; runs do not need it")


def _require_once(name: str, names: Sequence[str]) -> None:
    if list(names).count(name) > 1:
        raise UserError(f"{name} is listed twice; list each model once")


def short_names(models: Sequence[RunModel]) -> list[str]:
    """Return distinct names that are as short as possible.

    Models of a single run are named by model and round. Otherwise the name is the algorithm, with the model unless it
    is the final primary one. If such names coincide, the seed is added, and if that is not enough, labels are used.
    """
    runs = {model.label.partition(":")[0] for model in models}
    if len(runs) == 1 and len(models) > 1:
        names = [_model_and_round(model) for model in models]
    else:
        names = [_algorithm_and_model(model) for model in models]
    if len(set(names)) == len(names):
        return names
    with_seeds = [f"{_algorithm_and_model(model)} (seed {model.record.config.seed})" for model in models]
    return with_seeds if len(set(with_seeds)) == len(with_seeds) else [model.label for model in models]


def _model_and_round(model: RunModel) -> str:
    return model.name if model.rounds is None else f"{model.name}@{model.rounds}"


def _algorithm_and_model(model: RunModel) -> str:
    """Return the algorithm of a model, followed by the model's name unless it is the final primary model of its run.

    For a weights file, return the model's name.
    """
    from fedflat.experiment.analysis.external_model import ExternalModel
    from fedflat.experiment.analysis.reopen import primary_model

    if isinstance(model, ExternalModel):
        return model.name
    algorithm = model.record.config.algorithm
    is_final_primary = model.name == primary_model(model.record) and model.rounds is None
    return algorithm if is_final_primary else f"{algorithm} {_model_and_round(model)}"


def default_folder(models: dict[str, RunModel], measurement: str) -> Path:
    """Return the default output folder of a measurement: in the first model's run, or beside its weights file."""
    from fedflat.experiment.analysis.external_model import ExternalModel

    model = next(iter(models.values()))
    if isinstance(model, ExternalModel):
        return model.file.parent / "flatness" / measurement
    if model.record.folder is None:
        raise UserError("this run has no folder; choose an output folder with --out")
    return model.record.folder.path / "flatness" / measurement
