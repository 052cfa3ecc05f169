"""How prompts are continued: the options, what comes out, and the sessions that make it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from cf_ops import _core
from cf_ops._arguments import flag, integer, is_one, kind_of, real
from cf_ops._text import TextStream, first_stop

if TYPE_CHECKING:
    from cf_ops.model import Model

MOST_INT = 2**31 - 1
MOST_DRAFT = 7
_MOST_SEED = 2**64 - 1
_MOST_BIAS = float(np.finfo(np.float32).max)

Piece = TypeVar("Piece", str, int)
Ids = Sequence[int] | NDArray[Any]  # and tensors of torch
Prompt = str | Ids
LogitsProcessor = Callable[[NDArray[np.float32], NDArray[np.int32]], Any]
Drafter = Callable[[NDArray[np.int32], int], Ids]


@dataclasses.dataclass
class Generated:
    """What a prompt was continued with.

    prompt: the prompt's ids. ids: the new ids; one that ended the sequence is the last. finish: "stop" (an id or a text
    of `stop`), "length" (max_new_tokens), "failed" (`error` says how), "interrupted" (Ctrl-C), or "running". text: what
    the tokenizer decodes `ids` to, without special tokens, up to a text of `stop`, behind the prompt where `echo` asks
    for it; None where the prompt was ids.

    logprobs, top_logprobs: where they were asked for, of each of `ids` the natural logarithm of its probability, and
    those of the likeliest ids, by id, the likeliest first; else None. Probabilities are the softmax of the logits that
    the model made, before penalties, biases, temperature and cut-offs, in float64.

    drafted, accepted: where drafts were asked for, how many of their ids were verified, and how many of these the sequence
    was given; else None.

    prompt_logprobs, prompt_top_logprobs: where `echo` was asked for beside them, the same of each of `prompt`, given the
    ids before it; the first one has no prediction, None. They are those of :meth:`Model.score`.
    """

    prompt: list[int]
    ids: list[int] = dataclasses.field(default_factory=list)
    finish: str = "running"
    error: str | None = None
    text: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    drafted: int | None = None
    accepted: int | None = None


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C in :meth:`Model.generate_batch`; `results` has what each prompt was continued with until then."""

    def __init__(self, results: list[Generated]) -> None:
        super().__init__("interrupted")
        self.results = results


class Options(TypedDict, total=False):
    """The options of :meth:`Model.generate`, which says what they are."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    logits_processor: LogitsProcessor | None
    seed: int
    stop: int | str | Iterable[int | str] | None
    ignore_eos: bool
    logprobs: int | None
    echo: bool
    draft: str | Drafter | None
    draft_len: int


@dataclasses.dataclass
class Settings:
    """The options of :meth:`Model.generate`, checked. Raises TypeError and ValueError."""

    max_new_tokens: int = 32
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logits_processor: LogitsProcessor | None = None
    seed: int = 0
    stop: int | str | Iterable[int | str] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    draft: str | Drafter | None = None
    draft_len: int = MOST_DRAFT
    stop_ids: list[int] | None = dataclasses.field(init=False, default=None)  # None: the checkpoint's
    stop_texts: list[str] = dataclasses.field(init=False, default_factory=list)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        for name in options:
            if name not in names:
                raise TypeError(f"expected options among {', '.join(names)}, got {name!r}")
        return cls(**options)

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_new_tokens", 1, MOST_INT),
            ("min_new_tokens", 0, MOST_INT),
            ("top_k", 0, MOST_INT),
            ("seed", 0, _MOST_SEED),
            ("draft_len", 1, MOST_DRAFT),
        ):
            setattr(self, name, integer(name, getattr(self, name), least, most))
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: expected at most max_new_tokens, {self.max_new_tokens}, got {self.min_new_tokens}"
            )
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            setattr(self, name, real(name, getattr(self, name)))
        for name in ("ignore_eos", "echo"):
            setattr(self, name, flag(name, getattr(self, name)))
        if self.logprobs is not None:
            self.logprobs = integer("logprobs", self.logprobs, 0, MOST_INT)
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise TypeError(
                f"logits_processor: expected a function of the logits and the ids, got {kind_of(self.logits_processor)}"
            )
        if self.draft is not None and self.draft != "lookup" and not callable(self.draft):
            got = repr(self.draft) if isinstance(self.draft, str) else kind_of(self.draft)
            raise (ValueError if isinstance(self.draft, str) else TypeError)(
                f"draft: expected 'lookup' or a function of the ids and how many follow, got {got}"
            )
        self.logit_bias = self._biases()
        self._part_stop()
        if self.ignore_eos and self.stop_ids is None:
            self.stop_ids = []

    def _biases(self) -> dict[int, float]:
        if self.logit_bias is None:
            return {}
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias: expected biases by id, got {kind_of(self.logit_bias)}")
        biases = {}
        for id, bias in self.logit_bias.items():
            number = real(f"logit_bias[{id!r}]", bias)
            if not (abs(number) <= _MOST_BIAS or number == -math.inf):
                raise ValueError(f"logit_bias[{id!r}]: expected a float32 below infinity, got {number}")
            biases[integer("logit_bias", id, 0, MOST_INT)] = number
        return biases

    def _part_stop(self) -> None:
        """Parts the ids of `stop` from its texts."""
        if self.stop is None:
            return
        stop: Any = [self.stop] if is_one(self.stop) else list(self.stop)  # type: ignore[arg-type]
        if any(isinstance(s, str) and not s for s in stop):
            raise ValueError("stop: expected ids and texts that are not empty, got ''")
        self.stop_texts = [s for s in stop if isinstance(s, str)]
        others = [s for s in stop if not isinstance(s, str)]
        for s in others:
            if isinstance(s, (bytes, bytearray)):
                raise TypeError(f"stop: expected ids and texts, got {kind_of(s)}")
        if others or not self.stop_texts:
            self.stop_ids = [integer("stop", s) for s in others]


class Made(NamedTuple):
    """What a step has made for a sequence: its place in the results, an id, and the piece of text that is whole with it."""

    place: int
    id: int
    piece: str


class Session:
    """Continues prompts in a decoder, where the later ones wait for slots. `results` grows with each step(); the samples
    of a prompt follow each other there. One thread at a time has a step.

    streams: whether a prompt of text gets its pieces of text with each step. samples: how many of each prompt. is_text:
    whether prompts of ids, such as chats, are continued with text.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        settings: Settings,
        slots: int | None = None,
        streams: bool = False,
        samples: int = 1,
        is_text: bool = False,
    ) -> None:
        self.settings = settings
        self._samples = samples
        names = ["prompt"] if len(prompts) == 1 else [f"prompt {index}" for index in range(len(prompts))]
        self.prompts = list(prompts)
        self._prompt_ids = [model.encode(prompt, name) for prompt, name in zip(prompts, names)]
        sequences = range(len(prompts) * samples)
        self.results = [Generated(list(self._prompt_ids[index // samples])) for index in sequences]
        if settings.draft is not None:
            for result in self.results:
                result.drafted = result.accepted = 0
        if settings.logprobs is not None:
            for result in self.results:
                result.logprobs, result.top_logprobs = [], []
            if settings.echo:
                self._score_prompts(model, settings.logprobs)
        self._are_texts = are_texts = [is_text or isinstance(prompt, str) for prompt in prompts]
        if settings.stop_texts and not all(are_texts):
            raise ValueError(f"stop: expected ids, which end a prompt of ids, got {settings.stop_texts[0]!r}")
        self._tokenizer = model.tokenizer if any(are_texts) else None
        self._streams = [
            (
                TextStream(model.tokenizer, settings.stop_texts, self._context(index))
                if are_texts[index // samples] and (streams or settings.stop_texts)
                else None
            )
            for index in sequences
        ]
        self._stop = model.eos_token_ids if settings.stop_ids is None else settings.stop_ids
        self._lock = threading.RLock()  # a signal's handler may come in the thread that has it
        self._index_of: dict[int, int] = {}  # by the decoder's number of a sequence that has not ended
        self.slots = model.slots_for(len(sequences)) if slots is None else slots
        # The last new id is not appended to the cache.
        self.capacity = max(map(len, self._prompt_ids), default=1) + settings.max_new_tokens - 1
        self._decoder = model.decoder(max(1, self.slots), max(1, self.capacity))
        # Every prompt is checked before the first one is read.
        try:
            first: int | None = None  # the decoder's number of the first sample of a prompt
            for index in sequences:
                sequence = self._add(index, first if index % samples else None)
                self._index_of[sequence] = index
                first = sequence if index % samples == 0 else first
        except BaseException:
            self._decoder.close()
            raise
        if self.done:
            self._decoder.close()

    def _score_prompts(self, model: Model, top: int) -> None:
        """Gives the results the log-probabilities of their prompts, in slots that are free again behind it."""
        scored = [prompt for prompt in self._prompt_ids if len(prompt) > 1]
        made = iter(model.score(scored, top=top) if scored else [])
        for prompt, ids in enumerate(self._prompt_ids):
            logprobs: list[float | None] = [None]
            likeliest: list[dict[int, float] | None] = [None]
            if len(ids) > 1:
                score = next(made)
                logprobs += score.log_probs.tolist()
                pairs = zip(score.top_ids.tolist(), score.top_log_probs.tolist())
                likeliest += [dict(zip(top_ids, values)) for top_ids, values in pairs]
            for result in self.results[prompt * self._samples : (prompt + 1) * self._samples]:
                result.prompt_logprobs, result.prompt_top_logprobs = list(logprobs), list(likeliest)

    @property
    def done(self) -> bool:
        """Whether all prompts have ended."""
        return not self._index_of

    def step(self) -> list[Made]:
        """Gives each running sequence one id, or several where it has drafts; returns what was made. The results of
        those that ended have a `finish`.

        Where an exception comes, KeyboardInterrupt among them, all sequences end and what was made is in `results`.
        """
        with self._lock:
            if self.done:
                return []
            try:
                return self._collect(self._decoder.decode(1))
            except KeyboardInterrupt:
                self.interrupt()
                raise
            except BaseException as error:
                self._end("failed", str(error))
                raise

    def interrupt(self) -> None:
        """Ends all sequences; what was made is in `results`."""
        with self._lock:
            self._end("interrupted", None)

    def text(self, index: int) -> str | None:
        """The text of a sequence as :class:`Generated` has it; None where the prompt was ids."""
        prompt = index // self._samples
        if self._tokenizer is None or not self._are_texts[prompt]:
            return None
        context = self._context(index)
        text: str = self._tokenizer.decode(context + self.results[index].ids)
        text = text[len(self._tokenizer.decode(context)) :]
        text = text[: first_stop(text, self.settings.stop_texts)]
        return f"{self.prompts[prompt]}{text}" if self.settings.echo else text

    def _context(self, index: int) -> list[int]:
        """The ids that a sequence's text is decoded behind: behind its prompt, some ids begin with a space."""
        return self.results[index].prompt if self.settings.echo else []

    def _add(self, index: int, same_prompt: int | None) -> int:
        s = self.settings
        prompt, sample = divmod(index, self._samples)
        assert s.logit_bias is not None
        try:
            return self._decoder.add(
                self._prompt_ids[prompt],
                temperature=s.temperature,
                top_k=s.top_k,
                top_p=s.top_p,
                min_p=s.min_p,
                repetition_penalty=s.repetition_penalty,
                frequency_penalty=s.frequency_penalty,
                presence_penalty=s.presence_penalty,
                logit_bias=list(s.logit_bias.items()),
                logits_processor=_held_weakly(s),
                seed=s.seed,
                id=prompt + (sample << 32),  # a prompt's first sample is drawn as if it were alone
                stop=self._stop,
                max_new_tokens=s.max_new_tokens,
                min_new_tokens=s.min_new_tokens,
                logprobs=s.logprobs,
                draft=_draft_of(s),
                draft_len=s.draft_len,
                same_prompt=same_prompt,
            )
        except ValueError as error:
            raise ValueError(f"prompt {prompt}: {error}" if len(self._prompt_ids) > 1 else str(error)) from None

    def _collect(self, emitted: list[tuple[int, int]]) -> list[Made]:
        made: list[Made] = []
        last = {sequence: place for place, (sequence, _) in enumerate(emitted)}
        for place, (sequence, id) in enumerate(emitted):
            index = self._index_of.get(sequence)
            if index is None:
                continue  # a text of `stop` has ended the sequence before this id of a draft
            self.results[index].ids.append(id)
            self._take_logprobs(sequence)
            stream = self._streams[index]
            piece = "" if stream is None else stream.put(id)
            stopped = stream is not None and stream.stopped
            # A sequence ends with its last id.
            finish = "stop" if stopped else self._decoder.finish(sequence) if last[sequence] == place else "running"
            if finish != "running":
                piece += "" if stream is None or finish == "failed" else stream.finish()
                self._drop(sequence, finish)
            made.append(Made(index, id, piece))
        # A sequence that fails makes no id.
        for sequence in self._decoder.ended():
            self._drop(sequence, self._decoder.finish(sequence))
        if self.done:
            self._decoder.close()
        return made

    def _take_logprobs(self, sequence: int) -> None:
        """Takes the log-probabilities that a sequence's result lacks, one for each of its ids."""
        result = self.results[self._index_of[sequence]]
        if result.logprobs is None or result.top_logprobs is None:
            return
        first = len(result.logprobs)
        for logprob, top in self._decoder.logprobs(sequence, first)[: len(result.ids) - first]:
            result.logprobs.append(logprob)
            result.top_logprobs.append(dict(top))

    def _drop(self, sequence: int, finish: str) -> None:
        """Ends a sequence."""
        result = self.results[self._index_of.pop(sequence)]
        result.finish, result.error = finish, self._decoder.status(sequence)
        self._take_draft_counts(result, sequence)
        self._decoder.drop(sequence)

    def _take_draft_counts(self, result: Generated, sequence: int) -> None:
        if self.settings.draft is not None:
            _, result.drafted, result.accepted = self._decoder.drafts(sequence)

    def _end(self, finish: str, error: str | None) -> None:
        for sequence, index in self._index_of.items():
            self.results[index].ids = self._decoder.ids(sequence)
            self._take_logprobs(sequence)
            self._take_draft_counts(self.results[index], sequence)
            self._decoder.drop(sequence)
        self._index_of.clear()
        self._decoder.close()
        for result in self.results:
            if result.finish == "running":
                result.finish, result.error = finish, error


def _held_weakly(settings: Settings) -> LogitsProcessor | None:
    """The logits processor as a decoder may hold it. Where the function knows the generation, the garbage collector could
    not see through the decoder: one that is left in the middle would keep its slot."""
    if settings.logits_processor is None:
        return None
    held = weakref.ref(settings)

    def process(row: NDArray[np.float32], ids: NDArray[np.int32]) -> Any:
        settings = held()
        assert settings is not None and settings.logits_processor is not None  # held by the session whose step this is
        return settings.logits_processor(row, ids)

    return process


def _draft_of(settings: Settings) -> str | Drafter | None:
    """What a decoder may hold of the drafts, as _held_weakly() says it."""
    if settings.draft is None or isinstance(settings.draft, str):
        return settings.draft
    held = weakref.ref(settings)

    def make(ids: NDArray[np.int32], most: int) -> Ids:
        settings = held()
        assert settings is not None and callable(settings.draft)  # held by the session whose step this is
        return settings.draft(ids, most)

    return make


class Generation(Iterator[Piece]):
    """The continuation of one prompt, an iterator over its pieces: text in whole characters, or ids.

    Each step makes one id, or with drafts several, which come one by one. `result` has what was made so far, at any time
    and after Ctrl-C. Threads that take pieces of one generation take turns: each piece goes to one of them. Raises CfError
    where the sequence fails, such as by logits that are NaN. As a context manager it ends the sequence with the block.
    """

    def __init__(self, session: Session, is_text: bool) -> None:
        self._session = session
        self._is_text = is_text
        self._pieces: collections.deque[Any] = collections.deque()  # those that were not given out yet
        self._error: str | None = None  # what is raised behind them
        if session.settings.echo:
            self._pieces.extend(session.prompts if is_text else session.results[0].prompt)

    @property
    def result(self) -> Generated:
        """What was made so far."""
        result = self._session.results[0]
        result.text = self._session.text(0)
        return result

    @property
    def ids(self) -> list[int]:
        """The new ids so far."""
        return self._session.results[0].ids

    @property
    def text(self) -> str | None:
        """The text of `ids`; None where the prompt was ids."""
        return self.result.text

    @property
    def finish(self) -> str:
        """Why the sequence ended, as :class:`Generated` names it."""
        return self._session.results[0].finish

    def close(self) -> None:
        """Ends the sequence here, as "interrupted". On a GPU its slot is free for another one."""
        if not self._session.done:
            self._session.interrupt()

    def __enter__(self) -> Generation[Piece]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __next__(self) -> Any:
        result = self._session.results[0]
        while True:
            with contextlib.suppress(IndexError):  # another thread may have taken the last one
                return self._pieces.popleft()
            if self._error is not None:
                error, self._error = self._error, None
                raise _core.CfError(error)
            if self._session.done:
                raise StopIteration
            made = self._session.step()
            pieces: list[Any] = [one.piece for one in made if one.piece] if self._is_text else [one.id for one in made]
            self._pieces.extend(pieces)
            if result.finish == "failed":
                self._error = result.error

    def __repr__(self) -> str:
        return f"cf_ops.Generation({len(self.ids)} new ids, finish={self.finish!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a Generation cannot be pickled: its cache belongs to this process; its result can")


class AsyncGeneration(AsyncIterator[Piece]):
    """The continuation of one prompt for ``async for``: each piece is made in a thread of the event loop's executor.

    Where the task that waits for a piece is cancelled, the sequence ends with the step that is under way, and its slot is
    free. `generation` has what was made.
    """

    def __init__(self, generation: Generation[Piece]) -> None:
        self.generation: Generation[Piece] = generation

    @property
    def result(self) -> Generated:
        """What was made so far."""
        return self.generation.result

    async def aclose(self) -> None:
        """Ends the sequence here, as "interrupted"."""
        await asyncio.get_running_loop().run_in_executor(None, self.generation.close)

    async def __aenter__(self) -> AsyncGeneration[Piece]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Piece:
        loop = asyncio.get_running_loop()
        end = object()
        try:
            piece: Any = await asyncio.shield(loop.run_in_executor(None, next, self.generation, end))
        except asyncio.CancelledError:
            loop.run_in_executor(None, self.generation.close)  # waits for the step in its own thread
            raise
        if piece is end:
            raise StopAsyncIteration
        return piece  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return repr(self.generation).replace("Generation", "AsyncGeneration", 1)

    def __reduce__(self) -> Any:
        return self.generation.__reduce__()
