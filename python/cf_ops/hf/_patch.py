"""What `speed_up` puts into a model: a generate() with a token loop of ours, and a forward() that decides, call by
call, which path can do what is asked."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import transformers  # type: ignore[import-not-found, unused-ignore]
from transformers.cache_utils import Cache, DynamicCache  # type: ignore[import-not-found, unused-ignore]
from transformers.modeling_outputs import CausalLMOutputWithPast  # type: ignore[import-not-found, unused-ignore]

from cf_ops.hf._batch import generate_batch
from cf_ops.hf._cache import RunnerCache, cache_field, cache_parameter, logits_of
from cf_ops.hf._families import FAMILIES, class_of, layers_of
from cf_ops.hf._generation import LOOKUP_ARGUMENTS, Generation, Lookup, StepByStep, TokenLoop
from cf_ops.hf._joined import Joined
from cf_ops.hf._loaded import Loaded
from cf_ops.hf._report import Counts, Report
from cf_ops.hf._runner import Stream, Tensor

Model = Any

NEWEST = (5, 24)  # the newest transformers that cf_ops was tested with

_LOGGER = logging.getLogger("cf_ops.hf")
_ATTRIBUTE = "_cf_ops"
_METHODS = ("forward", "generate")
_MODEL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CACHE_FIELD = cache_field(CausalLMOutputWithPast)
# Forward's arguments, beside the cache, which is told by its type, and the tokenizer of generate(), which it passes on.
_READ = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "return_dict",
    "logits_to_keep",
    "cache_position",
    "tokenizer",
}
_FAILURES = (MemoryError, NotImplementedError, RuntimeError, ValueError)  # of a runner
_OUTPUTS = ("output_attentions", "output_hidden_states")
_MODES = ("greedy_search", "sample")
_CHANGED = "the model or the cache has changed"
_REMEDIES = {  # by words of the reason
    "a cache of": "leave the cache out, or pass on the one that this model returned",
    "a global hook": "remove the hook, or read hidden states with cf_ops.hf.run()",
    "a hook": "remove the hook, or read hidden states with cf_ops.hf.run()",
    "attention_mask": "pad on the left, with a mask of 0 and 1",
    "custom_generate": "leave custom_generate out, as generate() has a loop of cf_ops then",
    "autocast": "leave autocast, as cf_ops computes in the dtype of the weights",
    "generation mode": "generate() runs on cf_ops with num_beams=1 and without an assistant",
    "grad is enabled": "call the model under torch.no_grad()",
    "inputs_embeds": "pass input_ids",
    "input_ids are on": "move the ids to model.device",
    "expected one that transformers builds": "merge adapters into the model, such as with merge_and_unload()",
    "labels": "make the loss of the logits",
    "logits of padding": "ask for logits_to_keep=1, or leave the padding out",
    "output_hidden_states": "read hidden states with cf_ops.hf.run()",
    "position_ids": "leave position_ids out, or count each sequence's ids from 0",
    "training": "call model.eval()",
}


class _Fallback(Exception):
    """The reason why a call runs on Hugging Face's path."""


@dataclass
class _Call:
    """A call of forward that a runner can do."""

    ids: list[list[int]]  # by sequence, without padding
    pads: list[int]  # masked places before each sequence's ids, those of its cache included
    rows: int  # places whose logits are asked for
    past: int  # places in the cache, padding included
    cache: RunnerCache | None
    use_cache: bool
    return_dict: bool

    @property
    def kind(self) -> str:
        return "prefill" if self.past == 0 or any(len(ids) > 1 for ids in self.ids) else "step"


class Patch:
    """A patched model's state. It holds no reference to the model. With a `stream` each of its sequences is one."""

    def __init__(self, stream: Stream | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._local = threading.local()
        self._loaded: Loaded | None = None
        self._joined = Joined()
        self._caches: weakref.WeakSet[RunnerCache] = weakref.WeakSet()
        self._counts = Counts()
        self.num_layers = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        """A copied model is patched too, and reads its own weights at its first call."""
        return Patch(self._stream)

    def __reduce__(self) -> Any:
        raise TypeError("a model with speed_up cannot be pickled: expected restore(model) before")

    def loaded(self, model: Model) -> Loaded:
        """What the model holds now; read again where it has changed."""
        with self._lock:
            if self._loaded is None or not self._loaded.is_current():
                self._loaded = None
                self._loaded = Loaded(model, self._joined, self._stream)
                self.num_layers = len(layers_of(model))
            return self._loaded

    @property
    def stream(self) -> Stream | None:
        return self._stream

    @property
    def last_loaded(self) -> Loaded | None:
        """What the model held when it was last read."""
        return self._loaded

    def adopt(self, cache: RunnerCache) -> None:
        self._caches.add(cache)

    def end(self) -> None:
        """Frees the memory of all caches, none of which can be continued, and gives the parameters memory of their
        own."""
        for cache in list(self._caches):
            cache.free()
            cache.patch = None
        self._loaded = None
        self._joined.part()

    def report(self, model: Model) -> Report:
        backend = self.loaded(model).backend
        return self._counts.report(
            0 if backend is None else backend.weight_bytes,
            sum(cache.cache_bytes for cache in list(self._caches)),
            0 if backend is None else backend.copied_bytes,
        )

    def count(self, generation: Generation | None, kind: str) -> None:
        """Counts a call that ran on cf_ops."""
        mode = "forward" if generation is None else "sampled" if generation.config.do_sample else "greedy"
        self._counts.count_ours(f"{mode} {kind}")

    def count_step_by_step(self, reason: StepByStep) -> None:
        self._counts.count_step_by_step(str(reason))

    @contextmanager
    def _generating(self, generation: Generation) -> Iterator[None]:
        outer = self._generation
        self._local.generation = generation
        try:
            yield
        finally:
            self._local.generation = outer

    @property
    def _generation(self) -> Generation | None:
        """The ``generate()`` that runs in this thread."""
        running: Generation | None = getattr(self._local, "generation", None)
        return running

    def forward(self, model: Model, arguments: dict[str, Any]) -> Any:
        generation = self._generation
        try:
            loaded = self._check_model(model, generation)
            call = self._read(model, arguments)
            logits, cache = self._run(loaded, call, generation)
        except _Fallback as fallback:
            return self._forward_theirs(model, arguments, str(fallback))
        self.count(generation, call.kind)
        kept: dict[str, Any] = {_CACHE_FIELD: cache if call.use_cache else None}
        output = CausalLMOutputWithPast(logits=logits, **kept)
        return output if call.return_dict else output.to_tuple()

    def generate(self, model: Model, given: dict[str, Any]) -> Any:
        """transformers' generate(), with a token loop of ours where the calls of its own would run on cf_ops."""
        generation = Generation.of(model, given)
        own, lookup = generation, Lookup.of(given)
        if lookup is not None:  # for our loop the same generation, whose ids may come several a step
            own = Generation.of(model, {name: v for name, v in given.items() if name not in LOOKUP_ARGUMENTS})
        try:
            self._check_generation(model, own)
            arguments = own.for_own_loop(model)
        except _Fallback:  # each call of forward raises it again
            return self._generate_theirs(model, given, generation)
        except StepByStep as reason:
            self.count_step_by_step(reason)
            return self._generate_theirs(model, given, generation)
        loop = functools.partial(self._loop, given, lookup)
        return type(model).generate(model, **{**arguments, "custom_generate": loop})

    def _generate_theirs(self, model: Model, given: Mapping[str, Any], generation: Generation) -> Any:
        with self._generating(generation):
            return type(model).generate(model, **given)

    def _loop(
        self,
        given: Mapping[str, Any],
        lookup: Lookup | None,
        model: Model,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What generate() calls with all that it has prepared. Where it turns out to ask for what our loop does not do,
        such as by the model's own generation config, generate() begins again with transformers' loop."""
        generation = Generation(given, generation_config)
        try:
            loaded = self._check_generation(model, generation)
            if lookup is not None and len(input_ids) > 1:
                raise _Fallback("prompt_lookup_num_tokens beside several sequences")  # which transformers refuses
            with self._generating(generation):
                call = self._read_prompt(model, input_ids, model_kwargs)
            logits, cache = self._run(loaded, call, generation)
        except _Fallback:
            return self._generate_theirs(model, given, generation)
        except StepByStep as reason:
            self.count_step_by_step(reason)
            return self._generate_theirs(model, given, generation)
        assert cache is not None
        self.count(generation, call.kind)
        is_kept = False
        try:
            streamer = given.get("streamer")
            if streamer is not None:
                streamer.put(input_ids.cpu())
            loop = TokenLoop(generation_config, input_ids, logits_processor, stopping_criteria, streamer)
            steps = _Steps(self, model, generation, loaded, cache)
            with self._generating(Generation(given, generation_config, has_own_loop=True)):
                try:
                    ends = loop.ends(model.get_input_embeddings().num_embeddings)
                except StepByStep as reason:
                    self.count_step_by_step(reason)
                    output = loop.by_logits(logits, steps)
                else:
                    if lookup is not None and steps.most_drafted() > 0:
                        output = loop.by_drafts(logits, steps, ends, lookup)
                    else:
                        output = loop.by_ids(logits, steps, ends)
            is_kept = generation_config.return_dict_in_generate or generation.has_own_cache
            return output
        finally:
            if not is_kept:
                cache.end()

    def _check_generation(self, model: Model, generation: Generation) -> Loaded:
        """Refuses a generation that only the loop of transformers can run. Raises _Fallback where forward() would
        refuse each call of that loop, too."""
        given, config = generation.given, generation.config
        with torch.no_grad():  # as generate() will run
            loaded = self._check_model(model, generation)
        for name in _OUTPUTS:
            if getattr(config, name, False) or getattr(model.config, name, False):
                raise _Fallback(name)
        if config.cache_implementation not in (None, "dynamic"):
            raise _Fallback("a cache of the caller's")
        if config.use_cache is False:
            raise StepByStep("use_cache=False")
        for name in ("token_healing", "prefill_chunk_size", "is_assistant"):
            if getattr(config, name, None):
                raise StepByStep(name)
        for name in ("position_ids", "cache_position"):
            if given.get(name) is not None:
                raise StepByStep(f"{name} of the caller's")
        if given.get("synced_gpus") or (given.get("synced_gpus") is None and _syncs_by_itself()):
            raise StepByStep("synced_gpus")
        if any(getattr(model, name) for name in _MODEL_HOOKS):
            raise StepByStep("a hook on the model")
        if _has_own_methods(model):
            raise StepByStep("a method of generate() was replaced")
        return loaded

    def _check_model(self, model: Model, generation: Generation | None) -> Loaded:
        """Refuses a model that does more than its modules' own arithmetic now."""
        if _is_traced():
            raise _Fallback("torch.jit traces the model")
        if generation is not None and generation.mode not in _MODES:
            raise _Fallback(f"generation mode {generation.mode}")
        if model.training:
            raise _Fallback("training")
        loaded = self.loaded(model)
        if loaded.error is not None:
            raise _Fallback(str(loaded.error))
        obstacle = loaded.obstacle()
        if obstacle is not None:
            raise _Fallback(obstacle)
        if torch.is_grad_enabled() and loaded.is_trainable():
            raise _Fallback("grad is enabled and parameters are trainable")
        if torch.is_autocast_enabled(model.device.type):
            raise _Fallback("autocast")
        return loaded

    def _read_prompt(self, model: Model, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> _Call:
        """What transformers' loop asks forward for before the first new token."""
        arguments = dict(model_kwargs)
        cache = _cache_in(arguments)[1]
        past = cache.get_seq_length() if isinstance(cache, RunnerCache) else 0
        mask = arguments.get("attention_mask")
        if past > 0 and (past >= input_ids.shape[1] or (mask is not None and mask.shape[1] != input_ids.shape[1])):
            raise StepByStep("ids that begin behind the cache")
        own = {"input_ids": input_ids[:, past:].to(model.device), "use_cache": True, "logits_to_keep": 1}
        return self._read(model, {**arguments, **own, "position_ids": None, "cache_position": None}, is_prompt=True)

    def _read(self, model: Model, arguments: Mapping[str, Any], is_prompt: bool = False) -> _Call:
        """What a call asks for, where a runner can do exactly that. Those of a prompt of generate() that says no
        positions count each sequence's ids from 0."""
        for name in _OUTPUTS:
            if arguments.get(name) is None and getattr(model.config, name, False):
                raise _Fallback(name)
        for name, value in arguments.items():
            if name not in _READ and value is not None and value is not False and not isinstance(value, Cache):
                raise _Fallback(name)
        ids: Any = arguments.get("input_ids")
        if type(ids) is not torch.Tensor or ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
            raise _Fallback("input_ids are not a tensor of sequences")
        if ids.device != model.device:
            raise _Fallback("input_ids are on another device")
        keep = arguments.get("logits_to_keep", 0)
        if not isinstance(keep, int) or keep < 0:
            raise _Fallback("logits_to_keep is not a number")

        config = model.config
        use_cache = arguments.get("use_cache")
        use_cache = bool(getattr(config, "use_cache", True) if use_cache is None else use_cache)
        return_dict = arguments.get("return_dict")
        return_dict = bool(getattr(config, "return_dict", True) if return_dict is None else return_dict)
        cache = self._own_cache(_cache_in(arguments)[1])
        if cache is not None and not use_cache:
            raise _Fallback("use_cache=False with a cache")
        past = 0 if cache is None else cache.get_seq_length()
        sequences, places = ids.shape
        if past > 0 and cache is not None and len(cache.ids) != sequences:
            raise _Fallback("another number of sequences than the cache has")
        pads = _left_padding(arguments.get("attention_mask"), sequences, past, places)
        if past > 0 and cache is not None and pads != cache.pads:
            raise _Fallback("attention_mask differs from the cache's padding")
        if not is_prompt:
            _check_positions(arguments.get("position_ids"), pads, past, places)
        cache_position = arguments.get("cache_position")
        if cache_position is not None and cache_position.tolist() != list(range(past, past + places)):
            raise _Fallback("cache_position differs from the cache's length")

        new_pads = [max(pad - past, 0) for pad in pads]
        rows = min(keep, places) if keep else places
        if self._generation is None and max(new_pads) > places - rows:
            raise _Fallback("logits of padding")
        return _Call(
            ids=[row[pad:] for row, pad in zip(ids.tolist(), new_pads)],
            pads=pads,
            rows=rows,
            past=past,
            cache=cache,
            use_cache=use_cache,
            return_dict=return_dict,
        )

    def _own_cache(self, cache: Any) -> RunnerCache | None:
        """The cache that a call goes on from, None where it begins one."""
        if cache is None:
            return None
        if isinstance(cache, RunnerCache):
            if cache.patch is not self:
                raise _Fallback("a cache of another model")
            if cache.theirs is not None:
                raise _Fallback("a cache that went on at Hugging Face's")
            return cache
        # generate() makes an empty cache for each call. A cache of the caller's is to be filled, so it is not replaced
        # by ours.
        generation = self._generation
        if (
            type(cache) is DynamicCache
            and generation is not None
            and not (generation.has_own_cache or generation.has_own_loop)
            and not getattr(cache, "offloading", False)
            and cache.get_seq_length() == 0
        ):
            return None
        raise _Fallback("a cache of the caller's")

    def _run(self, loaded: Loaded, call: _Call, generation: Generation | None) -> tuple[Tensor, RunnerCache | None]:
        """The logits as Hugging Face returns them, and the cache."""
        assert loaded.backend is not None
        cache = call.cache
        try:
            if call.use_cache:
                if cache is None:
                    places = max(pad + len(ids) for pad, ids in zip(call.pads, call.ids))
                    cache = RunnerCache(self, None if generation is None else generation.spare_entries(places))
                    self.adopt(cache)
                logits = cache.forward(loaded, call.ids, call.pads, call.rows)
            else:
                runner = loaded.backend.runner(1, max(map(len, call.ids)))
                logits = logits_of(runner, [0] * len(call.ids), call.ids, call.rows, has_slots=False)
        except _FAILURES as error:
            raise _Fallback(str(error) or type(error).__name__) from error
        return loaded.as_theirs(logits), cache

    def _forward_theirs(self, model: Model, arguments: dict[str, Any], reason: str) -> Any:
        if self._stream is not None:
            raise NotImplementedError(f"Hugging Face's path has no streams, expected a call that cf_ops runs: {reason}")
        if self._counts.count_theirs(reason):
            remedy = next((remedy for words, remedy in _REMEDIES.items() if words in reason), None)
            _LOGGER.warning(
                "cf_ops: a call runs on Hugging Face's path: %s (%s)",
                reason,
                remedy or "cf_ops.hf.report(model) counts such calls",
            )
        name, cache = _cache_in(arguments)
        if cache is None:
            return _forward_of_class(model, **arguments)
        theirs = cache
        if isinstance(cache, RunnerCache):
            if cache.patch is not self:
                raise ValueError(f"{name}: expected a cache that this model made since its last speed_up()")
            theirs = _hand_over(model, cache)
        # Under the name that this transformers reads: forward ignores an argument of another name.
        arguments = {other: value for other, value in arguments.items() if other != name}
        output = _forward_of_class(model, **{**arguments, cache_parameter(type(model).forward): theirs})
        if isinstance(cache, RunnerCache):
            cache.theirs = getattr(output, _CACHE_FIELD, None) or cache.theirs
        return output


class _Steps:
    """The steps of a loop of ours; where the runner cannot make one, by a call of the model as transformers makes it."""

    def __init__(self, patch: Patch, model: Model, generation: Generation, loaded: Loaded, cache: RunnerCache) -> None:
        self.cache: Any = cache  # of the sequences; on Hugging Face's path another one replaces it
        self._patch, self._model, self._generation = patch, model, generation
        self._loaded, self._revision = loaded, cache.revision
        self._pads, self._places = list(cache.pads), cache.get_seq_length()
        self._is_by_step = False
        # Who streams ids may change parameters in place, which a GPU would read too early.
        self._versions = loaded.value_versions() if generation.given.get("streamer") is not None else None

    def choose(self, ids: list[int], running: list[int], left: int, stop: list[int]) -> list[int]:
        chosen = self._by_runner(lambda: self.cache.choose(self._loaded, ids, running, left, stop), "loop")
        if chosen is None:
            every = self._by_call(ids)
            return [every[row] for row in running]
        self._places += 1
        return chosen

    def most_drafted(self) -> int:
        if self._is_by_step or not isinstance(self.cache, RunnerCache):
            return 0
        return max(self.cache.exact_run_tokens() - 1, 0)

    def choose_run(self, ids: list[int]) -> list[int]:
        kind = "loop" if len(ids) == 1 else "draft"
        chosen = self._by_runner(lambda: self.cache.choose_run(self._loaded, ids), kind)
        if chosen is None:
            return self._by_call(ids[:1])
        self._places += len(chosen)
        return chosen

    def _by_call(self, ids: list[int]) -> list[int]:
        """The greedy ids of all sequences behind an id of each, by a call of the model."""
        chosen: list[int] = self._call(torch.tensor(ids))[:, -1].float().argmax(-1).tolist()
        return chosen

    def _by_runner(self, choose: Callable[[], list[int]], kind: str) -> list[int] | None:
        """What `choose` makes of the cache; None, with the cache as before, from the first time on that it cannot."""
        if self._is_by_step:
            return None
        try:
            return self._choose(choose, kind)
        except StepByStep as reason:
            self._patch.count_step_by_step(reason)
            self._is_by_step = True
            return None

    def _choose(self, choose: Callable[[], list[int]], kind: str) -> list[int]:
        """Raises StepByStep, with the cache as before, where the runner cannot."""
        if self._versions is not None and self._versions != self._loaded.value_versions():
            raise StepByStep("parameters have changed")
        obstacle = self._obstacle() if self._may_go_on() else _CHANGED
        if obstacle is not None:
            raise StepByStep(obstacle)
        try:
            chosen = choose()
        except _FAILURES as error:
            raise StepByStep(str(error) or type(error).__name__) from error
        self._patch.count(self._generation, kind)
        return chosen

    def logits(self, ids: Tensor) -> Tensor:
        """Launches the step before it checks the model: the check takes less time than a GPU's step."""
        if not self._may_go_on():
            return self._call(ids)
        try:
            logits = self.cache.forward(self._loaded, [[id] for id in ids.tolist()], self._pads, 1)
        except _FAILURES:  # forward meets the same error and names it
            return self._call(ids)
        if self._obstacle() is not None:
            self.cache.take_back()
            return self._call(ids)
        self._places += 1
        self._patch.count(self._generation, "step")
        return self._loaded.as_theirs(logits)

    def _may_go_on(self) -> bool:
        """Whether the cache is as the last step has left it, and nothing changes what a step computes, but for the
        parameters and modules."""
        cache, model, loaded = self.cache, self._model, self._loaded
        if not isinstance(cache, RunnerCache) or cache.revision != self._revision or cache.theirs is not None:
            return False
        if cache.patch is not self._patch or self._patch.last_loaded is not loaded or loaded.backend is None:
            return False
        if model.training or _is_traced() or torch.is_autocast_enabled(loaded.device.type):
            return False
        return not any(getattr(model.config, name, False) for name in _OUTPUTS)

    def _obstacle(self) -> str | None:
        """Why the modules cannot be bypassed."""
        if not self._loaded.is_current() or any(getattr(self._model, name) for name in _MODEL_HOOKS):
            return _CHANGED
        return self._loaded.obstacle()

    def _call(self, ids: Tensor) -> Tensor:
        """What transformers' loop does for a step."""
        self._places += 1
        model, device = self._model, self._model.device
        pads = torch.tensor(self._pads, device=device)[:, None]
        arguments = {
            "input_ids": ids.to(device)[:, None],
            "attention_mask": (torch.arange(self._places, device=device) >= pads).long(),
            "position_ids": self._places - 1 - pads,
            cache_parameter(type(model).forward): self.cache,
        }
        output = model(**arguments, use_cache=True, return_dict=True)
        self.cache = getattr(output, _CACHE_FIELD)
        if isinstance(self.cache, RunnerCache):  # the runner may take the next step
            self._loaded, self._revision = self._patch.loaded(model), self.cache.revision
        return output.logits


def _forward_of_class(model: Model, *args: Any, **kwargs: Any) -> Any:
    return type(model).forward(model, *args, **kwargs)


def _cache_in(arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """The cache among forward's arguments, whose name depends on the version of transformers, and None without one."""
    caches = [(name, value) for name, value in arguments.items() if isinstance(value, Cache)]
    if len(caches) > 1:
        raise ValueError(f"{' and '.join(name for name, _ in caches)}: expected one cache, got {len(caches)}")
    return caches[0] if caches else ("", None)


def _hand_over(model: Model, cache: RunnerCache) -> Any:
    """A cache of transformers with the same entries, made from the same ids."""
    if cache.theirs is not None or not cache.ids:
        return cache.theirs
    cache.free()
    places = torch.arange(cache.get_seq_length())
    pads = torch.tensor(cache.pads)[:, None]
    ids = torch.tensor([[0] * pad + ids for pad, ids in zip(cache.pads, cache.ids)])
    arguments: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": (places >= pads).long(),
        "position_ids": (places - pads).clamp(min=0),
        cache_parameter(type(model).forward): DynamicCache(),
        "use_cache": True,
        "return_dict": True,
        "logits_to_keep": 1,
    }
    arguments = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with torch.no_grad():
        cache.theirs = getattr(_forward_of_class(model, **arguments), _CACHE_FIELD)
    return cache.theirs


def _left_padding(mask: Any, sequences: int, past: int, places: int) -> list[int]:
    """How many places are masked before each sequence's ids."""
    if mask is None:
        return [0] * sequences
    if type(mask) is not torch.Tensor or mask.shape != (sequences, past + places):
        raise _Fallback("attention_mask does not have a place for each token")
    is_valid = mask != 0
    pads = (~is_valid).sum(1)
    is_left = is_valid == (torch.arange(past + places, device=mask.device) >= pads[:, None])
    counts: list[int] = pads.tolist()
    if not is_left.all() or not (mask.dtype == torch.bool or ((mask == 1) | ~is_valid).all()):
        raise _Fallback("attention_mask is not left padding")
    if max(counts) == past + places:
        raise _Fallback("attention_mask leaves a sequence without tokens")
    return counts


def _check_positions(position_ids: Any, pads: list[int], past: int, places: int) -> None:
    """Refuses positions that do not count each sequence's ids from 0."""
    if position_ids is None:
        if any(pads):
            raise _Fallback("position_ids are missing beside padding")
        return
    if type(position_ids) is not torch.Tensor or position_ids.shape not in ((1, places), (len(pads), places)):
        raise _Fallback("position_ids do not have a place for each token")
    expected = torch.arange(past, past + places) - torch.tensor(pads)[:, None]
    if ((position_ids.cpu() != expected) & (expected >= 0)).any():
        raise _Fallback("position_ids do not count each sequence from 0")


@functools.cache
def _parameters(method: Any) -> tuple[str, ...]:
    """The names of a method's parameters behind self."""
    return tuple(inspect.signature(method).parameters)[1:]


def _forward(self: Model, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # torch.compile sees Hugging Face's model, and nothing to count
        return _forward_of_class(self, *args, **kwargs)
    names = _parameters(type(self).forward)[: len(args)]
    if len(names) < len(args) or any(name in kwargs for name in names):
        return _forward_of_class(self, *args, **kwargs)  # raises the TypeError
    return self.__dict__[_ATTRIBUTE].forward(self, {**dict(zip(names, args)), **kwargs})


def _generate(self: Model, *args: Any, **kwargs: Any) -> Any:
    names = _parameters(type(self).generate)[: len(args)]
    if len(names) < len(args) or any(name in kwargs for name in names):
        return type(self).generate(self, *args, **kwargs)  # raises the TypeError
    return self.__dict__[_ATTRIBUTE].generate(self, {**dict(zip(names, args)), **kwargs})


def _generate_batch(
    self: Model, inputs: Any, generation_config: Any = None, *_: Any, max_new_tokens: int | None = None, **__: Any
) -> Any:
    """transformers' own method takes further arguments: how a GPU's memory is shared, and whether progress is shown."""
    return generate_batch(self, inputs, generation_config, max_new_tokens)


def _save_pretrained(self: Model, *args: Any, **kwargs: Any) -> Any:
    """Hugging Face's own method, for tensors that share no memory: a file has each by itself."""
    given = {**dict(zip(_parameters(type(self).save_pretrained), args)), **kwargs}
    state = given.get("state_dict")
    given["state_dict"] = {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in (self.state_dict() if state is None else state).items()
    }
    return type(self).save_pretrained(self, **given)


@functools.cache
def _methods_for(stock: Any) -> dict[str, Callable[..., Any]]:
    """The methods that `speed_up` puts into models of a class of transformers: they look like the class's own."""
    methods = {"forward": _forward, "generate": _generate, "generate_batch": _generate_batch}
    if FAMILIES[stock].joins:
        methods["save_pretrained"] = _save_pretrained

    def looking_like(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(stock, name))
        def method(self: Model, *args: Any, **kwargs: Any) -> Any:
            return methods[name](self, *args, **kwargs)

        return method

    return {name: looking_like(name) for name in methods}


def _is_ours(model: Model, name: str) -> bool:
    """Whether a model has the method that `speed_up` put into it."""
    ours = _methods_for(class_of(type(model))).get(name)
    return ours is not None and getattr(model.__dict__.get(name), "__func__", None) is ours


def _has_own_methods(model: Model) -> bool:
    """Whether a model or its class has a method in the place of one of transformers'."""
    stock = class_of(type(model))
    kinds = type(model).__mro__
    own = [name for kind in kinds[: kinds.index(stock)] for name in vars(kind) if not name.startswith("__")]
    own += [name for name in model.__dict__ if not _is_ours(model, name)]
    return any(inspect.isroutine(getattr(stock, name, None)) for name in own)


def _is_traced() -> bool:
    """Whether torch.jit records what runs now."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call, unused-ignore]


def _syncs_by_itself() -> bool:
    """Whether generate() keeps in step with other processes. Models of FSDP have modules that no runner takes."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return False
    from transformers.integrations.deepspeed import (  # type: ignore[import-not-found, unused-ignore]
        is_deepspeed_zero3_enabled,
    )

    return bool(is_deepspeed_zero3_enabled())  # type: ignore[no-untyped-call, unused-ignore]


@functools.cache
def _warn_of_newer() -> None:
    """Says once that transformers is newer than what was tested."""
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) > NEWEST:
        newest, next_one = f"{NEWEST[0]}.{NEWEST[1]}", f"{NEWEST[0]}.{NEWEST[1] + 1}"
        _LOGGER.warning(
            "cf_ops: transformers %s is newer than %s, the newest that was tested: `python -m cf_ops` says whether "
            "generate() runs on cf_ops with it, and `pip install 'transformers<%s'` installs a tested one",
            version,
            newest,
            next_one,
        )


def speed_up(model: Model, stream: Stream | None = None) -> None:
    stock = class_of(type(model))
    if stock is None:
        *first, last = (one.__name__ for one in FAMILIES)
        raise TypeError(
            f"model: expected a {', '.join(first)} or {last}, "
            f"got {type(model).__module__}.{type(model).__qualname__}"
        )
    if _ATTRIBUTE in model.__dict__:
        if _patch_of(model).stream != stream:
            raise ValueError("window, sinks: expected those of the first speed_up(): restore(model) ends it")
        return
    for name in _METHODS:
        if name in model.__dict__:
            raise ValueError(f"model.{name}: expected the method of its class, got one that was put in its place")
    _warn_of_newer()
    patch = Patch(stream)
    error = patch.loaded(model).error
    if error is not None:
        raise error
    model.__dict__[_ATTRIBUTE] = patch
    for name, function in _methods_for(stock).items():
        model.__dict__.setdefault(name, types.MethodType(function, model))


def restore(model: Model) -> None:
    _patch_of(model).end()
    for name in _methods_for(class_of(type(model))):
        if name in _METHODS or _is_ours(model, name):
            del model.__dict__[name]
    del model.__dict__[_ATTRIBUTE]


def report(model: Model) -> Report:
    return _patch_of(model).report(model)


def run(model: Model, ids: Any, taps: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    loaded = _patch_of(model).loaded(model)
    if loaded.error is not None:
        raise NotImplementedError(str(loaded.error))
    assert loaded.backend is not None
    tokens = torch.as_tensor(ids)
    if tokens.dim() not in (1, 2) or tokens.numel() == 0 or tokens.is_floating_point():
        raise ValueError(
            f"ids: expected integers (tokens) or (batch, tokens), got {tokens.dtype} {tuple(tokens.shape)}"
        )
    count = int(tokens.shape[-1])
    device = model.get_output_embeddings().weight.device
    runner = loaded.backend.runner(1, count)
    rows = tokens.reshape(-1, count).tolist()
    own = runner.new_logits(len(rows), count)
    made = [runner.run(0, 0, row, its_logits, taps) for row, its_logits in zip(rows, own)]
    logits = own.float()
    tapped = {name: torch.stack([one[name] for one in made]).to(device) for name in taps}
    if tokens.dim() == 2:
        return logits, tapped
    return logits[0], {name: tap[0] for name, tap in tapped.items()}


def _patch_of(model: Model) -> Patch:
    patch = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    if not isinstance(patch, Patch):
        raise ValueError("model: expected one with speed_up(), got one without")
    return patch
