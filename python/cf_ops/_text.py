"""Text in and out: a checkpoint's tokenizer, and the text of ids that come one by one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def open_tokenizer(directory: str) -> Tokenizer:
    """The tokenizer of a checkpoint's tokenizer.json.

    Raises FileNotFoundError for a checkpoint without that file, ValueError for a file that tokenizers refuses, and
    ImportError without the package tokenizers.
    """
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file, expected it for text; ids need none")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("text needs the package tokenizers, which is missing: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{path}: {error}") from None


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's ids, with the special tokens that the tokenizer adds. Raises ValueError for what UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt: expected text that UTF-8 can hold: {error}") from None
    ids: list[int] = tokenizer.encode(text).ids
    return ids


class TextStream:
    """The text of ids that come one by one, in whole characters: the pieces of put() and finish() together are what
    ``tokenizer.decode(ids)`` returns. As there, special tokens are no part of the text, and bytes that form no
    character become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0  # from this id to `_begin` is the context that a decoder may need, such as for spaces
        self._begin = 0  # ids from here on are still to be given out

    def put(self, id: int) -> str:
        """Takes an id; returns the characters that are whole now and were not returned before."""
        self._ids.append(id)
        piece = self._rest()
        # The tokenizer decodes the bytes of an incomplete character to U+FFFD. The piece waits for the other bytes.
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._before, self._begin = self._begin, len(self._ids)
        return piece

    def finish(self) -> str:
        """Ends the text; returns what put() has not returned."""
        return self._rest()

    def _rest(self) -> str:
        context = self._tokenizer.decode(self._ids[self._before : self._begin])
        text = self._tokenizer.decode(self._ids[self._before :])
        return text[len(context) :] if text.startswith(context) else ""
