"""Models in Hugging Face layout: a folder with ``config.json`` and, if they are pretrained, weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fedflat.errors import UserError, first_line
from fedflat.models.registry import ModelSpec, require_sequence
from fedflat.registry import require_package
from fedflat.text import param

HEADS = {
    "AutoModelForSequenceClassification": ("ForSequenceClassification",),
    "AutoModelForTokenClassification": ("ForTokenClassification",),
    "AutoModelForMaskedLM": ("ForMaskedLM",),
    "AutoModelForCausalLM": ("ForCausalLM", "LMHeadModel"),
}
"""Classes of ``transformers`` by the endings of the architectures that they build."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class HuggingFace(ModelSpec):
    """A model of text in Hugging Face layout, for example a folder written by ``save_pretrained``.

    Without weights in the folder, or with ``random``, they are initialised at random. Requires ``transformers``.
    """

    name = "hf"
    example = "hf(path=DIR)"
    dataset = "'text(path=reviews.jsonl,target=label,tokeniser=DIR)'"
    path: str = param("", "folder with config.json", path=True, positional=True)
    hub: str | None = param(None, "name of a model on the Hugging Face Hub, instead of path")
    head: Literal["auto", "classes", "tokens"] = param(
        "auto", "what to predict: the class of a text, the next token, or (auto) as config.json says"
    )
    random: bool = param(False, "initialise all weights at random")

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise a ``UserError`` unless samples are token sequences, and the folder has a config."""
        require_sequence(self.name, input_shape)
        if self.hub is not None:
            return
        if not self.path:
            raise UserError("hf needs a folder; write for example hf(path=DIR), or hf(hub=gpt2)")
        if not (Path(self.path) / "config.json").is_file():
            raise UserError(f"{self.path} has no config.json; expected a folder written by save_pretrained")

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the model, with weights from the folder if it has them; ``classes`` sets the size of a new head."""
        transformers = require_package("transformers", "the model hf", extra="text")
        source = self.hub or self.path
        logging = transformers.utils.logging
        has_progress_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            config = transformers.AutoConfig.from_pretrained(source)
            builder = getattr(transformers, self._builder(getattr(config, "architectures", None) or []))
            if "Classification" in builder.__name__:
                config.num_labels = classes
                if config.pad_token_id is None:  # classifiers find the end of a text by its padding
                    config.pad_token_id = config.eos_token_id if isinstance(config.eos_token_id, int) else 0
            # Counting parameters needs no weights.
            is_counted_only = torch.get_default_device().type == "meta"
            if self.random or is_counted_only or not self._has_weights():
                network: nn.Module = builder.from_config(config)
            else:
                network = builder.from_pretrained(source, config=config, ignore_mismatched_sizes=True)
        except UserError:
            raise
        except Exception as error:  # the errors of transformers have many types
            remedy = f"; to use it offline: hf download {source} --local-dir DIR, then hf(path=DIR)" if self.hub else ""
            raise UserError(f"cannot build the model {source}: {first_line(error)}{remedy}") from error
        finally:
            if has_progress_bar:
                logging.enable_progress_bar()
        return network.float().train()

    def _builder(self, architectures: list[str]) -> str:
        """Return the class of ``transformers`` that builds a model with the wanted head."""
        if self.head != "auto":
            return "AutoModelForSequenceClassification" if self.head == "classes" else "AutoModelForCausalLM"
        for builder, endings in HEADS.items():
            if any(name.endswith(endings) for name in architectures[:1]):
                return builder
        architecture = f"has the architecture {architectures[0]}" if architectures else "names no architecture"
        raise UserError(
            f"the config.json of {self.hub or self.path} {architecture}, which does not tell what to predict; choose "
            "head=classes or head=tokens"
        )

    def _has_weights(self) -> bool:
        return self.hub is not None or any((Path(self.path) / file).is_file() for file in WEIGHTS)
