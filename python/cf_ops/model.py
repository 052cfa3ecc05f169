"""Whole models: load a checkpoint, continue prompts, read logits and taps, score texts."""

from __future__ import annotations

import collections
import html
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, overload

from numpy.typing import NDArray

from cf_ops import _core, _score
from cf_ops._arguments import dtype_name, flag, ids_of, integer, is_one, kind_of, path_of
from cf_ops._arguments import text as text_of
from cf_ops._chat import ChatTemplate, Message
from cf_ops._device import cuda_index, device_model, gpu_numbers
from cf_ops._generation import (
    MOST_INT,
    AsyncGeneration,
    Generated,
    Generation,
    GenerationInterrupted,
    Ids,
    Options,
    Prompt,
    Session,
    Settings,
)
from cf_ops._progress import Progress
from cf_ops._score import Perplexity, Scored
from cf_ops._streams import Stream
from cf_ops._text import encode, open_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from typing_extensions import Unpack

__all__ = [
    "AsyncGeneration",
    "Generated",
    "Generation",
    "GenerationInterrupted",
    "Model",
    "Perplexity",
    "Scored",
    "Stream",
    "load",
]

MOST_SLOTS = 1024
USUAL_SLOTS = 64  # sequences that run at once on the CPU, where nothing else is said
MOST_SAMPLES = 1024
MOST_COUNT = 2**62
PAGE_ENTRIES = 64  # of a page, where nothing else is said
CAPACITY = 2048  # of a slot on a GPU, where nothing else is said
_CHUNK = 512  # tokens of a prompt that go through the model at once
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOGGER = logging.getLogger("cf_ops")


class _CacheOptions(TypedDict, total=False):
    """The options of :func:`load` that a model's cache and arithmetic have; left-out ones ask for nothing."""

    window: int
    sinks: int
    pages: int
    page_entries: int
    invariant: bool


class StreamOptions(TypedDict, total=False):
    """The options of :meth:`Model.generate` that :meth:`Model.stream` takes."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: int | Iterable[int] | None


class _StepOptions(TypedDict, total=False):
    """The options of :func:`load` that say what the steps of a decoder are made of."""

    step_tokens: int | None
    share_prefixes: bool


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
        *,
        cache: _CacheOptions | None = None,
        steps: _StepOptions | None = None,
        devices: Sequence[int] = (),
    ) -> None:
        self.weights = weights
        self.directory = directory
        self.activation = activation
        self.eos_token_ids = eos_token_ids
        self._on_device = on_device
        self._devices = list(devices)
        self._cache: _CacheOptions = cache or {}
        self._steps: _StepOptions = steps or {}
        self._tokenizer: Tokenizer | None = None
        self._chat: ChatTemplate | None = None

    @property
    def device(self) -> str:
        """What runs the model: "cpu" or "cuda:0"; of several GPUs the first."""
        return "cpu" if self._on_device is None else f"cuda:{self._on_device.device}"

    @property
    def devices(self) -> list[int]:
        """The numbers of the GPUs that share the model, or of its only one; none on the CPU."""
        return [] if self._on_device is None else self._devices or [self._on_device.device]

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

    def swap(self, path_or_preset: str | os.PathLike[str], *, revision: str | None = None) -> None:
        """Puts the weights of another checkpoint of the same model, such as another revision, in the place of its own.
        The arguments are those of :func:`load`.

        On a GPU they are copied to where the weights lie: no other memory is taken, and nothing is prepared anew. The
        files are read and checked before the first byte is copied. What is loaded with `layers` keeps that number.
        Afterwards the model does what load() of the other checkpoint would, bit for bit.

        Raises ValueError for weights of another config, shape, dtype or quantisation, and on a GPU while a call uses the
        model; NotImplementedError there for a quantised weight with another order of inputs, and for a model on several
        GPUs; and what :func:`load` raises of files. The model then has the weights that it had.
        """
        self._check_one_gpu("swap")
        path = find_model(
            path_or_preset if isinstance(path_or_preset, str) else path_of("path", path_or_preset), revision
        )
        stored = self.weights.dtype if path in _core.presets() and not os.path.isdir(path) else None
        weights, eos_token_ids = open_weights(path, stored, for_gpu=self._on_device is not None)
        self._take(weights, path, eos_token_ids)

    def _take(self, weights: _core.Weights, directory: str, eos_token_ids: list[int]) -> None:
        """Takes other weights of the same model."""
        if self.weights.layers_left_out:
            weights = weights.first_layers(self.weights.layers)
        self.weights.check_swap(weights)
        if self._on_device is not None:
            self._on_device.swap(weights)
            weights.drop_values()
        self.weights, self.directory, self.eos_token_ids = weights, directory, eos_token_ids
        self._tokenizer = self._chat = None

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
        where = f"devices={self.devices}" if len(self.devices) > 1 else f"device={self.device!r}"
        how = f"impl={self.impl!r}, slots={self.slots}, capacity={self.capacity}"
        return f"cf_ops.Model({what}, {where}, {how})"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        c = self.config
        rows = {
            "model": os.path.basename(os.path.normpath(self.directory)),
            "family": c["model_type"],
            "layers, hidden size": f"{c['num_hidden_layers']}, {c['hidden_size']}",
            "vocabulary": c["vocab_size"],
            "device": ", ".join([f"cuda:{n}" for n in self.devices] + [self.impl] if self.impl else [self.device]),
            "activation": self.activation,
        }
        if self._on_device is not None:
            rows["cache"] = f"{self.slots} slots of {self.capacity} entries"
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
        return f"<table>{cells}</table>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"a Model cannot be pickled: call cf_ops.load({self.directory!r}) in the other process")

    @overload
    def generate(self, prompt: str, **options: Unpack[Options]) -> Generation[str]: ...

    @overload
    def generate(self, prompt: Ids, **options: Unpack[Options]) -> Generation[int]: ...

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation[str] | Generation[int]:
        """Continues a prompt; returns an iterator over what it makes, an id a step.

        A text is encoded by the checkpoint's tokenizer with the special tokens that it adds, and pieces of text come
        back, whole characters without special tokens. For ids, ids come back; they may be a list, or an array or a
        tensor of the shape (n) or (1, n).

        max_new_tokens (32): how many ids at most. min_new_tokens (0): until there are so many, none of the ids that end
        the sequence is chosen. A text of `stop` ends it earlier too.

        The steps that lead from logits to an id and their order are those of transformers' ``generate()``
        (GenerationMixin._get_logits_processor), and of vLLM for the two penalties that it lacks:

        1. logit_bias ({}): a number that is added to an id's logit, by id; ``-math.inf`` excludes the id.
        2. repetition_penalty (1): divides positive and multiplies negative logits of every id seen.
        3. frequency_penalty (0), presence_penalty (0): the first times how often the id was made, and the second where
           it was, are subtracted from an id's logit. -2 to 2.
        4. logits_processor (None): a function of the logits, float32 of the shape (vocab), and of the ids so far, int32,
           prompt and new ones; returns the logits to choose among. It may change the array that it is given. What it
           raises, the iterator raises.
        5. temperature (0): 0 takes the most likely id; otherwise logits are divided by it and an id is drawn.
        6. top_k (0): keeps that many ids; 0 keeps all. top_p (1): keeps the fewest whose probabilities reach it. min_p
           (0): keeps those of at least min_p times the largest probability.

        seed (0): draws depend on seed and position alone. Where one of 1, 3, 4 or min_new_tokens is asked for, the
        choice is made on the host from the logits in float32, by the same arithmetic with the same random numbers.

        stop (None): ids that end the sequence; None means the checkpoint's eos_token_id. Texts among them end a prompt
        of text where they appear, across the borders of tokens, and are no part of the text that comes back; beside
        texts alone the checkpoint's eos_token_id counts too. ignore_eos (False): the checkpoint's eos_token_id does not
        count.

        logprobs (None): a number k makes `logprobs` of :class:`Generated`, and `top_logprobs` of the k likeliest ids, 0
        or more; reading the logits of each step costs time. echo (False): the prompt comes back first; beside logprobs
        its ids have theirs too, in `prompt_logprobs`.

        draft (None): what drafts ids that may follow, which a step verifies together, so that a text that repeats itself
        takes fewer steps. "lookup" goes on as the text did behind the latest occurrence of its last three or two ids
        (prompt lookup); a function of the ids so far, int32, and of how many are asked for returns that many ids, fewer
        or none. draft_len (7): how many ids of a draft a step takes at most, 1 to 7. Drafts get longer where their ids
        are accepted, shorter and rare where they are not. The ids, drawn ones too, are bit for bit those that come
        without drafts; :class:`Generated` counts how many were `drafted` and `accepted`. Needs a model
        whose bits do not depend on a step's size: on a GPU one with `invariant` (on one GPU, without a window), on the CPU
        one in float32 with up to 8 slots, or with `invariant`.

        Raises ValueError for a prompt that is empty or outside the vocabulary and for settings without meaning,
        TypeError for other types and options, MemoryError where the cache does not fit, and what :attr:`tokenizer`
        raises. On a GPU ValueError also where no slot is free, or a slot has too few entries for the prompt and its new
        tokens.
        """
        is_text = isinstance(prompt, str)
        session = Session(self, [prompt], Settings.of(options), streams=is_text)
        return Generation[str](session, True) if is_text else Generation[int](session, False)

    @overload
    def agenerate(self, prompt: str, **options: Unpack[Options]) -> AsyncGeneration[str]: ...

    @overload
    def agenerate(self, prompt: Ids, **options: Unpack[Options]) -> AsyncGeneration[int]: ...

    def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGeneration[str] | AsyncGeneration[int]:
        """:meth:`generate` for ``async for``: other tasks run while a step is made."""
        if isinstance(prompt, str):
            return AsyncGeneration[str](self.generate(prompt, **options))
        return AsyncGeneration[int](self.generate(prompt, **options))

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        n: int = 1,
        slots: int | None = None,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> list[Generated]:
        """Continues several prompts at once, `slots` of them at a time, up to 1,024 (all, up to 64, where it is None; on a
        GPU all that have a free slot).

        The options are those of :meth:`generate`. Draws depend on seed, the prompt's place and the position, and not
        on the other prompts. A sequence that fails says so in its result; the others go on.

        n: samples of each prompt, which follow each other in the list that comes back: sample s of prompt p is
        ``results[p * n + s]``. Their draws differ, and the first one is what n = 1 gives.

        progress: whether stderr shows how far the work has come, by tqdm where that is installed; None where it is a
        terminal.

        Raises what :meth:`generate` raises, and :class:`GenerationInterrupted` after Ctrl-C.
        """
        settings = Settings.of(options)
        n = integer("n", n, 1, MOST_SAMPLES)
        if slots is not None:
            slots = integer("slots", slots, 1, MOST_SLOTS)
        shown = None if progress is None else flag("progress", progress)
        if is_one(prompts):
            raise TypeError(f"prompts: expected a list of prompts, got one {kind_of(prompts)}")
        given = list(prompts)
        session = Session(self, given, settings, slots, samples=n)
        interrupted = False
        try:
            with Progress(f"continuing {len(given)} prompts", shown) as bar:
                done, most = 0, settings.max_new_tokens
                while not session.done:
                    for place, count in collections.Counter(made.place for made in session.step()).items():
                        result = session.results[place]
                        done += count if result.finish == "running" else count + most - len(result.ids)
                    bar.set(done, len(session.results) * most)
        except KeyboardInterrupt:
            session.interrupt()  # where it came between two steps
            interrupted = True
        for index, result in enumerate(session.results):
            result.text = session.text(index)
        if interrupted:
            raise GenerationInterrupted(session.results)
        return session.results

    @overload
    def stream(
        self, prompt: str, *, max_new_tokens: int | None = None, **options: Unpack[StreamOptions]
    ) -> Stream[str]: ...

    @overload
    def stream(
        self, prompt: Ids, *, max_new_tokens: int | None = None, **options: Unpack[StreamOptions]
    ) -> Stream[int]: ...

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, **options: Unpack[StreamOptions]
    ) -> Stream[str] | Stream[int]:
        """Continues a prompt without end; returns an iterator over pieces of text, or over ids for a prompt of ids.

        For a model with a `window`, see :func:`load`: neither the time of a step nor memory grows with the text, beside
        four bytes for each id. Of the options of :meth:`generate` it takes temperature, top_k, top_p, min_p, seed and
        stop, whose texts are no stop; only the ids of `stop` end the text, and max_new_tokens, where it is given.

        Raises ValueError for a model without a window, and what :meth:`generate` raises.
        """
        if not self._cache.get("window"):
            raise ValueError(
                "stream: expected a model with a window, such as load(..., window=2044, sinks=4), got one without"
            )
        for name in options:
            if name not in StreamOptions.__annotations__:
                raise TypeError(f"expected options among {', '.join(StreamOptions.__annotations__)}, got {name!r}")
        settings = Settings.of(options)
        if settings.stop_texts:
            raise ValueError(f"stop: expected ids, which end a stream, got {settings.stop_texts[0]!r}")
        most = None if max_new_tokens is None else integer("max_new_tokens", max_new_tokens, 1, MOST_COUNT)
        return (
            Stream[str](self, prompt, settings, most)
            if isinstance(prompt, str)
            else Stream[int](self, prompt, settings, most)
        )

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Generation[str]:
        """Answers a chat: :meth:`generate` behind the text that the checkpoint's chat template makes of the messages,
        each with "role" and "content"; what comes back is the answer's pieces.

        Raises what :meth:`encode_chat` and :meth:`generate` raise.
        """
        settings = Settings.of(options)
        if settings.echo:
            raise ValueError("echo: expected False for a chat, whose prompt is not the caller's text")
        session = Session(self, [self.encode_chat(messages)], settings, streams=True, is_text=True)
        return Generation[str](session, True)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a chat by the checkpoint's chat template, as transformers' ``apply_chat_template`` makes them.

        messages: each with "role" ("system", "user", "assistant") and "content", and whatever else the template reads.
        add_generation_prompt: whether the beginning of an answer follows. variables: others that the template reads,
        such as ``tools`` or ``enable_thinking``.

        Raises FileNotFoundError where the checkpoint has no template, ImportError without jinja2, ValueError for what the
        template refuses, and TypeError for messages that are none.
        """
        if self._chat is None:
            self._chat = ChatTemplate.open(self.directory)
        text = self._chat.render(messages, add_generation_prompt, variables)
        return encode(self.tokenizer, text, "messages", special_tokens=False)

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
        does not have, with the names that it has; NotImplementedError for taps of a model on several GPUs; MemoryError
        where cache and results do not fit.
        """
        fed = self.encode(ids, "ids")
        names = [text_of("taps", tap) for tap in ([taps] if is_one(taps) else taps)]
        if not fed:
            raise ValueError("ids: expected at least one id, got none")
        if names:
            self._check_one_gpu("taps")
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
        side; where it is None 1 on the CPU, and as many as are free on a GPU. Prompts that begin with the same ids have
        whole pieces of them read once: of 128 ids on the CPU, on a GPU of 2048 with one slot and of 512 with four or
        more. What a prompt is given does not depend on the other prompts; on a GPU with more than one slot to rounding,
        or with `invariant` to the last bit. A prompt that fails says so in its result; the others go on. On a terminal
        stderr shows how far the work has come.

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
        most = USUAL_SLOTS if self._on_device is None else max(1, self._on_device.free_slots)
        return min(most, prompts)

    def decoder(self, slots: int, capacity: int) -> _core.Decoder:
        """What continues `slots` prompts at once, with room for `capacity` entries of each; on a GPU in slots that are
        free. Raises what :meth:`generate` raises of sizes."""
        if self._on_device is None:
            return _core.Decoder(self.weights, slots=slots, **self._of_cpu(capacity), **self._steps)
        self._check_capacity(self._on_device, capacity)
        return _core.Decoder(self._on_device, slots=slots, **self._steps)

    def scorer(self, slots: int, capacity: int) -> _core.Scorer:
        """What scores prompts in `slots` slots, with room for `capacity` entries of each; on a GPU in slots that are
        free. Raises what :meth:`score` raises of sizes."""
        if self._on_device is None:
            return _core.Scorer(self.weights, slots=slots, **self._of_cpu(capacity))
        self._check_capacity(self._on_device, capacity)
        return _core.Scorer(self._on_device, slots=slots)

    def memorizer(self, slots: int, capacity: int) -> _core.Memorizer:
        """What continues sequences of `capacity` ids in `slots` slots and compares them with their own; on a GPU in slots
        that are free. Raises what :meth:`generate` raises of sizes."""
        if self._on_device is None:
            return _core.Memorizer(self.weights, slots=slots, **self._of_cpu(capacity))
        self._check_capacity(self._on_device, capacity)
        return _core.Memorizer(self._on_device, slots=slots)

    def tap_reader(self, slots: int, capacity: int, layers: int) -> _core.TapReader:
        """What reads prompts of up to `capacity` ids for taps of the first `layers` layers; on a GPU in `slots` slots that
        are free, through all layers, and on the CPU in one. Raises what :meth:`generate` raises of sizes."""
        if self._on_device is None:
            return _core.TapReader(self.weights.first_layers(max(1, layers)), **self._of_cpu(capacity))
        self._check_capacity(self._on_device, capacity)
        return _core.TapReader(self._on_device, slots=slots)

    @contextmanager
    def _runner(self, capacity: int) -> Iterator[_core.Runner]:
        """A runner of one slot, whose slot is free again at the end, also where an error's traceback keeps the runner."""
        if self._on_device is None:
            yield _core.Runner(self.weights, **self._of_cpu(capacity))
            return
        self._check_capacity(self._on_device, capacity)
        runner = _core.Runner(self._on_device)
        try:
            yield runner
        finally:
            runner.close()

    def _of_cpu(self, capacity: int) -> dict[str, Any]:
        """The sizes and options of a model on the CPU."""
        return {"capacity": capacity, "chunk": _CHUNK, "activation": self.activation, **self._cache}

    def _check_one_gpu(self, what: str) -> None:
        """Raises NotImplementedError for what a model that several GPUs share does not do."""
        if len(self.devices) > 1:
            raise NotImplementedError(
                f"{what}: expected a model on the CPU or on one GPU, got one whose layers the GPUs {self.devices} share"
            )

    def _check_capacity(self, on_device: _core.DeviceModel, needed: int) -> None:
        if needed > on_device.capacity and not self._cache.get("window"):
            raise ValueError(
                f"capacity: expected at least the {needed} entries that this call needs of a slot, got the model's "
                f"{on_device.capacity}: load(..., capacity={needed})"
            )


def load(
    path_or_preset: str | os.PathLike[str],
    *,
    device: object = "cpu",
    devices: Sequence[int] | None = None,
    activation: str | None = None,
    dtype: object = None,
    revision: str | None = None,
    layers: int | None = None,
    slots: int | None = None,
    capacity: int | None = None,
    impl: str = "auto",
    threads: int | None = None,
    window: int = 0,
    sinks: int = 0,
    pages: int = 0,
    page_entries: int = PAGE_ENTRIES,
    share_prefixes: bool = False,
    step_tokens: int | None = None,
    invariant: bool = False,
    progress: bool | None = None,
) -> Model:
    """Loads a checkpoint directory of Hugging Face: config.json beside safetensors, dense, GPTQ or fp8 (e4m3): blocks of
    128 x 128 as Qwen3-FP8 and DeepSeek-V3 have them, compressed-tensors, or fbgemm_fp8. Several GPUs refuse fp8.

    path_or_preset: the directory; or, where there is none of this name, a preset such as "pythia-70m": the sizes of that
    model with procedural weights, random numbers, of `dtype` ("float16", where it is None; torch's and numpy's dtypes
    are taken too). The logger ``cf_ops`` says so on stderr.

    revision: a branch, tag or commit of the Hugging Face hub. Where it is given, path_or_preset is a name of the hub,
    such as "EleutherAI/pythia-70m", and the package huggingface_hub downloads what its cache does not have. Without it
    nothing is ever downloaded.

    layers: how many of the first layers the model has, all where it is None. The last norm and the head follow them, so
    that its logits are the logit lens of that layer.

    Where the config of Mistral, Qwen2 or Qwen3 has a sliding_window, a token sees so many keys; in Qwen's layers that
    layer_types or max_window_layers leaves out it sees all. On a GPU the impls "layer", "split" and "persistent" end a
    sequence at the window. :attr:`Model.notes` says what of the config does not
    count and which weights were cast.

    device: "cpu", or "cuda" or "cuda:1" for a GPU. A GPU gets a copy of the weights and a cache of `slots` (1) sequences
    of `capacity` entries (2048, or those of all `pages`), and computes in the weights' own dtype. impl: how its steps are
    launched, "auto" for the fastest that takes them, or "unfused", "graph", "split", "layer", "persistent".

    devices: the numbers of the GPUs that share the model, such as [0, 1], in place of `device`. Each holds a part of every
    layer, and they sum what belongs together; the steps are those of "graph" or "unfused". Such a model has no taps,
    and its weights cannot be swapped.

    On the CPU alone: activation: "float32" is the fast backend, "float64" the oracle. threads: the threads that all
    models of this process work with from now on; None leaves them as they are, at first one a core.

    window: with so many tokens each sequence is a stream without end: a token sees the newest `window` tokens, its own
    among them, and the first `sinks` ones; positions are those inside the cache, so that neither memory nor the time of a
    token grows. For models with RoPE. Source: Xiao et al. 2023 (arXiv:2309.17453), whose cache of 4 and 512 tokens is
    sinks=4, window=513.

    pages: with so many pages of `page_entries` entries the sequences of a call share one pool, and each takes the pages
    that it needs; without, each slot has memory of its own. Where no page is free the youngest sequence waits and goes on
    later with the same ids. The samples of a prompt share its pages; with share_prefixes all prompts that begin alike do,
    and are read once that far.

    step_tokens: the most tokens of a step: those of all running sequences, and beside them pieces of prompts, so that a
    long prompt does not stop the others. 0 reads prompts whole, in steps of their own. None is what the model prefers: on
    a GPU with several slots a few hundred beside running sequences, and else whole prompts; on the CPU whole prompts, or
    with `invariant` as many tokens as go through it at once.

    invariant: whether a sequence's bits are the same whatever else is in its steps and however its prompt is divided. On
    the CPU for float32.

    progress: whether stderr shows how far a checkpoint is read or a preset's weights are made, by tqdm where that is
    installed; None where it is a terminal.

    The model is a context manager, which gives a GPU's memory back at the block's end.

    Raises FileNotFoundError for a directory or file that is missing, OSError for a download that fails, TypeError for
    arguments of other types, ValueError for a checkpoint that is damaged, is of no
    family that cf_ops has or has a weight that is not finite, and for arguments that the device or the model does not take;
    for a GPU MemoryError where its memory does not hold the model, NotImplementedError where this build has no CUDA
    backend or the impl does not take the model, and CfError where there is no such GPU.
    """
    path = path_of("path_or_preset", path_or_preset)
    shared = gpu_numbers(device, devices)
    index = shared[0] if shared else cuda_index(device)
    text_of("impl", impl)
    if index is None:
        for name, given, default in (("slots", slots, None), ("capacity", capacity, None), ("impl", impl, "auto")):
            if given != default:
                raise ValueError(f"{name}: expected it with device='cuda' alone, got {given!r} for the CPU")
        if activation not in (None, "float32", "float64"):
            raise ValueError(f"activation: expected float32 or float64, got {activation!r}")
    else:
        of_cpu = {"activation": activation, "threads": threads}
        for name, value in of_cpu.items():
            if value is not None:
                raise ValueError(f"{name}: expected it with device='cpu' alone, got {value!r} for a GPU")
        for number in shared or [index]:
            _core.check_cuda_device(number)
    cache: _CacheOptions = {
        "window": integer("window", window, None, MOST_INT),
        "sinks": integer("sinks", sinks, None, MOST_INT),
        "pages": integer("pages", pages, 0, MOST_INT),
        "page_entries": integer("page_entries", page_entries, 1, MOST_INT),
        "invariant": flag("invariant", invariant),
    }
    # A sequence may have no more entries than the pool.
    entries = min(CAPACITY, cache["pages"] * cache["page_entries"]) if cache["pages"] else CAPACITY
    sizes = {"slots": 1 if slots is None else slots, "capacity": entries if capacity is None else capacity}
    sizes = {name: integer(name, size, None, MOST_INT) for name, size in sizes.items()}
    steps: _StepOptions = {"step_tokens": None, "share_prefixes": flag("share_prefixes", share_prefixes)}
    if step_tokens is not None:
        steps["step_tokens"] = integer("step_tokens", step_tokens, 0, MOST_INT)
    if threads is not None:
        _core.set_num_threads(integer("threads", threads))
    path = find_model(path, revision)
    shown = None if progress is None else flag("progress", progress)
    weights, eos_token_ids = open_weights(path, dtype, for_gpu=index is not None, progress=shown)
    if layers is not None:
        weights = weights.first_layers(integer("layers", layers))
    if index is None:
        return Model(weights, path, activation or "float32", eos_token_ids, cache=cache, steps=steps)
    model = on_device(weights, path, eos_token_ids, index, **sizes, impl=impl, cache=cache, steps=steps, devices=shared)
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
        return str(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the hub's own errors, and those of its connection
        raise OSError(f"{path}: the download failed: {' '.join(str(error).split())}") from None


def open_weights(
    path: str, dtype: object = None, *, for_gpu: bool = False, progress: bool | None = None
) -> tuple[_core.Weights, list[int]]:
    """The weights of a checkpoint or of a preset, and the ids that end a text. Raises what :func:`load` raises."""
    if path in _core.presets() and not os.path.isdir(path):
        with Progress(f"making the weights of {path}", progress) as bar:
            weights = _core.Weights.preset(path, "float16" if dtype is None else dtype_name(dtype), 0, bar.set)
        _LOGGER.warning("cf_ops: %s", weights.notes[0])
        return weights, []
    if dtype is not None:
        raise ValueError(f"dtype: expected it with a preset alone, got {dtype!r} for {path}, whose files have a dtype")
    with Progress(f"reading {os.path.basename(os.path.normpath(path))}", progress) as bar:
        weights = _core.Weights.open(path, for_gpu=for_gpu, progress=bar.set)
    return weights, _core.eos_token_ids(path)


def on_device(
    weights: _core.Weights,
    path: str,
    eos_token_ids: list[int],
    device: int,
    *,
    slots: int,
    capacity: int,
    impl: str = "auto",
    cache: _CacheOptions | None = None,
    steps: _StepOptions | None = None,
    devices: Sequence[int] = (),
) -> Model:
    """A model on a GPU, which has a copy of the weights, or on several `devices`, which have parts."""
    # A stream's capacity follows from its window and the chunk.
    chunk = _CHUNK if cache and cache.get("window") else min(_CHUNK, max(1, capacity))
    made = device_model(weights, device, slots, capacity, chunk, impl, devices=list(devices), **(cache or {}))
    return Model(weights, path, made.activation, eos_token_ids, made, cache=cache, steps=steps, devices=devices)
