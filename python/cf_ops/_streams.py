"""Texts without end: a model that keeps the first and the newest tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cf_ops import _core
from cf_ops._generation import Piece, Prompt, Settings
from cf_ops._text import TextStream

if TYPE_CHECKING:
    from cf_ops.model import Model

_KEPT_IDS = 64  # whose text the next pieces are decoded behind
_MOST_IDS = 4096  # that are kept before all but the newest are forgotten


class Stream(Iterator[Piece]):
    """The continuation of one prompt without end, an iterator over its pieces: text in whole characters, or ids.

    Neither the time of a step nor memory grows with the text, beside four bytes for each id. `count` says how many ids
    were made. As a context manager it ends the stream with the block.
    """

    def __init__(self, model: Model, prompt: Prompt, settings: Settings, most: int | None) -> None:
        self.count = 0
        ids = model.encode(prompt)
        self._tokenizer = model.tokenizer if isinstance(prompt, str) else None
        self._text = TextStream(self._tokenizer) if self._tokenizer is not None else None
        self._newest: list[int] = []
        self._decoder = model.decoder(1, max(1, len(ids)))
        try:
            self._sequence = self._decoder.add(
                ids,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
                seed=settings.seed,
                stop=settings.stop_ids or [],
                max_new_tokens=most,
            )
        except BaseException:
            self._decoder.close()
            raise
        self._done = False

    def close(self) -> None:
        """Ends the stream. On a GPU its slot is free for another one."""
        if not self._done:
            self._done = True
            self._decoder.drop(self._sequence)
            self._decoder.close()

    def __enter__(self) -> Stream[Piece]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __next__(self) -> Any:
        while not self._done:
            try:
                made = self._decoder.decode(1)
            except BaseException:
                self.close()
                raise
            finish = self._decoder.finish(self._sequence)
            if finish == "failed":
                error = self._decoder.status(self._sequence)
                self.close()
                raise _core.CfError(error)
            piece: str | int | None = None
            for _, id in made:
                self.count += 1
                piece = id if self._text is None else self._put(id)
            if finish != "running":
                self.close()
                if self._text is not None:
                    piece = f"{piece or ''}{self._text.finish()}"
            if piece is not None and piece != "":
                return piece
        raise StopIteration

    def _put(self, id: int) -> str:
        """The characters that are whole with an id."""
        assert self._text is not None and self._tokenizer is not None
        piece = self._text.put(id)
        self._newest.append(id)
        if len(self._newest) >= _MOST_IDS and self._text.is_whole:
            self._newest = self._newest[-_KEPT_IDS:]
            self._text = TextStream(self._tokenizer, context=self._newest)
        return piece

    def __repr__(self) -> str:
        return f"cf_ops.Stream({self.count} new ids{', ended' if self._done else ''})"

    def __reduce__(self) -> Any:
        raise TypeError("a Stream cannot be pickled: its cache belongs to this process")
