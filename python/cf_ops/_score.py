"""Log-probabilities of given ids: :meth:`Model.score` and :meth:`Model.perplexity`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cf_ops import _core
from cf_ops._arguments import integer, is_one, kind_of, row_of_ids
from cf_ops._progress import Progress

if TYPE_CHECKING:
    from cf_ops._generation import Prompt
    from cf_ops.model import Model

_IDS_AT_ONCE = 1 << 18  # ids of the windows that a scorer holds


@dataclasses.dataclass(eq=False)
class Scored:
    """The log-probabilities of a prompt's ids from the position `first` on, n in number.

    prompt: the prompt's ids. log_probs: float64 (n), log p(id | the ids before it) in nats. greedy: bool (n), whether
    the id is the most likely one, of equally likely ones the lowest: the id of greedy decoding. top_ids, top_log_probs:
    (n, top), the most likely ids behind the same ids before, the most likely first. error: None, or why the prompt has
    failed, such as a NaN among logits; the arrays then end before the id without a log-probability.
    """

    prompt: list[int]
    first: int
    log_probs: NDArray[np.float64]
    greedy: NDArray[np.bool_]
    top_ids: NDArray[np.int32]
    top_log_probs: NDArray[np.float64]
    error: str | None = None

    @property
    def sum(self) -> float:
        """log p(the ids from `first` on | the ids before them), the sum of `log_probs`; NaN where the prompt failed."""
        return math.nan if self.error else float(self.log_probs.sum())

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding of the ids before `first` gives the scored ids."""
        return self.error is None and bool(self.greedy.all())

    @property
    def perplexity(self) -> float:
        """exp(-sum / n); NaN where the prompt failed."""
        return float(np.exp(-self.sum / (len(self.prompt) - self.first)))


class Perplexity(NamedTuple):
    """exp of the mean negative log likelihood.

    perplexity: exp(nll). error: its standard error, perplexity * nll_error. nll: the mean of -log p(id) over the scored
    ids, in nats. nll_error: the standard error of that mean. positions: the scored ids.
    """

    perplexity: float
    error: float
    nll: float
    nll_error: float
    positions: int


def score(
    model: Model,
    prompts: Iterable[Prompt],
    first: int | Iterable[int],
    top: int,
    slots: int | None,
    quiet: bool = False,
) -> list[Scored]:
    """What :meth:`Model.score` returns. quiet: whether nothing is shown of how far the work has come."""
    if is_one(prompts):
        raise TypeError(f"prompts: expected a list of prompts, got one {kind_of(prompts)}")
    ids = [model.encode(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
    firsts = _firsts(first, len(ids))
    top = integer("top", top, 0, model.config["vocab_size"])
    slots = _slots_for(model, len(ids)) if slots is None else integer("slots", slots, 1, 1 << 20)
    for index, (prompt, at) in enumerate(zip(ids, firsts)):
        if len(prompt) < 2:
            raise ValueError(
                f"prompt {index}: expected at least 2 ids, one to score and one before it, got {len(prompt)}"
            )
        integer(f"prompt {index}: first", at, 1, len(prompt) - 1)
    if not ids:
        return []
    with (
        _scorer(model, slots, max(len(prompt) for prompt in ids) - 1) as scorer,
        Progress("" if quiet else f"scoring {len(ids)} prompts") as progress,
    ):
        made = _scores(scorer, list(zip(ids, firsts)), top, _nothing if quiet else progress.set)
    return [Scored(prompt, at, *arrays) for prompt, at, arrays in zip(ids, firsts, made)]


def surprisal(model: Model, ids: Prompt, context: int = 2048, stride: int | None = None) -> NDArray[np.float64]:
    """-log p of each id given those before it in its window, in nats; NaN for an id that begins its window and is
    scored in no other, as the first of all.

    Windows are those of :meth:`Model.perplexity`, which is exp of the mean. Raises what that raises.
    """
    row = row_of_ids("ids", model.encode(ids) if isinstance(ids, str) else ids)
    context = integer("context", context, 2, 2**31 - 1)
    stride = context if stride is None else integer("stride", stride, 1, context)
    if row.ndim != 1 or row.size < 2 or row.dtype.kind not in "iu":
        raise ValueError(f"ids: expected at least 2 integers in one dimension, got {row.dtype} of {row.shape}")
    vocab_size = model.config["vocab_size"]
    if row.min() < 0 or row.max() >= vocab_size:
        raise ValueError(f"ids: expected integers of 0 to {vocab_size - 1}, got {row.min()} to {row.max()}")
    context = min(context, row.size)
    windows = list(_windows(row.size, context, stride))
    at_once = max(1, _IDS_AT_ONCE // context)
    made = np.full(row.size, np.nan)
    read, total = 0, sum(window.read for window in windows)
    with _scorer(model, _slots_for(model, len(windows)), context - 1) as scorer, Progress("scoring") as progress:
        for begin in range(0, len(windows), at_once):
            some = windows[begin : begin + at_once]
            prompts = [(row[w.first : w.last], w.scored - w.first) for w in some]
            scores = _scores(scorer, prompts, 0, lambda done, _: progress.set(read + done, total))
            for window, (log_probs, _, _, _, error) in zip(some, scores):
                if error is not None:
                    raise ValueError(f"ids {window.first} to {window.last - 1}: {error}")
                made[window.scored : window.last] = -log_probs
            read += sum(window.read for window in some)
            progress.set(read, total)
    return made


def perplexity(model: Model, ids: Prompt, context: int, stride: int | None) -> Perplexity:
    """What :meth:`Model.perplexity` returns."""
    nll = surprisal(model, ids, context, stride)
    nll = nll[~np.isnan(nll)]
    if np.isinf(nll).any():
        raise ValueError(f"ids: expected a probability above 0 of each, got {np.count_nonzero(np.isinf(nll))} of 0")
    mean = float(nll.mean())
    error = float(nll.std(ddof=1) / np.sqrt(nll.size)) if nll.size > 1 else 0.0
    return Perplexity(float(np.exp(mean)), float(np.exp(mean)) * error, mean, error, nll.size)


class _Window(NamedTuple):
    """The ids [first, last) of a text, of which those from `scored` on are scored."""

    first: int
    last: int
    scored: int

    @property
    def read(self) -> int:
        """The ids that the model reads; the last one is scored alone."""
        return self.last - self.first - 1


def _windows(count: int, context: int, stride: int) -> Iterator[_Window]:
    first, scored = 0, 1
    while scored < count:
        last = min(first + context, count)
        begin = max(scored, first + 1)  # the first id of a window has no prediction
        if begin < last:
            yield _Window(first, last, begin)
        first, scored = first + stride, last


def _firsts(first: int | Iterable[int], count: int) -> list[int]:
    if is_one(first):
        return [integer("first", first)] * count
    firsts = [integer(f"first[{index}]", at) for index, at in enumerate(first)]  # type: ignore[arg-type]
    if len(firsts) != count:
        raise ValueError(f"first: expected one position, or {count}, one a prompt, got {len(firsts)}")
    return firsts


def _slots_for(model: Model, prompts: int) -> int:
    """How many prompts a step reads side by side. The CPU reads many no faster than one."""
    return 1 if model.device == "cpu" else model.slots_for(max(1, prompts))


@contextmanager
def _scorer(model: Model, slots: int, capacity: int) -> Iterator[_core.Scorer]:
    """A scorer whose slots are free again at the end, also where an error's traceback keeps the scorer."""
    scorer = model.scorer(slots, capacity)
    try:
        yield scorer
    finally:
        scorer.close()


def _scores(
    scorer: _core.Scorer,
    prompts: Sequence[tuple[Any, int]],
    top: int,
    tell: Callable[[int, int], None],
) -> list[Any]:
    scorer.begin(prompts, top=top)
    while not scorer.done:
        scorer.step()
        tell(*scorer.progress)
    return scorer.scores()


def _nothing(done: int, total: int) -> None:
    pass
