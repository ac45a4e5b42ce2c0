"""The configuration of an experiment, from which config.yaml, command-line options and ``fedflat settings`` follow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from fedflat.errors import UserError
from fedflat.experiment.federation_settings import FederationSettings
from fedflat.experiment.settings_group import SettingsGroup
from fedflat.setting_names import (
    DEFAULT_MEASUREMENTS,
    MEASUREMENTS,
    SHORT_NAMES,
    flat,
    parse_flatness,
    parse_measurements,
    suggest_setting,
    unknown_setting,
)
from fedflat.text import absolute_path, respell

FORMAT: Literal[1] = 1
"""Version of configs and run folders."""
STORED = "stored"
"""Validation context of a config that is read from a run folder; it was validated when the run began."""
AbsolutePath = Annotated[Path | None, AfterValidator(lambda path: None if path is None else absolute_path(path))]


class DataSettings(SettingsGroup):
    """The dataset and its partition over clients."""

    dataset: str = Field("digits", description="dataset, or a file of arrays such as wine.npz (see fedflat data list)")
    dir: AbsolutePath = Field(
        None, description="folder of downloaded datasets; default: $FEDFLAT_DATA, or the user's cache"
    )
    partition: str = Field("dirichlet(alpha=0.1)", description="how training examples are distributed over clients")
    partition_seed: int | None = Field(None, ge=0, description="seed of the partition; default: the run's seed")
    clients: int | None = Field(
        50,
        ge=1,
        description="number of clients; omit it (or pass null) for partitions such as natural that determine it",
    )
    validation: float = Field(0.0, ge=0, lt=1, description="fraction of the training examples held out for validation")
    augmentation: str = Field(
        "none", description="augmentations joined by +, e.g. crop-flip+cutout; none disables them"
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_clients_to_partition(cls, values: Any) -> Any:
        """Replace the default number of clients by None if the partition determines their number itself."""
        if isinstance(values, dict) and "clients" not in values and isinstance(values.get("partition"), str):
            from fedflat.data import fixes_clients

            return {**values, "clients": None} if fixes_clients(values["partition"]) else values
        return values

    @field_validator("dataset")
    @classmethod
    def _canonical_dataset(cls, text: str) -> str:
        """Spell a dataset's name as registered and make paths absolute, so that a run resumes from any folder."""
        if ":" in text.partition("(")[0]:  # a user-supplied dataset, as custom:NAME
            return text
        from fedflat.data import DATASETS, spell_dataset

        return respell(spell_dataset(text), {name: source.options for name, source in DATASETS.items()})

    @field_validator("partition")
    @classmethod
    def _canonical_partition(cls, text: str) -> str:
        """Spell the names in a partition as registered, e.g. ``Dirichlet`` as ``dirichlet``."""
        from fedflat.data import PARTITION_MODIFIERS, PARTITIONERS

        return respell(text, {**PARTITIONERS, **PARTITION_MODIFIERS})

    @field_validator("augmentation")
    @classmethod
    def _canonical_augmentation(cls, text: str) -> str:
        """Spell the names in an augmentation as registered; ``none`` is not one of them."""
        from fedflat.data import AUGMENTATIONS

        return "none" if text.strip().lower() == "none" else respell(text, AUGMENTATIONS)


class TrainingSettings(SettingsGroup):
    """Local training on each client."""

    task: Literal["auto", "classification", "f1", "perplexity", "exact_match", "mse", "huber", "bce"] = Field(
        "auto",
        description="loss and metrics; auto: classification, mse for float targets, bce for 0/1 labels; "
        "huber: robust regression; f1, perplexity and exact_match: classification, judged by that metric",
    )
    train: str = Field(
        "all",
        description="trainable part: all, head, norms, layers(names=A|B), lora(rank=8) or peft(path=DIR), joined by +",
    )
    rounds: int = Field(100, ge=1, description="communication rounds")
    local_epochs: int = Field(5, ge=1, description="local epochs per round")
    local_steps: int | None = Field(None, ge=1, description="local steps per round, instead of local_epochs")
    batch_size: int = Field(10, ge=1, description="local batch size")
    lr: float = Field(0.1, gt=0, description="local learning rate")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor applied to the learning rate after every round")
    weight_decay: float = Field(
        0.0, ge=0, description="L2 weight decay at the unperturbed point; decoupled by adamw, muon"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="heavy-ball momentum of local SGD, reset every round")
    clip: float | None = Field(None, gt=0, description="largest norm of a local step direction")
    clip_mode: Literal["total", "grad"] = Field(
        "total", description="clip the drift-corrected direction, or the gradient before correction"
    )
    statistics: Literal["averaged", "own"] = Field(
        "averaged", description="BatchNorm statistics: averaged by the server, or kept by each client (SiLoBN)"
    )

    @field_validator("train")
    @classmethod
    def _check_train(cls, text: str) -> str:
        """Reject an invalid selection of trainable parts, and make paths absolute."""
        from fedflat.models.trained import PARTS, trained_parts

        trained_parts(text)
        return respell(text, PARTS)


class EvaluationSettings(SettingsGroup):
    """When and how models are evaluated."""

    every: int = Field(1, ge=1, description="evaluate every N rounds")
    final: int = Field(0, ge=0, description="also evaluate each of the last N rounds")
    save_every: int | None = Field(
        None, ge=1, description="save models every N rounds, starting before the first round"
    )
    batch_size: int = Field(
        500, ge=1, description="examples per forward pass; up to five times as many on a GPU, fewer for large masks"
    )
    examples: int | None = Field(
        None, ge=1, description="evaluate on a fixed sample of N held-out examples during the run; default: all"
    )
    statistics: Literal["averaged", "estimated"] = Field(
        "averaged", description="BatchNorm statistics of averaged models: averaged, or re-estimated on training data"
    )


class FlatnessSettings(SettingsGroup):
    """In-run measurements; they do not affect training."""

    every: int | None = Field(
        None, ge=1, description="measure every N rounds (a multiple of evaluation.every); none disables it"
    )
    what: str = Field(
        DEFAULT_MEASUREMENTS, description="measurements, joined by + or commas: " + ", ".join(MEASUREMENTS) + ", or all"
    )
    examples: int = Field(500, ge=1, description="size of the fixed training sample for curvature and sharpness")
    clients: int = Field(10, ge=1, description="size of the fixed sample of clients measured individually")
    seed: int = Field(0, ge=0, description="seed of both samples")

    @field_validator("what")
    @classmethod
    def _check_what(cls, text: str) -> str:
        return ",".join(parse_measurements(text))


class StopSettings(SettingsGroup):
    """Stopping before the last round."""

    target: float | None = Field(None, description="stop once the primary metric reaches this value on the test set")
    seconds: float | None = Field(None, gt=0, description="pause after this many seconds")
    patience: int | None = Field(
        None, ge=1, description="stop after N evaluations without improvement of the validation metric"
    )


class EngineSettings(SettingsGroup):
    """Where and how training executes; only precision and, on a CPU, compile affect results."""

    name: Literal["auto", "loop", "lanes", "ray"] = Field(
        "auto", description="loop trains clients in worker processes, lanes side by side on a GPU, ray on a Ray cluster"
    )
    ray_address: str | None = Field(
        None, description="HOST:PORT of a Ray cluster, or auto; default: start a local one for this run"
    )
    lanes: int = Field(
        16,
        ge=1,
        description="most clients that the lanes engine trains concurrently; fewer if they would keep over 20 GB",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compile local steps on a GPU, or kernels for convolutions with few channels on a CPU; "
        "auto: if the run is long enough",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="worker processes; default: one per core, at most max(8, clients_per_round), but 1 for short runs "
        "of small models; with Ray: cores or GPUs",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device; auto: a GPU if available")
    precision: Literal["auto", "float32", "tf32", "bf16", "float64"] = Field(
        "auto",
        description="arithmetic precision; auto: tf32 on a GPU that has it, else float32; "
        "bf16 also on x86 CPUs with AMX or AVX-512 BF16; with tf32 and bf16, weights stay in float32",
    )
    checkpoint_every: int | None = Field(
        None,
        ge=1,
        description="checkpoint every N rounds; default: every 5 seconds, or less often if that takes over 5 %",
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _undo_yaml_booleans(cls, value: Any) -> Any:
        if isinstance(value, bool):  # YAML 1.1 reads on and off as booleans
            return "on" if value else "off"
        return value


MAY_CHANGE: dict[str, bool | set[str]] = {
    "data": {"dir"},
    "evaluation": {"save_every"},
    "stop": True,
    "engine": set(EngineSettings.model_fields) - {"precision"},
}
"""Settings that do not affect the result of a round and may therefore change when a run is resumed.

``engine.compile``, which changes results by rounding, is checked separately.
"""


class Config(SettingsGroup):
    """A complete experiment."""

    format: Literal[1] = Field(FORMAT, description="version of the format of this file and of the run folder")
    algorithm: str = Field("fedavg", description="algorithm, as name(parameter=value)+part(parameter=value)")
    model: str = Field("mlp", description="model, as name(parameter=value)")
    init: AbsolutePath = Field(
        None, description="initial weights, .safetensors or a state_dict (.pt); default: drawn with the seed"
    )
    init_head: Literal["given", "fresh"] = Field(
        "given", description="last linear layer: from init, or newly drawn, e.g. for other classes"
    )
    init_rounds: int = Field(
        0, ge=0, description="rounds that init was trained for; schedules, cohorts and batches continue from there"
    )
    seed: int = Field(0, ge=0, description="seed of all random numbers")
    data: DataSettings = DataSettings()
    federation: FederationSettings = FederationSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    flatness: FlatnessSettings = Field(
        FlatnessSettings(), description="measure flatness during training, e.g. every=50 or every=50,what=drift+gap"
    )
    stop: StopSettings = StopSettings()
    engine: EngineSettings = EngineSettings()

    @field_validator("flatness", mode="before")
    @classmethod
    def _parse_flatness(cls, value: Any) -> Any:
        return parse_flatness(value) if isinstance(value, str) else value

    @field_validator("algorithm")
    @classmethod
    def _canonical_algorithm(cls, text: str, info: ValidationInfo) -> str:
        """Spell an algorithm in the canonical way.

        A stored config already does, and parts of its algorithm need not be registered in this process.
        """
        return text if info.context == STORED else _canonical(text)

    @field_validator("model")
    @classmethod
    def _canonical_model(cls, text: str) -> str:
        """Spell a model's name as registered, e.g. ``ResNet18`` as ``resnet18``."""
        from fedflat.models import MODELS

        return respell(text, MODELS)

    @model_validator(mode="after")
    def _check_consistency(self) -> Config:
        """Reject settings that contradict each other."""
        from fedflat.data import fixes_clients

        clients, per_round = self.data.clients, self.federation.clients_per_round
        if clients is not None and per_round > clients and not fixes_clients(self.data.partition):
            raise UserError(
                f"federation.clients_per_round={per_round} exceeds data.clients={clients}; lower it: "
                f"--clients-per-round {clients}, in Python clients_per_round={clients}"
            )
        every, eval_every = self.flatness.every, self.evaluation.every
        if every is not None and every % eval_every:
            next_multiple = (every // eval_every + 1) * eval_every
            raise UserError(
                f"flatness.every={every} is not a multiple of evaluation.every={eval_every}; "
                f"use flatness.every={next_multiple} or evaluate more often"
            )
        if self.stop.patience is not None and self.data.validation == 0:
            raise UserError("stop.patience needs a validation split; set data.validation, for example to 0.1")
        if self.init is None and (self.init_head == "fresh" or self.init_rounds):
            setting = "init_head=fresh" if self.init_head == "fresh" else f"init_rounds={self.init_rounds}"
            raise UserError(f"{setting} needs initial weights; set init, or remove the setting")
        if self.init_rounds >= self.training.rounds:
            raise UserError(
                f"init_rounds={self.init_rounds} leaves no rounds to train: training.rounds={self.training.rounds} "
                f"counts from round 0; use more than {self.init_rounds} rounds, e.g. --rounds {2 * self.init_rounds}"
            )
        return self

    def is_evaluated(self, rounds: int) -> bool:
        """Whether models are evaluated after ``rounds`` rounds; they always are after the last one."""
        last = self.training.rounds
        return rounds % self.evaluation.every == 0 or rounds > last - self.evaluation.final or rounds == last

    def last_evaluation(self, rounds: int) -> int:
        """The round of the last evaluation in a run of ``rounds`` rounds; the initial model is always evaluated."""
        return next((each for each in range(rounds, self.init_rounds, -1) if self.is_evaluated(each)), self.init_rounds)

    def fixed_settings(self) -> dict[str, Any]:
        """The settings that must not change between a run's first round and its last, as nested values."""
        return self.model_dump(mode="json", exclude=MAY_CHANGE)

    def to_yaml(self) -> str:
        """The config as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def setting_names(group: type[SettingsGroup] = Config, prefix: str = "") -> Iterator[str]:
    """The full names of all settings, e.g. ``training.lr``."""
    for name, field in group.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsGroup):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@lru_cache(maxsize=1024)  # a sweep validates the same algorithms in thousands of configs
def _canonical(text: str) -> str:
    """Spell an algorithm in the canonical way; raises a ``UserError`` if it does not exist."""
    from fedflat.algorithms import algorithm, canonical  # imports torch, which --help must not wait for

    return canonical(algorithm(text))


def parse_config(values: dict[str, Any], is_stored: bool = False) -> Config:
    """Validate nested values; the first invalid setting raises a ``UserError``.

    Args:
        values: settings by group and name.
        is_stored: whether they come from a run folder; then the algorithm need not be registered here.
    """
    version = values.get("format", FORMAT)
    if version != FORMAT:
        is_newer = isinstance(version, int) and version > FORMAT
        remedy = "upgrade fedflat with pip install --upgrade fedflat" if is_newer else f"use format: {FORMAT}"
        raise UserError(
            f"this config has format {version}, but this version of fedflat reads format {FORMAT}; {remedy}"
        )
    try:
        return Config.model_validate(values, context=STORED if is_stored else None)
    except ValidationError as error:
        raise _user_error(error) from None


def describe_difference(ours: Config, theirs: Config) -> str:
    """Describe the settings that affect results and differ between two configs; empty if there are none."""
    differences = []
    for name in setting_names():
        get = attrgetter(name)
        if changes_results(name) and get(ours) != get(theirs):
            differences.append(f"{name}={get(ours)} instead of {get(theirs)}")
    return ", ".join(differences)


def changes_results(name: str) -> bool:
    """Whether a setting, given by its full name, affects the result of a run by more than rounding."""
    return not name.startswith("engine.") or name == "engine.precision"


def _user_error(error: ValidationError) -> UserError:
    """Convert the first of pydantic's validation errors into a message that names the setting and suggests a fix."""
    errors = error.errors()
    first = errors[0]
    # The path to the setting, e.g. ("training", "lr"): the groups that contain it, then its name.
    *groups, name = (str(part) for part in first["loc"] or ("the config",))
    full_name = ".".join([*groups, name])
    if first["type"] == "extra_forbidden":  # the group has no setting of this name
        group: Any = Config
        for part in groups:
            group = group.model_fields[part].annotation
        if isinstance(first["input"], dict) and first["input"]:  # an unknown group; name its first setting in full
            name = next(flat({name: first["input"]}))[0]
            return unknown_setting(name, setting_names(group), ".".join(groups))
        return unknown_setting(name, {*group.model_fields, *setting_names(group)}, ".".join(groups))
    if first["type"] in ("model_type", "model_attributes_type"):  # one value was given for a group of settings
        suggestion = suggest_setting(full_name)
        hint = f"did you mean {SHORT_NAMES.get(suggestion, suggestion)}?" if suggestion else "set those instead"
        return UserError(f"{full_name}={first['input']!r} is invalid: {full_name} is a group of settings; {hint}")
    message = first["msg"][0].lower() + first["msg"][1:]  # pydantic's message, as the end of ours
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return UserError(f"{full_name}={first['input']!r} is invalid: {message}{more}")
