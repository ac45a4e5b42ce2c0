"""An experiment, complete: this model is at once the YAML file, the command line and the documentation of every setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedflat.errors import UserError, one_of
from fedflat.experiment.absolute import absolute, with_absolute_paths
from fedflat.experiment.quantities import DEFAULT, WHAT, flatness_values, wanted_names
from fedflat.text import underscored

FORMAT: Literal[1] = 1
"""The version of run folders and configs."""

SHORT = {
    "dataset": "data.dataset",
    "data_dir": "data.dir",
    "partition": "data.partition",
    "clients": "data.clients",
    "augmentation": "data.augmentation",
    "clients_per_round": "federation.clients_per_round",
    "rounds": "training.rounds",
    "local_epochs": "training.local_epochs",
    "local_steps": "training.local_steps",
    "batch_size": "training.batch_size",
    "train": "training.train",
    "lr": "training.lr",
    "lr_decay": "training.lr_decay",
    "weight_decay": "training.weight_decay",
    "clip": "training.clip",
    "eval_every": "evaluation.every",
    "save_every": "evaluation.save_every",
    "flatness": "flatness",
    "engine": "engine.name",
    "workers": "engine.workers",
    "ray_address": "engine.ray_address",
    "device": "engine.device",
}
"""Short names of common settings, in Python and on the command line."""
WHERE = ("data_folder", "engine", "workers", "ray_address", "device")
"""Those of them that say where a run takes place, and not what it is: they may change when it is resumed."""


class Section(BaseModel):
    """A group of settings; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(Section):
    """The dataset and how it is spread over clients."""

    dataset: str = Field("digits", description="dataset (see fedflat data list)")
    dir: Path | None = Field(None, description="where its files are; default: $FEDFLAT_DATA, or the user's cache")
    partition: str = Field("dirichlet(alpha=0.1)", description="how examples are spread over clients")
    partition_seed: int | None = Field(None, ge=0, description="seed of the partition alone; default: the run's seed")
    clients: int | None = Field(50, ge=1, description="number of clients; null where the partition decides it itself")
    validation: float = Field(0.0, ge=0, lt=1, description="share of the training examples held out for validation")
    augmentation: str = Field("none", description="for example crop-flip, mixup, cutout, joined by +")

    @field_validator("dataset")
    @classmethod
    def _with_underscores(cls, text: str) -> str:
        is_own = ":" in text.partition("(")[0]  # what the user brought keeps its name
        return text if is_own else with_absolute_paths(underscored(text))

    @field_validator("partition")
    @classmethod
    def _from_anywhere(cls, text: str) -> str:
        return with_absolute_paths(text)

    @field_validator("dir")
    @classmethod
    def _at_one_place(cls, folder: Path | None) -> Path | None:
        return None if folder is None else absolute(folder)


class Federation(Section):
    """Who takes part in a round, and how their work is combined."""

    clients_per_round: int = Field(10, ge=1, description="clients per round (expected number, with Bernoulli sampling)")
    sampling: Literal["fixed", "bernoulli"] = Field(
        "fixed", description="exactly clients_per_round clients, or each with the same probability"
    )
    weighting: Literal["samples", "uniform"] = Field(
        "samples", description="how displacements are weighted in the mean"
    )
    aggregation: Literal["mean", "median", "trimmed", "clipped"] = Field(
        "mean", description="the mean, or a robust centre"
    )
    trim: float = Field(0.1, ge=0, lt=0.5, description="share cut off at each end by the trimmed mean")
    longest: float = Field(
        1.0, gt=0, description="longest vector that clipped leaves, in medians of the cohort's norms"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="probability that a sampled client never answers")
    partial: float = Field(0.0, ge=0, le=1, description="probability that a client does only part of its steps")


class Training(Section):
    """The local training of every client."""

    train: str = Field(
        "all", description="the part that is trained: all, head, norms, layers(names=A|B), lora(rank=8), joined by +"
    )
    rounds: int = Field(100, ge=1, description="communication rounds")
    local_epochs: int = Field(5, ge=1, description="local epochs per round")
    local_steps: int | None = Field(None, ge=1, description="local steps per round, instead of epochs")
    batch_size: int = Field(10, ge=1, description="batch size")
    lr: float = Field(0.1, gt=0, description="local learning rate")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the rate after every round")
    weight_decay: float = Field(0.0, ge=0, description="L2 weight decay, at the unperturbed point")
    momentum: float = Field(0.0, ge=0, lt=1, description="local heavy-ball momentum, reset in every round")
    clip: float | None = Field(None, gt=0, description="largest norm of a local direction")
    clip_mode: Literal["total", "grad"] = Field(
        "total", description="clip the corrected direction, or the raw gradient alone"
    )
    statistics: Literal["averaged", "own"] = Field(
        "averaged", description="BatchNorm statistics: averaged, or kept by clients (SiLoBN)"
    )

    @field_validator("train")
    @classmethod
    def _readable(cls, text: str) -> str:
        from fedflat.models import trained_parts

        trained_parts(text)
        return text


class Evaluation(Section):
    """When and how models are evaluated."""

    every: int = Field(1, ge=1, description="rounds between evaluations")
    final: int = Field(
        0, ge=0, description="so many of the last rounds are each evaluated besides, for a mean over them"
    )
    save_every: int | None = Field(
        None, ge=1, description="also keep every model each so many rounds, the first one included"
    )
    batch_size: int = Field(
        500,
        ge=1,
        description="examples per forward pass; on a GPU up to five times as many, fewer where masks are large",
    )
    examples: int | None = Field(
        None,
        ge=1,
        description="during the run, look at so many examples of the test set (and of others held out) only, always the same",
    )
    statistics: Literal["averaged", "estimated"] = Field(
        "averaged",
        description="BatchNorm statistics of averaged models: averaged too, or estimated anew on training data",
    )


class Flatness(Section):
    """What is looked at while a run trains; none of it changes training."""

    every: int | None = Field(
        None, ge=1, description="rounds between looks, a multiple of evaluation.every; none looks at nothing"
    )
    what: str = Field(DEFAULT, description="what to look at, joined by commas: " + ", ".join(WHAT) + ", or all")
    examples: int = Field(
        500, ge=1, description="training examples that curvature and sharpness are taken on, always the same"
    )
    clients: int = Field(10, ge=1, description="clients whose data are looked at one by one, always the same")
    seed: int = Field(0, ge=0, description="seed of these examples and clients")

    @field_validator("what")
    @classmethod
    def _known(cls, text: str) -> str:
        return ",".join(wanted_names(text))


class Stop(Section):
    """When to stop before the last round."""

    target: float | None = Field(None, description="stop when the task's metric reaches this value on the test set")
    seconds: float | None = Field(None, gt=0, description="stop after this much time")
    patience: int | None = Field(
        None, ge=1, description="stop after so many evaluations without a better validation metric"
    )


class Engine(Section):
    """Where and how the work is done; none of it changes results."""

    name: Literal["auto", "loop", "lanes", "ray"] = Field(
        "auto", description="clients in a loop over workers, side by side on a GPU, or on the workers of a Ray cluster"
    )
    ray_address: str | None = Field(
        None, description="HOST:PORT of a Ray cluster, or auto; default: one on this machine, for the run alone"
    )
    lanes: int = Field(16, ge=1, description="clients trained at the same time by the lanes engine")
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="compile the local step; auto: on a GPU, when the run is long"
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="worker processes; default: one per core, but no more than 8 or the clients of a round; with Ray cores or GPUs",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to train; auto takes a GPU where there is one"
    )
    precision: Literal["float32", "tf32", "bf16", "float64"] = Field(
        "float32", description="precision of arithmetic; weights are kept in full"
    )
    checkpoint_every: int | None = Field(
        None,
        ge=1,
        description="rounds between checkpoints; default: 10, or more, to spend at most a twentieth of the time on them",
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _as_meant(cls, value: Any) -> Any:
        # YAML reads on and off as true and false.
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


MAY_CHANGE: dict[str, bool | set[str]] = {
    "data": {"folder"},
    "stop": True,
    "engine": set(Engine.model_fields) - {"precision"},
}
"""Settings without a say in what a round does: a resumed run may have others than it began with."""


class Config(Section):
    """A complete experiment."""

    format: Literal[1] = Field(FORMAT, description="version of this file's format")
    algorithm: str = Field("fedavg", description="algorithm, as name(parameter=value)+part(parameter=value)")
    model: str = Field("mlp", description="model, as name(parameter=value)")
    init: Path | None = Field(
        None,
        description="weights to start from, .safetensors or a state_dict (.pt); default: fresh ones, drawn by the seed",
    )
    init_head: Literal["given", "fresh"] = Field(
        "given", description="the last linear layer: from init, or fresh, for other classes"
    )
    init_rounds: int = Field(
        0,
        ge=0,
        description="rounds that the weights of init have behind them; rates, cohorts and batches go on from there",
    )
    seed: int = Field(0, ge=0, description="seed of everything random")
    data: Data = Data()
    federation: Federation = Federation()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    flatness: Flatness = Field(
        Flatness(), description="look at flatness while training, for example every=50 or every=50,what=drift+gap"
    )
    stop: Stop = Stop()
    engine: Engine = Engine()

    @field_validator("flatness", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return flatness_values(value) if isinstance(value, str) else value

    @field_validator("algorithm")
    @classmethod
    def _shortest(cls, text: str) -> str:
        return _canonical(text)

    @field_validator("init")
    @classmethod
    def _from_anywhere(cls, path: Path | None) -> Path | None:
        return None if path is None else absolute(path)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        from fedflat.data import fixes_clients

        if (
            self.data.clients is not None
            and self.federation.clients_per_round > self.data.clients
            and not fixes_clients(self.data.partition)
        ):
            raise UserError(
                f"federation.clients_per_round={self.federation.clients_per_round} is more than data.clients={self.data.clients}; lower it or add clients"
            )
        every = self.flatness.every
        if every is not None and every % self.evaluation.every:
            raise UserError(
                f"flatness.every={every} is no multiple of evaluation.every={self.evaluation.every}, and looks are taken at evaluations; "
                f"use flatness.every={-(-every // self.evaluation.every) * self.evaluation.every} or evaluate more often"
            )
        if self.stop.patience is not None and self.data.validation == 0:
            raise UserError(
                "stop.patience looks at the validation split, and there is none; set data.validation, for example to 0.1"
            )
        if self.init_head == "fresh" and self.init is None:
            raise UserError(
                "init_head=fresh is about weights to start from, and there are none; set init, or leave init_head=given"
            )
        if self.init_rounds and self.init is None:
            raise UserError(
                f"init_rounds={self.init_rounds} is about weights to start from, and there are none; set init, or leave it 0"
            )
        if self.init_rounds >= self.training.rounds:
            raise UserError(
                f"init_rounds={self.init_rounds} leaves nothing of training.rounds={self.training.rounds}, which counts from round 0; "
                f"use more than {self.init_rounds} rounds"
            )
        return self

    def is_evaluated(self, rounds: int) -> bool:
        """Whether models are evaluated after so many rounds; after the last they always are."""
        last = self.training.rounds
        return rounds % self.evaluation.every == 0 or rounds > last - self.evaluation.final or rounds == last

    def lasting(self) -> dict[str, Any]:
        """The settings that stay the same from a run's first round to its last, as nested values."""
        return self.model_dump(mode="json", exclude=MAY_CHANGE)

    def to_yaml(self) -> str:
        """The whole config as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def setting_names(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """The full names of all settings."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@lru_cache(maxsize=1024)
def _canonical(text: str) -> str:
    """The shortest text of an algorithm; kept, since whole tables of experiments name the same ones."""
    from fedflat.algorithms import algorithm, canonical  # here, so that the command line's help need not wait for torch

    return canonical(algorithm(text))


def config(values: dict[str, Any]) -> Config:
    """A checked config from nested values; every mistake is one sentence."""
    if values.get("format", FORMAT) != FORMAT:
        raise UserError(
            f"this config has format {values['format']}, but this version of fedflat reads format {FORMAT}; run it anew"
        )
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def difference(one: Config, other: Config) -> str:
    """The settings in which two configs differ, of those that change results."""

    def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        pairs = ((f"{prefix}{k}", v) for k, v in values.items())
        return {
            k: v
            for key, value in pairs
            for k, v in (flat(value, f"{key}.") if isinstance(value, dict) else {key: value}).items()
        }

    ours, theirs = flat(one.model_dump()), flat(other.model_dump())
    counts = filter(changes_results, ours)
    return ", ".join(f"{key}={ours[key]} instead of {theirs[key]}" for key in counts if ours[key] != theirs[key])


def changes_results(name: str) -> bool:
    """Whether a setting, by its full name, has a say in what comes of a run, and not only in where and how it is done."""
    return not name.startswith("engine.") or name == "engine.precision"


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same language and as safe, but ten times as fast where libyaml is there: a report reads a thousand configs."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The values of a YAML file."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings; expected a YAML mapping such as 'algorithm: fedavg'")
    return values


def assign(values: dict[str, Any], setting: str) -> None:
    """Put ``a.b=value`` into nested values; the value is read as YAML."""
    key, equals, text = setting.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"cannot read --set '{setting}'; expected key=value, for example training.lr=0.05")
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"--set '{setting}': {section} is a single value, not a group of settings")
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        values[last] = text
    if isinstance(values[last], str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", values[last]):
        values[last] = float(values[last])  # YAML 1.1 reads 1e-3 as a word


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the config"
    if first["type"] == "extra_forbidden":
        section: Any = Config
        for part in first["loc"][:-1]:
            section = section.model_fields[part].annotation
        inside = ".".join(str(part) for part in first["loc"][:-1])
        return str(
            one_of(
                f"setting{f' in {inside}' if inside else ''}",
                first["loc"][-1],
                section.model_fields,
                "fedflat settings",
            )
        )
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    return f"{where}={first['input']!r} is not possible: {first['msg'][0].lower()}{first['msg'][1:]}{more}"
