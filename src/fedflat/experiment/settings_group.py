"""The base class of groups of settings, in configs and sweep files."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from fedflat.setting_names import MAX_COUNT, MAX_SEED, forbidden_character


class SettingsGroup(BaseModel):
    """A group of settings; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    def changed(self, **values: Any) -> Self:
        """Copy these settings with other values, which are not validated; a dictionary changes a group within them.

        >>> from fedflat.experiment.config import Config
        >>> Config().changed(seed=1, engine={"device": "cpu"}).engine.device
        'cpu'
        """
        update = dict(values)
        for name, value in values.items():
            group = getattr(self, name)
            if isinstance(group, SettingsGroup) and isinstance(value, dict):
                update[name] = group.changed(**value)
        return self.model_copy(update=update)

    @field_validator("*", mode="before")
    @classmethod
    def _check_raw_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans where a number is expected, large numbers, and text with forbidden characters.

        A word such as ``MSE`` gets the spelling of the setting's choices, ``mse``.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool):
            accepted = _accepted_types(annotation)
            if {int, float} & accepted and bool not in accepted:
                raise PydanticCustomError("number_type", "expected a number")
        largest = MAX_SEED if str(info.field_name).endswith("seed") else MAX_COUNT
        if isinstance(value, int) and value > largest:
            raise PydanticCustomError("too_large", f"expected at most {largest}")
        if isinstance(value, str) and (forbidden := forbidden_character(value)):
            raise PydanticCustomError("forbidden_character", f"the text contains {forbidden}")
        is_word = isinstance(value, str) and get_origin(annotation) is Literal
        return value.strip().lower() if is_word else value


def _accepted_types(annotation: Any) -> set[type]:
    """The plain types that an annotation such as ``int | None`` or a ``Literal`` accepts."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    return set(get_args(annotation) or (annotation,))
