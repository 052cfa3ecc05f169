"""What `speed_up` puts into a model: a forward that decides, call by call, which path can do what is asked."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from transformers import GenerationMixin  # type: ignore[import-not-found, unused-ignore]
from transformers.cache_utils import DynamicCache  # type: ignore[import-not-found, unused-ignore]
from transformers.modeling_outputs import CausalLMOutputWithPast  # type: ignore[import-not-found, unused-ignore]

from cf_ops.hf._cache import TAKES_CACHES, RunnerCache, logits_of
from cf_ops.hf._families import FAMILIES, cache_heads, class_of, layers_of
from cf_ops.hf._generation import Generation, GreedyLoop, Prefilled, StepByStep
from cf_ops.hf._joined import Joined
from cf_ops.hf._loaded import Loaded
from cf_ops.hf._report import Counts, Report
from cf_ops.hf._runner import Tensor

Model = Any

_LOGGER = logging.getLogger("cf_ops.hf")
_ATTRIBUTE = "_cf_ops"
_METHODS = ("forward", "generate", "_prepare_generation_config")
# Methods with which generate() makes the mask and the positions of each step. Where other code has replaced the first
# one, as peft does, every step is checked.
_FOLLOWING = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# Methods by which the loop learns of a generate() call. Where other code has replaced one, the loop is not used.
_TOLD = (_FOLLOWING[0], "_get_logits_processor", "_get_stopping_criteria")
# Transformers' greedy loop, by the names of its versions: a class with another one keeps it.
_LOOP = tuple(
    name
    for name in ("generate", "_sample", "_greedy_search", "_prefill", "_has_unfinished_sequences")
    if hasattr(GenerationMixin, name)
)
_SAVING = "save_pretrained"
_MODEL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_READ = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "return_dict",
    "logits_to_keep",
    "num_logits_to_keep",  # its name before transformers 4.49, in models that had it
    "cache_position",
}
_FAILURES = (MemoryError, NotImplementedError, RuntimeError, ValueError)  # of a runner
_OUTPUTS = ("output_attentions", "output_hidden_states")


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
    """A patched model's state. It holds no reference to the model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._loaded: Loaded | None = None
        self._joined = Joined()
        self._caches: weakref.WeakSet[RunnerCache] = weakref.WeakSet()
        self._counts = Counts()
        self._cache_shape = (0, 0)
        self._follows = False
        self._has_own_loop = False
        self.num_layers = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        """A copied model is patched too, and reads its own weights at its first call."""
        return Patch()

    def __reduce__(self) -> Any:
        raise TypeError("a model with speed_up cannot be pickled: expected restore(model) before")

    def loaded(self, model: Model) -> Loaded:
        """What the model holds now; read again where it has changed."""
        with self._lock:
            if self._loaded is None or not self._loaded.is_current():
                self._loaded = None
                self._loaded = Loaded(model, self._joined)
                self._follows = _has_stock_methods(type(model), _FOLLOWING)
                self._has_own_loop = not _has_stock_methods(type(model), (*_LOOP, *_TOLD))
                self.num_layers = len(layers_of(model))
                self._cache_shape = cache_heads(model)
            return self._loaded

    def adopt(self, cache: RunnerCache) -> None:
        self._caches.add(cache)

    def cache_shape(self, sequences: int, places: int) -> tuple[int, ...]:
        heads, head_dim = self._cache_shape
        return sequences, heads, places, head_dim

    def end(self) -> None:
        """Frees what caches hold. None of them can go on. The parameters have memory of their own again."""
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

    @contextmanager
    def generating(self, generation: Generation) -> Iterator[None]:
        outer = self.generation
        self._local.generation = generation
        try:
            yield
        finally:
            self._local.generation = outer

    @property
    def generation(self) -> Generation | None:
        """The ``generate()`` that runs in this thread."""
        running: Generation | None = getattr(self._local, "generation", None)
        return running

    def forward(self, model: Model, arguments: dict[str, Any]) -> Any:
        generation = self.generation
        is_first = generation is not None and not generation.has_begun
        if generation is not None:
            generation.has_begun = True
        try:
            if generation is not None and generation.cache is not None:
                output = self._follow(model, arguments, generation)
                if output is not None:
                    return output
                generation.cache = None
            loaded = self._check_model(model)
            call = self._read(model, arguments)
            logits, cache = self._run(loaded, call, generation)
        except _Fallback as fallback:
            return self._forward_theirs(model, arguments, str(fallback))
        if generation is not None and cache is not None and self._follows:
            generation.cache, generation.revision = cache, cache.revision
        output = self._output(loaded, call.kind, generation, logits, cache if call.use_cache else None)
        if generation is not None and is_first:
            try:
                loop, own = self._greedy_loop(model, arguments, generation, cache)
            except StepByStep as reason:
                self._counts.count_step_by_step(str(reason))
            else:
                raise Prefilled(loop, output.logits, own)
        return output if call.return_dict else output.to_tuple()

    def _greedy_loop(
        self, model: Model, arguments: dict[str, Any], generation: Generation, cache: RunnerCache | None
    ) -> tuple[GreedyLoop, RunnerCache]:
        """The loop of a generation whose prompt is in the cache. Raises StepByStep where it is transformers' own."""
        if cache is None:
            raise StepByStep("use_cache=False")
        loop = GreedyLoop.of(generation, model.get_input_embeddings().num_embeddings, _default_pad(model))
        is_stock = self._follows and not self._has_own_loop and all(_is_ours(model, name) for name in _REPLACED)
        if not is_stock or any(name in model.__dict__ for name in (*_LOOP[1:], _FOLLOWING[1])):
            raise StepByStep("a method of generate() was replaced")
        if not generation.has_prepared(arguments):
            raise StepByStep("other inputs than generate() has prepared")
        if any(getattr(model, name) for name in _MODEL_HOOKS):
            raise StepByStep("a hook on the model")
        return loop, cache

    def go_on(self, model: Model, generation: Generation, loop: GreedyLoop, logits: Tensor, cache: RunnerCache) -> Any:
        """What generate() returns, by a loop of our own behind the prompt, whose logits these are."""
        is_kept = False
        try:
            first: list[int] = logits[:, -1].float().argmax(-1).tolist()
            steps = _Steps(self, model, generation, loop, cache)
            ids = loop.run(first, steps.advance)
            is_kept = loop.returns_dict or generation.has_own_cache
        finally:
            if not is_kept:
                cache.end()
        return loop.output(ids, steps.cache)

    def value_versions(self) -> tuple[int, ...]:
        loaded = self._loaded
        return () if loaded is None else loaded.value_versions()

    def try_step(
        self, model: Model, generation: Generation, ids: list[int], running: list[int], left: int, stop: list[int]
    ) -> list[int]:
        """Appends an id to each sequence of the generation's cache, and chooses the next one of those that run. Raises
        StepByStep, with the cache as before, where the model may have changed or the runner fails."""
        cache, loaded = generation.cache, self._loaded
        if cache is None or loaded is None or not self._may_follow(model, loaded, cache, generation):
            raise StepByStep("the model or the cache has changed")
        if not loaded.is_current() or any(getattr(model, name) for name in _MODEL_HOOKS):
            raise StepByStep("the model or the cache has changed")
        obstacle = loaded.obstacle()
        if obstacle is not None:
            raise StepByStep(obstacle)
        try:
            chosen = cache.choose(loaded, ids, running, left, stop)
        except _FAILURES as error:
            raise StepByStep(str(error) or type(error).__name__) from error
        self._counts.count_ours("greedy loop")
        return chosen

    def count_step_by_step(self, reason: str) -> None:
        self._counts.count_step_by_step(reason)

    def _output(
        self, loaded: Loaded, kind: str, generation: Generation | None, logits: Tensor, cache: RunnerCache | None
    ) -> Any:
        """Counts a call that ran on cf_ops; what it returns."""
        mode = "forward" if generation is None else "sampled" if generation.config.do_sample else "greedy"
        self._counts.count_ours(f"{mode} {kind}")
        logits = logits.to(device=loaded.device, dtype=loaded.dtype)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _follow(self, model: Model, arguments: dict[str, Any], generation: Generation) -> Any:
        """A step that generate() has made behind the call before: its mask and positions are not looked at again, and
        the step is launched before the model is checked, which a GPU's step takes longer than. None where the call is
        another one, or the model has changed; the cache is then as before."""
        cache, loaded = generation.cache, self._loaded
        given: Any = arguments.get("past_key_values")
        if cache is None or given is not cache or loaded is None:
            return None
        if not self._may_follow(model, loaded, cache, generation) or not generation.has_prepared(arguments):
            return None
        for name, value in arguments.items():
            if name not in _READ and value is not None and value is not False:
                return None
        use_cache = arguments.get("use_cache")  # generate() of transformers 4.40 leaves it to the config
        if not arguments.get("return_dict") or not (
            getattr(model.config, "use_cache", True) if use_cache is None else use_cache
        ):
            return None
        if not isinstance(arguments.get("logits_to_keep"), (int, type(None))):
            return None
        ids: Any = arguments.get("input_ids")
        mask: Any = arguments.get("attention_mask")
        sequences = len(cache.ids)
        if type(ids) is not torch.Tensor or ids.shape != (sequences, 1) or ids.device != loaded.device:
            return None
        if mask is None and any(cache.pads):
            return None
        if mask is not None and mask.shape != (sequences, cache.get_seq_length() + 1):
            return None
        try:
            logits = cache.forward(loaded, [[id] for id in ids[:, 0].tolist()], cache.pads, 1)
        except _FAILURES as error:
            raise _Fallback(str(error) or type(error).__name__) from error
        is_trainable = torch.is_grad_enabled() and loaded.is_trainable()
        if is_trainable or not loaded.is_current() or loaded.obstacle() is not None:
            cache.take_back()
            return None
        return self._output(loaded, "step", generation, logits, cache)

    def _may_follow(self, model: Model, loaded: Loaded, cache: RunnerCache, generation: Generation) -> bool:
        """Whether the cache is as the generation's last call has left it, and nothing changes what a step computes, but
        for the parameters and modules."""
        if cache.revision != generation.revision or cache.patch is not self or cache.theirs is not None:
            return False
        if loaded.backend is None or model.training or _FOLLOWING[1] in model.__dict__:
            return False
        if torch.jit.is_tracing() or torch.is_autocast_enabled(loaded.device.type):
            return False
        return not any(getattr(model.config, name, False) for name in _OUTPUTS)

    def _check_model(self, model: Model) -> Loaded:
        """Refuses a model that does more than its modules' own arithmetic now."""
        if torch.jit.is_tracing():
            raise _Fallback("torch.jit traces the model")
        generation = self.generation
        if generation is not None and generation.mode not in ("greedy_search", "sample"):
            raise _Fallback(f"generation mode {generation.mode}")
        if generation is not None and generation.config.return_dict_in_generate and not TAKES_CACHES:
            raise _Fallback("generate() returns its cache, which this transformers takes as tuples")
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

    def _read(self, model: Model, arguments: dict[str, Any]) -> _Call:
        """What a call asks for, where a runner can do exactly that."""
        for name in _OUTPUTS:
            if arguments.get(name) is None and getattr(model.config, name, False):
                raise _Fallback(name)
        for name, value in arguments.items():
            if name not in _READ and value is not None and value is not False:
                raise _Fallback(name)
        ids: Any = arguments.get("input_ids")
        if type(ids) is not torch.Tensor or ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
            raise _Fallback("input_ids are not a tensor of sequences")
        if ids.device != model.device:
            raise _Fallback("input_ids are on another device")
        keep = arguments.get("logits_to_keep", arguments.get("num_logits_to_keep", 0))
        if not isinstance(keep, int) or keep < 0:
            raise _Fallback("logits_to_keep is not a number")

        config = model.config
        use_cache = arguments.get("use_cache")
        use_cache = bool(getattr(config, "use_cache", True) if use_cache is None else use_cache)
        return_dict = arguments.get("return_dict")
        return_dict = bool(getattr(config, "return_dict", True) if return_dict is None else return_dict)
        cache = self._own_cache(arguments.get("past_key_values"))
        if cache is not None and not use_cache:
            raise _Fallback("use_cache=False with a cache")
        past = 0 if cache is None else cache.get_seq_length()
        sequences, places = ids.shape
        if past > 0 and cache is not None and len(cache.ids) != sequences:
            raise _Fallback("another number of sequences than the cache has")
        pads = _left_padding(arguments.get("attention_mask"), sequences, past, places)
        if past > 0 and cache is not None and pads != cache.pads:
            raise _Fallback("attention_mask differs from the cache's padding")
        _check_positions(arguments.get("position_ids"), pads, past, places)
        cache_position = arguments.get("cache_position")
        if cache_position is not None and cache_position.tolist() != list(range(past, past + places)):
            raise _Fallback("cache_position differs from the cache's length")

        new_pads = [max(pad - past, 0) for pad in pads]
        rows = min(keep, places) if keep else places
        if self.generation is None and max(new_pads) > places - rows:
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
        """The cache of ours that a call continues, or none where it begins one."""
        if cache is None:
            return None
        if isinstance(cache, RunnerCache):
            if cache.patch is not self:
                raise _Fallback("a cache of another model")
            if cache.theirs is not None:
                raise _Fallback("a cache that went on at Hugging Face's")
            return cache
        # generate() makes an empty one for each call. One of the caller's is to be filled, and so is not ours.
        generation = self.generation
        if (
            type(cache) is DynamicCache
            and generation is not None
            and not generation.has_own_cache
            and not getattr(cache, "offloading", False)
            and cache.get_seq_length() == 0
        ):
            return None
        raise _Fallback("a cache of the caller's")

    def _run(self, loaded: Loaded, call: _Call, generation: Generation | None) -> tuple[Tensor, RunnerCache | None]:
        assert loaded.backend is not None
        try:
            if not call.use_cache:
                runner = loaded.backend.runner(1, max(map(len, call.ids)))
                return logits_of(runner, [0] * len(call.ids), call.ids, call.rows, has_slots=False), None
            cache = call.cache
            if cache is None:
                places = max(pad + len(ids) for pad, ids in zip(call.pads, call.ids))
                cache = RunnerCache(self, None if generation is None else generation.spare_entries(places))
                self.adopt(cache)
            return cache.forward(loaded, call.ids, call.pads, call.rows), cache
        except _FAILURES as error:
            raise _Fallback(str(error) or type(error).__name__) from error

    def _forward_theirs(self, model: Model, arguments: dict[str, Any], reason: str) -> Any:
        if self._counts.count_theirs(reason):
            _LOGGER.warning("a call runs on Hugging Face's path: %s", reason)
        cache = arguments.get("past_key_values")
        if not isinstance(cache, RunnerCache):
            return _forward_of_class(model, **arguments)
        if cache.patch is not self:
            raise ValueError("past_key_values: expected a cache that this model made since its last speed_up()")
        output = _forward_of_class(model, **{**arguments, "past_key_values": _hand_over(model, cache)})
        cache.theirs = getattr(output, "past_key_values", None) or cache.theirs
        return output


def _forward_of_class(model: Model, *args: Any, **kwargs: Any) -> Any:
    return type(model).forward(model, *args, **kwargs)


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
        "past_key_values": DynamicCache() if TAKES_CACHES else None,
        "use_cache": True,
        "return_dict": True,
    }
    arguments = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    for name in ("logits_to_keep", "num_logits_to_keep"):
        if name in _parameters(type(model).forward):
            arguments[name] = 1
    with torch.no_grad():
        cache.theirs = _forward_of_class(model, **arguments).past_key_values
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
    patch: Patch = self.__dict__[_ATTRIBUTE]
    generation = Generation({**dict(zip(_parameters(type(self).generate), args)), **kwargs})
    with patch.generating(generation):
        try:
            return type(self).generate(self, *args, **kwargs)
        except Prefilled as prefilled:  # its traceback, which ends here, has the frames of transformers' loop
            loop, logits, cache = prefilled.loop, prefilled.logits, prefilled.cache
        with torch.no_grad():
            return patch.go_on(self, generation, loop, logits, cache)


def _save_pretrained(self: Model, *args: Any, **kwargs: Any) -> Any:
    """Hugging Face's own method, for tensors that share no memory: a file has each by itself."""
    given = {**dict(zip(_parameters(type(self).save_pretrained), args)), **kwargs}
    state = given.get("state_dict")
    given["state_dict"] = {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in (self.state_dict() if state is None else state).items()
    }
    return type(self).save_pretrained(self, **given)


def _telling(name: str, tell: Callable[[Generation, tuple[Any, ...], Any], None]) -> Callable[..., Any]:
    """Hugging Face's own method, whose arguments and result a running ``generate()`` is told."""

    def method(self: Model, *args: Any, **kwargs: Any) -> Any:
        result = getattr(type(self), name)(self, *args, **kwargs)
        patch: Patch | None = self.__dict__.get(_ATTRIBUTE)  # who keeps the method may call it after restore()
        generation = None if patch is None else patch.generation
        if generation is not None:
            tell(generation, args, result)
        return result

    return method


def _tell_config(generation: Generation, args: tuple[Any, ...], result: Any) -> None:
    generation.config = result[0]


def _tell_inputs(generation: Generation, args: tuple[Any, ...], result: Any) -> None:
    generation.prepared = dict(result)
    generation.input_ids = args[0] if args else None


def _tell_processors(generation: Generation, args: tuple[Any, ...], result: Any) -> None:
    generation.processors = result


def _tell_criteria(generation: Generation, args: tuple[Any, ...], result: Any) -> None:
    generation.criteria = result


_REPLACED: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "generate": _generate,
    "_prepare_generation_config": _telling("_prepare_generation_config", _tell_config),
    "prepare_inputs_for_generation": _telling("prepare_inputs_for_generation", _tell_inputs),
    "_get_logits_processor": _telling("_get_logits_processor", _tell_processors),
    "_get_stopping_criteria": _telling("_get_stopping_criteria", _tell_criteria),
}


@functools.cache
def _methods_for(stock: Any) -> dict[str, Callable[..., Any]]:
    """The methods that `speed_up` puts into models of a class of transformers: they look like the class's own."""
    methods = {**_REPLACED, **({_SAVING: _save_pretrained} if FAMILIES[stock].joins else {})}

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


def _has_stock_methods(kind: type, names: Sequence[str]) -> bool:
    """Whether a model's class has these methods as transformers has written them."""
    stock = class_of(kind)
    methods = [getattr(kind, name) for name in names]
    theirs = [getattr(stock, name) for name in names]
    return methods == theirs and all(method.__module__.startswith("transformers.") for method in methods)


def _default_pad(model: Model) -> Any:
    return getattr(getattr(model, "generation_config", None), "pad_token_id", None)


class _Steps:
    """The steps of a loop of our own, and of transformers' calls from the first one on that it cannot make."""

    def __init__(
        self, patch: Patch, model: Model, generation: Generation, loop: GreedyLoop, cache: RunnerCache
    ) -> None:
        self.cache: Any = cache  # that of the sequences, which another one follows on Hugging Face's path
        self._patch, self._model, self._generation = patch, model, generation
        self._pads, self._places = list(cache.pads), int(loop.input_ids.shape[1])
        self._device = loop.input_ids.device
        self._stop = sorted(loop.ends)
        self._is_by_step = False
        # Who streams ids may change parameters in place, which a GPU would read too early.
        self._versions = patch.value_versions() if loop.streamer is not None else None

    def advance(self, ids: list[int], running: list[int], left: int) -> list[int]:
        if not self._is_by_step:
            try:
                if self._versions is not None and self._versions != self._patch.value_versions():
                    raise StepByStep("parameters have changed")
                chosen = self._patch.try_step(self._model, self._generation, ids, running, left, self._stop)
                self._places += 1
                return chosen
            except StepByStep as reason:
                self._patch.count_step_by_step(str(reason))
                self._is_by_step = True
                self._generation.cache = None
        return self._call(ids, running)

    def _call(self, ids: list[int], running: list[int]) -> list[int]:
        """What transformers' loop does for a step."""
        self._places += 1
        pads = torch.tensor(self._pads, device=self._device)[:, None]
        output = self._model(
            input_ids=torch.tensor(ids, device=self._device)[:, None],
            attention_mask=(torch.arange(self._places, device=self._device) >= pads).long(),
            position_ids=self._places - 1 - pads,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        self.cache = output.past_key_values
        chosen: list[int] = output.logits[:, -1].float().argmax(-1).tolist()
        return [chosen[row] for row in running]


def speed_up(model: Model) -> None:
    stock = class_of(type(model))
    if stock is None:
        *first, last = (one.__name__ for one in FAMILIES)
        raise TypeError(
            f"model: expected a {', '.join(first)} or {last}, "
            f"got {type(model).__module__}.{type(model).__qualname__}"
        )
    if FAMILIES[stock].joins and not TAKES_CACHES:
        raise NotImplementedError(f"model: expected transformers 4.45 or newer for {type(model).__qualname__}")
    if _ATTRIBUTE in model.__dict__:
        return
    for name in _METHODS:
        if name in model.__dict__:
            raise ValueError(f"model.{name}: expected the method of its class, got one that was put in its place")
    patch = Patch()
    error = patch.loaded(model).error
    if error is not None:
        raise error
    model.__dict__[_ATTRIBUTE] = patch
    for name, function in _methods_for(stock).items():
        model.__dict__.setdefault(name, types.MethodType(function, model))


def restore(model: Model) -> None:
    _patch_of(model).end()
    for name in (*_TOLD, _SAVING):
        if _is_ours(model, name):
            del model.__dict__[name]
    for name in (*_METHODS, _ATTRIBUTE):
        del model.__dict__[name]


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
