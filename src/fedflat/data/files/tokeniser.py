"""Tokenisers convert texts to token ids.

``bytes`` needs no other package. A folder in Hugging Face layout, a ``tokenizer.json`` file, or any tokeniser of
``transformers`` has subwords.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from fedflat.errors import UserError, first_line
from fedflat.registry import require_package

BYTES = "bytes"
TOKENISER_VALUES = (
    "bytes, a tokenizer.json file, a folder written by save_pretrained, or a name on the Hugging Face Hub"
)
"""Values of the option ``tokeniser``, for help and messages."""


class Tokeniser(Protocol):
    """Converts texts to token ids, numbered from 0."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens in the order of their numbers."""
        ...

    def sequences(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text followed by the token that ends a text, for language models."""
        ...

    def classified(self, texts: list[str], length: int) -> list[list[int]]:
        """Return at most ``length`` tokens of each text, with the special tokens that classifiers expect."""
        ...


class ByteTokeniser:
    """The bytes of a text in UTF-8; token 256 ends a text.

    >>> ByteTokeniser().sequences(["abc"])
    [[97, 98, 99, 256]]
    """

    END = 256

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return *(chr(byte) if 32 < byte < 127 else f"0x{byte:02x}" for byte in range(self.END)), "<end>"

    def sequences(self, texts: list[str]) -> list[list[int]]:
        return [[*text.encode("utf-8", "replace"), self.END] for text in texts]

    def classified(self, texts: list[str], length: int) -> list[list[int]]:
        return [tokens[:length] for tokens in self.sequences(texts)]


class PretrainedTokeniser:
    """A tokeniser of ``transformers``."""

    def __init__(self, tokeniser: Any) -> None:
        self._tokeniser = tokeniser

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(map(str, self._tokeniser.convert_ids_to_tokens(list(range(len(self._tokeniser))))))

    def sequences(self, texts: list[str]) -> list[list[int]]:
        end = [self._tokeniser.eos_token_id, self._tokeniser.sep_token_id]
        ending = [token for token in end if token is not None][:1]
        encoded = self._tokeniser(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [[*tokens, *ending] for tokens in encoded]

    def classified(self, texts: list[str], length: int) -> list[list[int]]:
        encoded: list[list[int]] = self._tokeniser(texts, truncation=True, max_length=length)["input_ids"]
        return encoded


def load_tokeniser(tokeniser: Any) -> Tokeniser:
    """Return the tokeniser that ``tokeniser`` names, or the given one of ``transformers``.

    Args:
        tokeniser: ``bytes``, a file or folder that contains a tokeniser, a name on the Hugging Face Hub, or an object.
    """
    if tokeniser == BYTES:
        return ByteTokeniser()
    if not isinstance(tokeniser, str | Path):
        if not callable(tokeniser) or not hasattr(tokeniser, "convert_ids_to_tokens"):
            raise UserError(
                f"the tokeniser is a {type(tokeniser).__name__}; expected a tokeniser of transformers, or "
                f"{TOKENISER_VALUES}"
            )
        return PretrainedTokeniser(tokeniser)
    transformers = require_package("transformers", f"the tokeniser {tokeniser}", extra="text")
    try:
        if Path(tokeniser).is_file():
            return PretrainedTokeniser(transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokeniser)))
        return PretrainedTokeniser(transformers.AutoTokenizer.from_pretrained(str(tokeniser)))
    except Exception as error:  # the errors of transformers have many types
        raise UserError(
            f"cannot load the tokeniser {tokeniser} ({first_line(error)}); expected {TOKENISER_VALUES}; to use one "
            "from the Hub offline, first run: hf download NAME --local-dir DIR, then set tokeniser=DIR"
        ) from error


def tokeniser_versions(tokeniser: str) -> list[str]:
    """Identify the content of a tokeniser's files without reading them; empty if it has no files."""
    path = Path(tokeniser)
    return [file_version(file) for file in ([path] if path.is_file() else sorted(path.glob("*")))]


def file_version(file: Path) -> str:
    """Identify the content of a file without reading it."""
    status = file.stat()
    return f"{file.absolute()} {status.st_size} {status.st_mtime_ns}"
