"""Text in and out: a checkpoint's tokenizer, and the text of ids that come one by one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def open_tokenizer(directory: str) -> Tokenizer:
    """The tokenizer of a checkpoint's tokenizer.json, which neither cuts nor pads what it encodes: a file may hold both
    settings of an earlier call.

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
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, name: str = "prompt", special_tokens: bool = True) -> list[int]:
    """A text's ids, by default with the special tokens that the tokenizer adds. Raises ValueError for what UTF-8 cannot hold, where
    `name` is what the text is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected text that UTF-8 can hold: {error}") from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
    return ids


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins in a text; None where there is none."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


def _rewrites_joined_text(tokenizer: Tokenizer) -> bool:
    """Whether the decoder replaces text longer than single characters after joining it: any id may then change the text
    of the ids before it."""
    if tokenizer.decoder is None:
        return False
    steps = json.loads(tokenizer.decoder.__getstate__()).get("decoders", [])
    kinds = [step["type"] for step in steps]
    joined = min((kinds.index(kind) for kind in ("Fuse", "ByteLevel") if kind in kinds), default=len(kinds))
    return any(s["type"] == "Replace" and len(s["pattern"].get("String", "..")) > 1 for s in steps[joined:])


class TextStream:
    """The text of ids that come one by one, in whole characters: the pieces of put() and finish() together are what
    ``tokenizer.decode(ids)`` returns, up to the first of the strings `stop`. As there, special tokens are no part of the
    text, and bytes that form no character become U+FFFD. Behind the ids `context` the text is what they add to that of
    the context: in some vocabularies the first word of a text has no space.

    A piece is given out once no later id can change it: U+FFFD at the end may become a character, and a byte token of
    ByteFallback, such as ``<0xE6>``, may change how all byte tokens right before it decode. A decoder that rewrites the
    joined text gives out nothing before the end.
    """

    _BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._waits = _rewrites_joined_text(tokenizer)
        self._skipped = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        # Those that are part of the text, behind the context.
        self._ids = [id for id in context if tokenizer.id_to_token(id) is not None and id not in self._skipped]
        self._start = len(tokenizer.decode(self._ids))  # where the text begins
        self._before = 0  # from this id to `_begin` is the context that a decoder may need, such as for spaces
        self._begin = len(self._ids)  # the first id whose text was not returned yet
        self._kept = ""  # text before those ids, kept because a stop string may begin in it
        self._given = 0  # the characters that were given out
        self.stopped = False  # whether the text has ended with a stop string

    @property
    def is_whole(self) -> bool:
        """Whether the text of all ids was given out."""
        return self._begin == len(self._ids) and not self._kept

    def put(self, id: int) -> str:
        """Takes an id; returns the characters that are whole now and were not returned before."""
        token = self._tokenizer.id_to_token(id)
        if self.stopped or token is None or id in self._skipped:
            return ""
        self._ids.append(id)
        waits = self._waits or self._BYTE.fullmatch(token) is not None
        if waits and not self._stop:
            return ""
        piece = self._piece()
        if (at := first_stop(self._kept + piece, self._stop)) is not None:
            return self._end((self._kept + piece)[:at])
        if waits or not piece or piece.endswith("\ufffd"):
            return ""
        self._before, self._begin = self._begin, len(self._ids)
        text = self._kept + piece
        kept = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._kept = text[len(text) - kept :]
        return self._give(text[: len(text) - kept])

    def finish(self) -> str:
        """Ends the text; returns what put() has not returned."""
        if self.stopped:
            return ""
        text: str = self._tokenizer.decode(self._ids)[self._start :]
        return self._end(text[self._given : first_stop(text, self._stop)])

    def _piece(self) -> str:
        """The text of the ids that are still to be given out."""
        context = self._tokenizer.decode(self._ids[self._before : self._begin])
        text = self._tokenizer.decode(self._ids[self._before :])
        return text[len(context) :] if text.startswith(context) else ""

    def _end(self, text: str) -> str:
        self.stopped = True
        return self._give(text)

    def _give(self, text: str) -> str:
        self._given += len(text)
        return text
