"""Whole models: load a checkpoint, continue prompts, read logits and taps, score texts."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from cf_ops import _core, _score
from cf_ops._arguments import dtype_name, ids_of, integer, is_one, kind_of, path_of, real
from cf_ops._arguments import text as text_of
from cf_ops._device import cuda_index, device_model
from cf_ops._progress import Progress
from cf_ops._score import Perplexity, Scored
from cf_ops._text import TextStream, encode, first_stop, open_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Generated", "Generation", "GenerationInterrupted", "Model", "Perplexity", "Scored", "load"]

MOST_SLOTS = 64
_MOST_SEED = 2**64 - 1
_MOST_INT = 2**31 - 1
CAPACITY = 2048  # of a slot on a GPU, where nothing else is said
_CHUNK = 512  # tokens of a prompt that go through the model at once
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOGGER = logging.getLogger("cf_ops")

Piece = TypeVar("Piece", str, int)
Ids = Sequence[int] | NDArray[Any]  # and tensors of torch
Prompt = str | Ids


@dataclasses.dataclass
class Generated:
    """What a prompt was continued with.

    prompt: the prompt's ids. ids: the new ids; one that ended the sequence is the last. finish: "stop" (an id or a text
    of `stop`), "length" (max_new_tokens), "failed" (`error` says how), "interrupted" (Ctrl-C), or "running". text: what
    the tokenizer decodes `ids` to, without special tokens, up to a text of `stop`; None where the prompt was ids.
    """

    prompt: list[int]
    ids: list[int] = dataclasses.field(default_factory=list)
    finish: str = "running"
    error: str | None = None
    text: str | None = None


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C in :meth:`Model.generate_batch`; `results` has what each prompt was continued with until then."""

    def __init__(self, results: list[Generated]) -> None:
        super().__init__("interrupted")
        self.results = results


@dataclasses.dataclass
class Settings:
    """How prompts are continued: the arguments of :meth:`Model.generate`."""

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: int | str | Iterable[int | str] | None = None
    stop_ids: list[int] | None = dataclasses.field(init=False, default=None)  # None: the checkpoint's
    stop_texts: list[str] = dataclasses.field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        for name, least, most in (("max_new_tokens", 1, _MOST_INT), ("top_k", 0, _MOST_INT), ("seed", 0, _MOST_SEED)):
            setattr(self, name, integer(name, getattr(self, name), least, most))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            setattr(self, name, real(name, getattr(self, name)))
        if self.stop is None:
            return
        stop: Any = [self.stop] if is_one(self.stop) else self.stop
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
    """What a step has made for a prompt: an id, and the piece of text that is whole with it."""

    prompt: int
    id: int
    piece: str


class Session:
    """Continues prompts in a decoder, where the later ones wait for slots. `results` grows with each step(). One thread
    at a time has a step.

    streams: whether a prompt of text gets its pieces of text with each step.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        settings: Settings,
        slots: int | None = None,
        streams: bool = False,
    ) -> None:
        self.settings = settings
        names = ["prompt"] if len(prompts) == 1 else [f"prompt {index}" for index in range(len(prompts))]
        self.results = [Generated(model.encode(prompt, name)) for prompt, name in zip(prompts, names)]
        are_texts = [isinstance(prompt, str) for prompt in prompts]
        if settings.stop_texts and not all(are_texts):
            raise ValueError(f"stop: expected ids, which end a prompt of ids, got {settings.stop_texts[0]!r}")
        self._tokenizers = [model.tokenizer if is_text else None for is_text in are_texts]
        self._streams = [
            (
                TextStream(tokenizer, settings.stop_texts)
                if tokenizer is not None and (streams or settings.stop_texts)
                else None
            )
            for tokenizer in self._tokenizers
        ]
        self._stop = model.eos_token_ids if settings.stop_ids is None else settings.stop_ids
        self._lock = threading.RLock()  # a signal's handler may come in the thread that has it
        self._index_of: dict[int, int] = {}  # by the decoder's number of a sequence that has not ended
        self.slots = model.slots_for(len(prompts)) if slots is None else slots
        # The last new id is not appended to the cache.
        self.capacity = max((len(r.prompt) for r in self.results), default=1) + settings.max_new_tokens - 1
        self._decoder = model.decoder(max(1, self.slots), max(1, self.capacity))
        # Every prompt is checked before the first one is read.
        try:
            for index in range(len(prompts)):
                self._index_of[self._add(index)] = index
        except BaseException:
            self._decoder.close()
            raise
        if self.done:
            self._decoder.close()

    @property
    def done(self) -> bool:
        """Whether all prompts have ended."""
        return not self._index_of

    def step(self) -> list[Made]:
        """Gives each running sequence one id; returns what was made. The results of those that ended have a `finish`.

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
        """The text of a prompt's new ids, up to a text of `stop`; None where the prompt was ids."""
        tokenizer = self._tokenizers[index]
        if tokenizer is None:
            return None
        text: str = tokenizer.decode(self.results[index].ids)
        return text[: first_stop(text, self.settings.stop_texts)]

    def _add(self, index: int) -> int:
        s = self.settings
        try:
            return self._decoder.add(
                self.results[index].prompt,
                temperature=s.temperature,
                top_k=s.top_k,
                top_p=s.top_p,
                min_p=s.min_p,
                repetition_penalty=s.repetition_penalty,
                seed=s.seed,
                id=index,
                stop=self._stop,
                max_new_tokens=s.max_new_tokens,
            )
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}" if len(self.results) > 1 else str(error)) from None

    def _collect(self, emitted: list[tuple[int, int]]) -> list[Made]:
        made: list[Made] = []
        for sequence, id in emitted:
            index = self._index_of[sequence]
            self.results[index].ids.append(id)
            stream = self._streams[index]
            piece = "" if stream is None else stream.put(id)
            stopped = stream is not None and stream.stopped
            finish = "stop" if stopped else self._decoder.finish(sequence)
            if finish != "running":
                piece += "" if stream is None else stream.finish()
                self._drop(sequence, finish)
            made.append(Made(index, id, piece))
        # A sequence that fails makes no id.
        for sequence in self._decoder.ended():
            self._drop(sequence, self._decoder.finish(sequence))
        if self.done:
            self._decoder.close()
        return made

    def _drop(self, sequence: int, finish: str) -> None:
        """Ends a sequence."""
        result = self.results[self._index_of.pop(sequence)]
        result.finish, result.error = finish, self._decoder.status(sequence)
        self._decoder.drop(sequence)

    def _end(self, finish: str, error: str | None) -> None:
        for sequence, index in self._index_of.items():
            self.results[index].ids = self._decoder.ids(sequence)
            self._decoder.drop(sequence)
        self._index_of.clear()
        self._decoder.close()
        for result in self.results:
            if result.finish == "running":
                result.finish, result.error = finish, error


class Generation(Iterator[Piece]):
    """The continuation of one prompt, an iterator over its pieces: text in whole characters, or ids.

    Each step makes one id. `result` has what was made so far, at any time and after Ctrl-C. Threads that take pieces of
    one generation take turns: each piece goes to one of them. Raises CfError where the sequence fails, such as by logits
    that are NaN.
    """

    def __init__(self, session: Session, is_text: bool) -> None:
        self._session = session
        self._is_text = is_text

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

    def __next__(self) -> Any:
        result = self._session.results[0]
        while not self._session.done:
            made = self._session.step()
            if result.finish == "failed":
                raise _core.CfError(result.error)
            for _, id, piece in made:
                if not self._is_text:
                    return id
                if piece:
                    return piece
        raise StopIteration


class Model:
    """A language model, on the CPU or on a GPU. Calls from several threads do not disturb each other.

    On the CPU weights are read where they lie in the mapped files, and each call takes the memory of its own cache. On a
    GPU the model has a copy of the weights and a cache of `slots` sequences of `capacity` entries; a call takes free
    slots, and gives them back when it ends.

    activation: the dtype of activations and logits. eos_token_ids: the checkpoint's, which end a text.
    """

    def __init__(
        self,
        weights: _core.Weights,
        directory: str,
        activation: str,
        eos_token_ids: list[int],
        on_device: _core.DeviceModel | None = None,
    ) -> None:
        self.weights = weights
        self.directory = directory
        self.activation = activation
        self.eos_token_ids = eos_token_ids
        self._on_device = on_device
        self._tokenizer: Tokenizer | None = None

    @property
    def device(self) -> str:
        """What runs the model: "cpu" or "cuda:0"."""
        return "cpu" if self._on_device is None else f"cuda:{self._on_device.device}"

    @property
    def impl(self) -> str | None:
        """How a step is launched on a GPU; None on the CPU."""
        return None if self._on_device is None else self._on_device.impl

    @property
    def slots(self) -> int | None:
        """Sequences that the cache on a GPU holds; None on the CPU, where each call takes a cache."""
        return None if self._on_device is None else self._on_device.slots

    @property
    def capacity(self) -> int | None:
        """Entries that a slot on a GPU has room for; None on the CPU."""
        return None if self._on_device is None else self._on_device.capacity

    def close(self) -> None:
        """Gives a GPU's memory back at once, and not with the object. Calls raise CfError from now on. Does nothing on
        the CPU."""
        if self._on_device is not None:
            self._on_device.close()

    @property
    def config(self) -> dict[str, Any]:
        """The model's config in the names of transformers 4.x."""
        return self.weights.config

    @property
    def notes(self) -> list[str]:
        """What the model's files do not say: contradictions in the checkpoint and how they were resolved, fields that
        do not count, casts, or that the weights are a preset's procedural ones; a line each."""
        return self.weights.notes

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint's tokenizer.json, read at the first use.

        Raises FileNotFoundError, ValueError or ImportError where there is none.
        """
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self.directory)
        return self._tokenizer

    def __repr__(self) -> str:
        what = f"{self.directory!r}, procedural weights" if self.weights.procedural else repr(self.directory)
        if self._on_device is None:
            return f"cf_ops.Model({what}, activation={self.activation!r})"
        how = f"impl={self.impl!r}, slots={self.slots}, capacity={self.capacity}"
        return f"cf_ops.Model({what}, device={self.device!r}, {how})"

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        seed: int = ...,
        stop: int | str | Iterable[int | str] | None = ...,
    ) -> Generation[str]: ...

    @overload
    def generate(
        self,
        prompt: Ids,
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        seed: int = ...,
        stop: int | str | Iterable[int | str] | None = ...,
    ) -> Generation[int]: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 32,
        temperature: float = 0,
        top_k: int = 0,
        top_p: float = 1,
        min_p: float = 0,
        repetition_penalty: float = 1,
        seed: int = 0,
        stop: int | str | Iterable[int | str] | None = None,
    ) -> Generation[str] | Generation[int]:
        """Continues a prompt; returns an iterator that makes an id a step.

        A text is encoded by the checkpoint's tokenizer with the special tokens that it adds, and pieces of text come
        back, whole characters without special tokens. For ids, ids come back; they may be a list, or an array or a
        tensor of the shape (n) or (1, n).

        The steps and their order are those of transformers' ``generate()`` (GenerationMixin._get_logits_processor):
        repetition_penalty divides positive and multiplies negative logits of every id seen; temperature 0 takes the
        most likely id, otherwise logits are divided by it; top_k keeps that many ids (0: all); top_p keeps the fewest
        whose probabilities reach it; min_p keeps those of at least min_p times the largest probability. Draws depend on
        seed and position alone. `stop` are ids that end the sequence; None means the checkpoint's eos_token_id. Texts
        among them end a prompt of text where they appear, and are no part of the text that comes back; beside texts
        alone the checkpoint's eos_token_id counts too.

        Raises ValueError for a prompt that is empty or outside the vocabulary and for settings without meaning,
        TypeError for other types, MemoryError where the cache does not fit, and what :attr:`tokenizer` raises. On a GPU
        ValueError also where no slot is free, or a slot has too few entries for the prompt and its new tokens.
        """
        settings = Settings(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop)
        is_text = isinstance(prompt, str)
        session = Session(self, [prompt], settings, streams=is_text)
        return Generation[str](session, True) if is_text else Generation[int](session, False)

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        max_new_tokens: int = 32,
        temperature: float = 0,
        top_k: int = 0,
        top_p: float = 1,
        min_p: float = 0,
        repetition_penalty: float = 1,
        seed: int = 0,
        stop: int | str | Iterable[int | str] | None = None,
        slots: int | None = None,
    ) -> list[Generated]:
        """Continues several prompts at once, `slots` of them at a time (all, up to 64, where it is None; on a GPU all
        that have a free slot).

        The arguments are those of :meth:`generate`. Draws depend on seed, the prompt's place and the position, and not
        on the other prompts. A sequence that fails says so in its result; the others go on. On a terminal stderr shows
        how far the work has come.

        Raises what :meth:`generate` raises, and :class:`GenerationInterrupted` after Ctrl-C.
        """
        settings = Settings(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop)
        if slots is not None:
            slots = integer("slots", slots, 1, MOST_SLOTS)
        if is_one(prompts):
            raise TypeError(f"prompts: expected a list of prompts, got one {kind_of(prompts)}")
        given = list(prompts)
        session = Session(self, given, settings, slots)
        interrupted = False
        try:
            with Progress(f"continuing {len(given)} prompts") as progress:
                done, most = 0, settings.max_new_tokens
                while not session.done:
                    for made in session.step():
                        result = session.results[made.prompt]
                        done += 1 if result.finish == "running" else 1 + most - len(result.ids)
                    progress.set(done, len(given) * most)
        except KeyboardInterrupt:
            session.interrupt()  # where it came between two steps
            interrupted = True
        for index, result in enumerate(session.results):
            result.text = session.text(index)
        if interrupted:
            raise GenerationInterrupted(session.results)
        return session.results

    def encode(self, prompt: Prompt, name: str = "prompt") -> list[int]:
        """A prompt's ids: a text's by the tokenizer, with the special tokens that it adds; ids as they are. `name` is
        what errors call it."""
        return encode(self.tokenizer, prompt, name) if isinstance(prompt, str) else ids_of(name, prompt)

    def run(
        self, ids: Prompt, taps: str | Iterable[str] = (), rows: int | None = None
    ) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        """Takes ids, or those of a text, through the model in one pass; returns the logits (rows, vocab) of the last
        `rows` ids (all, where it is None) and the taps.

        Row p predicts id p + 1. A tap is what a module makes, (ids, ...), by the name that golden files give it:
        "embed_in", "layers.3.output", "layers.3.attention.rotary_emb.q", "final_layer_norm". The last one and "logits"
        have the last `rows` rows alone. Arrays are of the model's activation dtype; 16 bits are widened to float32.

        Raises ValueError for ids that are none or outside the vocabulary, rows beyond the ids, and a tap that the model
        does not have, with the names that it has; MemoryError where cache and results do not fit.
        """
        fed = self.encode(ids, "ids")
        names = [text_of("taps", tap) for tap in ([taps] if is_one(taps) else taps)]
        if not fed:
            raise ValueError("ids: expected at least one id, got none")
        wanted = len(fed) if rows is None else integer("rows", rows, 0, len(fed))
        with self._runner(len(fed)) as runner:
            return runner.run(0, 0, fed, wanted, names)

    def logits(self, ids: Prompt) -> NDArray[Any]:
        """The logits (ids, vocab) of every position: row p predicts id p + 1. Raises what :meth:`run` raises."""
        return self.run(ids)[0]

    def score(
        self,
        prompts: Iterable[Prompt],
        first: int | Iterable[int] = 1,
        *,
        top: int = 0,
        slots: int | None = None,
    ) -> list[Scored]:
        """Scores the ids of prompts, texts or ids: log p(id | the ids before it) of every id from the position `first`
        on, which is one number or one a prompt. The id at position 0 has no prediction. In float64, of a row of logits
        l: (l[id] - m) - log(sum of exp(l - m)), where m = max(l). A few hundred rows of logits exist at a time.

        top: how many of the most likely ids are named beside each scored one. slots: prompts that a step reads side by
        side, 1 where it is None. Prompts that begin with the same ids have whole pieces of them read once: of 128 ids
        on the CPU, of 512 on a GPU. What a prompt is given does not depend on the other prompts. A prompt that fails
        says so in its result; the others go on. On a terminal stderr shows how far the work has come.

        Raises ValueError for a prompt of fewer than two ids, with ids outside the vocabulary or longer than the model
        or its capacity takes, for a `first` outside 1 to the prompt's last position, and for more slots than are free;
        TypeError for one prompt in place of a list.
        """
        return _score.score(self, prompts, first, top, slots)

    def perplexity(self, ids: Prompt, context: int = 2048, stride: int | None = None) -> Perplexity:
        """The perplexity of a text, or of its ids, exp(mean of -log p(id | the ids before it in its window)).

        Windows hold `context` ids, and their starts are `stride` ids apart (`context`, where it is None). Each window
        scores the ids that the one before has not; its first id has no prediction. Log probabilities are computed in
        float64. Source: transformers, docs/source/en/perplexity.md. On a terminal stderr shows how far it has come.

        Raises ValueError for fewer than two ids, a context below 2 and a stride outside 1 to context.
        """
        return _score.perplexity(self, ids, context, stride)

    def slots_for(self, prompts: int) -> int:
        """How many slots a call takes for so many prompts, where nothing else is said."""
        most = MOST_SLOTS if self._on_device is None else max(1, self._on_device.free_slots)
        return min(most, prompts)

    def decoder(self, slots: int, capacity: int) -> _core.Decoder:
        """What continues `slots` prompts at once, with room for `capacity` entries of each; on a GPU in slots that are
        free. Raises what :meth:`generate` raises of sizes."""
        if self._on_device is None:
            return _core.Decoder(self.weights, slots=slots, capacity=capacity, chunk=_CHUNK, activation=self.activation)
        self._check_capacity(self._on_device, capacity)
        return _core.Decoder(self._on_device, slots=slots)

    def scorer(self, slots: int, capacity: int) -> _core.Scorer:
        """What scores prompts in `slots` slots, with room for `capacity` entries of each; on a GPU in slots that are
        free. Raises what :meth:`score` raises of sizes."""
        if self._on_device is None:
            return _core.Scorer(self.weights, slots=slots, capacity=capacity, chunk=_CHUNK, activation=self.activation)
        self._check_capacity(self._on_device, capacity)
        return _core.Scorer(self._on_device, slots=slots)

    @contextmanager
    def _runner(self, capacity: int) -> Iterator[_core.Runner]:
        """A runner of one slot, whose slot is free again at the end, also where an error's traceback keeps the runner."""
        if self._on_device is None:
            yield _core.Runner(self.weights, capacity=capacity, chunk=_CHUNK, activation=self.activation)
            return
        self._check_capacity(self._on_device, capacity)
        runner = _core.Runner(self._on_device)
        try:
            yield runner
        finally:
            runner.close()

    @staticmethod
    def _check_capacity(on_device: _core.DeviceModel, needed: int) -> None:
        if needed > on_device.capacity:
            raise ValueError(
                f"capacity: expected at least the {needed} entries that this call needs of a slot, got the model's "
                f"{on_device.capacity}: load(..., capacity={needed})"
            )


def load(
    path_or_preset: str | os.PathLike[str],
    *,
    device: object = "cpu",
    activation: str | None = None,
    dtype: object = None,
    revision: str | None = None,
    slots: int | None = None,
    capacity: int | None = None,
    impl: str = "auto",
    threads: int | None = None,
) -> Model:
    """Loads a checkpoint directory of Hugging Face: config.json beside safetensors, dense or GPTQ.

    path_or_preset: the directory; or, where there is none of this name, a preset such as "pythia-70m": the sizes of that
    model with procedural weights, random numbers, of `dtype` ("float16", where it is None; torch's and numpy's dtypes
    are taken too). The logger ``cf_ops`` says so on stderr.

    revision: a branch, tag or commit of the Hugging Face hub. Where it is given, path_or_preset is a name of the hub,
    such as "EleutherAI/pythia-70m", and the package huggingface_hub downloads what its cache does not have. Without it
    nothing is ever downloaded.

    Where the config of Mistral, Qwen2 or Qwen3 has a sliding_window, a sequence may have so many positions: within it every key is
    seen. :attr:`Model.notes` says what of the config does not count and which weights were cast.

    device: "cpu", or "cuda" or "cuda:1" for a GPU. A GPU gets a copy of the weights and a cache of `slots` (1) sequences
    of `capacity` (2048) entries, and computes in the weights' own dtype. impl: how its steps are launched, "auto" for
    the fastest that takes them, or "unfused", "graph", "split", "layer", "persistent".

    On the CPU alone: activation: "float32" is the fast backend, "float64" the oracle. threads: the threads that all
    models of this process work with from now on; None leaves them as they are, at first one a core.

    On a terminal stderr shows how far a preset's weights are made.

    Raises FileNotFoundError for a directory or file that is missing, OSError for a download that fails, TypeError for
    arguments of other types, ValueError for a checkpoint that is damaged, is of no
    family that cf_ops has or has a weight that is not finite, and for arguments that the device or the model does not take;
    for a GPU MemoryError where its memory does not hold the model, NotImplementedError where this build has no CUDA
    backend or the impl does not take the model, and CfError where there is no such GPU.
    """
    path = path_of("path_or_preset", path_or_preset)
    index = cuda_index(device)
    text_of("impl", impl)
    if index is None:
        for name, given, default in (("slots", slots, None), ("capacity", capacity, None), ("impl", impl, "auto")):
            if given != default:
                raise ValueError(f"{name}: expected it with device='cuda' alone, got {given!r} for the CPU")
        if activation not in (None, "float32", "float64"):
            raise ValueError(f"activation: expected float32 or float64, got {activation!r}")
    else:
        for name, value in (("activation", activation), ("threads", threads)):
            if value is not None:
                raise ValueError(f"{name}: expected it with device='cpu' alone, got {value!r} for a GPU")
        _core.check_cuda_device(index)
    sizes = {"slots": 1 if slots is None else slots, "capacity": CAPACITY if capacity is None else capacity}
    sizes = {name: integer(name, size, None, _MOST_INT) for name, size in sizes.items()}
    if threads is not None:
        _core.set_num_threads(integer("threads", threads))
    path = find_model(path, revision)
    weights, eos_token_ids = open_weights(path, dtype, for_gpu=index is not None)
    if index is None:
        return Model(weights, path, activation or "float32", eos_token_ids)
    model = on_device(weights, path, eos_token_ids, index, **sizes, impl=impl)
    weights.drop_values()
    return model


def find_model(path: str, revision: str | None = None) -> str:
    """The directory of a model, or a preset's name. With a revision the model is one of the Hugging Face hub.

    Raises FileNotFoundError for what may be a name of the hub, without a revision, and what :func:`load` raises.
    """
    is_missing = not os.path.exists(path)
    if is_missing and not path.isprintable():
        raise FileNotFoundError(f"{path!r}: no such directory")
    is_hub_name = is_missing and _HUB_NAME.fullmatch(path) is not None
    if revision is None:
        if is_hub_name:
            raise FileNotFoundError(
                f"{path}: no such directory. A model of this name on the Hugging Face hub is downloaded by: hf download "
                f"{path} --local-dir DIR, or by load(..., revision='main')"
            )
        return path
    if not is_hub_name:
        raise ValueError(f"revision: expected it with a name of the hub, such as EleutherAI/pythia-70m, got {path!r}")
    text_of("revision", revision)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(
            "a download needs the package huggingface_hub, which is missing: pip install huggingface_hub"
        ) from None
    try:
        return str(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub's own errors, and those of its connection
        raise OSError(f"{path}: the download failed: {' '.join(str(error).split())}") from None


def open_weights(path: str, dtype: object = None, *, for_gpu: bool = False) -> tuple[_core.Weights, list[int]]:
    """The weights of a checkpoint or of a preset, and the ids that end a text. Raises what :func:`load` raises."""
    if path in _core.presets() and not os.path.isdir(path):
        with Progress(f"making the weights of {path}") as progress:
            weights = _core.Weights.preset(path, "float16" if dtype is None else dtype_name(dtype), 0, progress.set)
        _LOGGER.warning("cf_ops: %s", weights.notes[0])
        return weights, []
    if dtype is not None:
        raise ValueError(f"dtype: expected it with a preset alone, got {dtype!r} for {path}, whose files have a dtype")
    return _core.Weights.open(path, for_gpu=for_gpu), _core.eos_token_ids(path)


def on_device(
    weights: _core.Weights,
    path: str,
    eos_token_ids: list[int],
    device: int,
    *,
    slots: int,
    capacity: int,
    impl: str = "auto",
) -> Model:
    """A model on a GPU, which has a copy of the weights."""
    made = device_model(weights, device, slots, capacity, min(_CHUNK, max(1, capacity)), impl)
    return Model(weights, path, made.activation, eos_token_ids, made)
