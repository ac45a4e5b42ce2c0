"""Models of text that take keyword arguments, as in ``transformers``, called with one tensor of tokens.

Engines, algorithms and flatness measures call a model with one tensor of inputs and expect a tensor. Hooks on the model
translate: a call with one positional argument, tokens [batch, length] with -100 for padding, becomes
``model(input_ids, attention_mask=...)`` and returns the logits of the output object. Calls with keyword arguments stay
unchanged, and so do the class of the model and the names of its tensors.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.data import IGNORED_TOKEN, Dataset, Examples
from fedflat.data.dataset import token_range
from fedflat.errors import UserError
from fedflat.models.lstm import CharacterNetwork

SAMPLE = 10_000
"""Texts that are searched for padding."""


@dataclass(frozen=True)
class TokenArguments:
    """A hook that converts a tensor of tokens to the arguments of a model.

    Attributes:
        padding: token that replaces padding, which the model does not attend to.
        has_mask: whether the model takes an attention mask.
        has_cache: whether the model can cache keys and values, which only the generation of text needs.
    """

    padding: int
    has_mask: bool
    has_cache: bool

    def __call__(
        self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments for a call with tokens [batch, length]; None leaves other calls unchanged."""
        if keywords or len(arguments) != 1:
            return None
        (tokens,) = arguments
        is_padding = tokens == IGNORED_TOKEN
        if self.has_mask:
            keywords = {"attention_mask": (~is_padding).long()}
        if self.has_cache:
            keywords = keywords | {"use_cache": False}
        return (torch.where(is_padding, self.padding, tokens),), keywords


def _logits(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
    """A hook that returns the logits of a model's output object, if ``TokenArguments`` has converted its arguments."""
    if len(arguments) != 1 or isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if logits is None:
        raise UserError(
            f"{type(model).__name__} returns no logits; use a model with a head, such as "
            "AutoModelForSequenceClassification or AutoModelForCausalLM"
        )
    # Prompt tuning puts virtual tokens before those of a text.
    return logits[:, -arguments[0].shape[1] :] if logits.ndim == 3 else logits


def takes_keywords(model: nn.Module) -> bool:
    """Whether a model takes tokens as the argument ``input_ids``, as the models of ``transformers`` do."""
    return "input_ids" in _parameters(model)


def _parameters(model: nn.Module) -> Mapping[str, Any]:
    """The parameters of a model's forward pass by name; empty if Python does not know them, as in TorchScript.

    Models of ``peft`` pass their arguments to a base model.
    """
    get_base_model = getattr(model, "get_base_model", None)
    try:
        return inspect.signature((get_base_model() if callable(get_base_model) else model).forward).parameters
    except (TypeError, ValueError):
        return {}


def adapt(model: nn.Module) -> nn.Module:
    """Let a model that takes keywords accept one tensor of tokens, and return logits; other models are unchanged.

    The model is changed in place and returned.
    """
    is_adapted = any(isinstance(hook, TokenArguments) for hook in model._forward_pre_hooks.values())
    if is_adapted or not takes_keywords(model):
        return model
    names = _parameters(model)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    arguments = TokenArguments(padding or 0, "attention_mask" in names, "use_cache" in names)
    model.register_forward_pre_hook(arguments, with_kwargs=True)
    model.register_forward_hook(_logits, with_kwargs=True)
    return model


def vocabulary_size(model: nn.Module) -> int:
    """Number of tokens that a model of text has embeddings for; 0 if it is unknown."""
    if isinstance(model, CharacterNetwork):
        return model.embedding.num_embeddings
    get_embeddings = getattr(model, "get_input_embeddings", None)
    embedding = get_embeddings() if callable(get_embeddings) else None
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else 0


def check_tokens(model: nn.Module, name: str, data: Dataset, sets: Mapping[str, Examples]) -> None:
    """Reject data with tokens outside a model's vocabulary, or with longer texts than the model accepts.

    Warns of texts that seem to be padded with tokens instead of -100. A forward pass on two examples, as for other
    models, may miss such tokens, and its error would not say what to do.

    Args:
        model: the model.
        name: its name, for messages.
        data: the dataset.
        sets: sets to evaluate on, by name.
    """
    config, vocabulary = getattr(model, "config", None), vocabulary_size(model)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{name} is an encoder-decoder model, which is not supported; use an encoder-only or decoder-only model"
        )
    remedy = "renumber the tokens, or name all classes"
    if takes_keywords(model):
        remedy = "use the tokeniser of this model, or resize its embeddings"
    for examples in (data.train, *sets.values()):
        low, high = token_range(examples.inputs)
        if low < 0 or high >= vocabulary:
            raise UserError(
                f"{data.name} contains the token {low if low < 0 else high}, but {name} accepts 0 to "
                f"{vocabulary - 1}; {remedy}"
            )
    longest = _longest_text(model)
    if longest is not None and data.input_shape[0] > longest:
        raise UserError(
            f"the texts of {data.name} have {data.input_shape[0]} tokens, but {name} accepts at most {longest}; "
            f"truncate or divide them (length={longest})"
        )
    for padding in (getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)):
        if isinstance(padding, int):
            _warn_of_padding(data, name, padding)
            return


def _warn_of_padding(data: Dataset, name: str, padding: int) -> None:
    """Warn if texts begin or end with the token ``padding`` of the model ``name``, and no text is padded with -100."""
    tokens = data.train.inputs[:SAMPLE]
    # One such token may be the end of a text.
    is_padded = (tokens[:, -2:] == padding).all(1) | (tokens[:, :2] == padding).all(1)
    if tokens.shape[1] > 2 and is_padded.any() and not (tokens == IGNORED_TOKEN).any():
        warnings.warn(
            f"texts of {data.name} begin or end with token {padding}, which {name} uses for padding; replace padding "
            f"with {IGNORED_TOKEN}, which is ignored: numpy.where(attention_mask, input_ids, {IGNORED_TOKEN})",
            stacklevel=2,
        )


def _longest_text(model: nn.Module) -> int | None:
    """Largest number of tokens that a model accepts; None if it is unlimited or unknown."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for module in model.modules():
        positions = getattr(module, "position_embeddings", None)
        if isinstance(longest, int) and isinstance(positions, nn.Embedding) and positions.padding_idx is not None:
            return longest - positions.padding_idx - 1  # RoBERTa numbers positions from there on
    return longest if isinstance(longest, int) else None
