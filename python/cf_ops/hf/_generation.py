"""What is known of a running ``generate()``, and the token loop that transformers calls in place of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch  # type: ignore[import-not-found, unused-ignore]
from transformers.cache_utils import Cache  # type: ignore[import-not-found, unused-ignore]
from transformers.generation import (  # type: ignore[attr-defined, import-not-found, unused-ignore]
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from cf_ops import _core
from cf_ops.hf._cache import cache_field
from cf_ops.hf._runner import Tensor

LOOKUP_ARGUMENTS = ("prompt_lookup_num_tokens", "max_matching_ngram_size")

_CACHE_FIELD = cache_field(GenerateDecoderOnlyOutput)
_FOR_TRANSFORMERS_LOOPS = ("streamer", "stop_strings", *LOOKUP_ARGUMENTS)
_STEP_OUTPUTS = ("scores", "logits")  # collected at each step if the config asks: output_scores, output_logits


class StepByStep(Exception):
    """The reason why torch chooses a generation's ids from the logits of each step, in our loop or in transformers'."""


@dataclass(frozen=True)
class Generation:
    """A running ``generate()``: its arguments by name, and its GenerationConfig."""

    given: Mapping[str, Any]
    config: Any
    has_own_loop: bool = False  # the loop is ours: it gives forward no cache of transformers

    @classmethod
    def of(cls, model: Any, given: Mapping[str, Any]) -> Generation:
        """What can be told before transformers has prepared the config, which may have more of the model's own."""
        config = copy.copy(given.get("generation_config") or model.generation_config)
        for name, value in given.items():
            if value is not None and hasattr(config, name):
                setattr(config, name, value)
        return cls(given, config)

    @functools.cached_property
    def mode(self) -> str:
        if self.given.get("custom_generate") is not None:
            return "custom_generate"
        return str(self.config.get_generation_mode(self.given.get("assistant_model")).value)

    @property
    def has_own_cache(self) -> bool:
        """Whether the caller has given the cache."""
        return any(isinstance(value, Cache) for value in self.given.values())

    def spare_entries(self, places: int) -> int | None:
        """How many tokens may follow a prompt of so many places."""
        if self.config.max_new_tokens is not None:
            return int(self.config.max_new_tokens)
        return None if self.config.max_length is None else max(int(self.config.max_length) - places, 0)

    def for_own_loop(self, model: Any) -> dict[str, Any]:
        """generate()'s arguments for a loop of our own, to which it hands neither the streamer nor a tokenizer: stop
        strings become the criterion that transformers makes of them. Raises StepByStep where they cannot."""
        given = {name: value for name, value in self.given.items() if name not in _FOR_TRANSFORMERS_LOOPS}
        if self.config.stop_strings is None:
            return given
        configs = (self.given.get("generation_config"), model.generation_config)
        if any(getattr(config, "stop_strings", None) is not None for config in configs):
            raise StepByStep("stop_strings of a generation config")
        if self.given.get("tokenizer") is None:
            raise StepByStep("stop_strings without a tokenizer")  # transformers then raises its own error
        criterion = StopStringCriteria(self.given["tokenizer"], self.config.stop_strings)
        return {
            **given,
            "stopping_criteria": StoppingCriteriaList([*(given.get("stopping_criteria") or ()), criterion]),
        }


class Steps(Protocol):
    """What a loop asks of the model, behind the prompt."""

    cache: Any  # of the sequences so far

    def choose(self, ids: list[int], running: list[int], left: int, stop: list[int]) -> list[int]:
        """Appends an id to each sequence, and returns the next greedy ids of the sequences that run. A running sequence
        may get `left` more ids, but none behind an id of `stop`."""

    def most_drafted(self) -> int:
        """The most ids of a draft; 0 where there can be none."""

    def choose_run(self, ids: list[int]) -> list[int]:
        """Of one sequence: appends an id and a draft of what follows it; returns the greedy ids behind them, up to the
        first that the draft does not have, and forgets the rest of the draft."""

    def logits(self, ids: Tensor) -> Tensor:
        """Appends an id to each sequence; the logits (sequences, 1, vocab) behind it."""


@dataclass
class TokenLoop:
    """The loop of a greedy or sampled ``generate()``, with what transformers has prepared for it."""

    config: Any
    input_ids: Tensor
    processors: Any
    criteria: Any
    streamer: Any

    def ends(self, vocab_size: int) -> Ends:
        """How sequences end, where their ids follow from the model alone. Raises StepByStep where they do not."""
        if self.config.do_sample:
            raise StepByStep("sampling")
        for name in self._kept():
            raise StepByStep(f"output_{name}")
        if len(self.processors) > 0:
            raise StepByStep("a logits processor")
        most, ids = _limits(self.criteria, int(self.input_ids.shape[1]))
        pad = self._pad() if ids else 0
        if not 0 <= pad < vocab_size:
            raise StepByStep("no id of the vocabulary to pad with")
        return Ends(most, ids, pad)

    def by_ids(self, logits: Tensor, steps: Steps, ends: Ends) -> Any:
        """What generate() returns, with ids that the runner chooses. `logits` are those of the prompt's last places."""
        ids: list[int] = logits[:, -1].float().argmax(-1).tolist()
        made, running, stop = [ids], list(range(len(ids))), sorted(ends.ids)
        while True:
            if self.streamer is not None:
                self.streamer.put(torch.tensor(ids))
            running = [row for row in running if ids[row] not in ends.ids]
            if not running or len(made) == ends.most:
                break
            chosen = steps.choose(ids, running, ends.most - len(made) - 1, stop)
            ids = [ends.pad] * len(ids)
            for row, id in zip(running, chosen, strict=True):
                ids[row] = id
            made.append(ids)
        new = torch.tensor(made, device=self.input_ids.device).T
        return self._output(torch.cat([self.input_ids, new], dim=-1), steps, {})

    def by_drafts(self, logits: Tensor, steps: Steps, ends: Ends, lookup: Lookup) -> Any:
        """The same of one sequence, whose next ids a lookup drafts: a step makes several where they are right."""
        tokens: list[int] = self.input_ids[0].tolist()
        places = len(tokens)
        length = _core.DraftLength(min(lookup.tokens, steps.most_drafted()))
        new: list[int] = logits[:, -1].float().argmax(-1).tolist()
        while True:
            for id in new:
                tokens.append(id)
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([id]))
                if id in ends.ids or len(tokens) - places == ends.most:
                    made = torch.tensor([tokens], device=self.input_ids.device, dtype=self.input_ids.dtype)
                    return self._output(made, steps, {})
            most = min(length.next(), steps.most_drafted(), ends.most - (len(tokens) - places) - 1)
            draft = _core.lookup_draft(tokens, most, lookup.longest, 1) if most > 0 else []
            new = steps.choose_run([tokens[-1], *draft])
            if draft:
                length.verified(len(draft), len(new) - 1)

    def by_logits(self, logits: Tensor, steps: Steps) -> Any:
        """The same with ids that torch chooses from the logits of each step, as transformers does."""
        ids, kept = self.input_ids, self._kept()
        running = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        has_ends = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        while True:
            raw = logits[:, -1].to(copy=True, dtype=torch.float32, device=ids.device)
            scores = self.processors(ids, raw)
            for name, made in zip(_STEP_OUTPUTS, (scores, raw)):
                if name in kept:
                    kept[name] += (made,)
            if self.config.do_sample:
                new = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
            else:
                new = scores.argmax(-1)
            if has_ends:
                new = new * running + self._pad() * (1 - running)
            ids = torch.cat([ids, new[:, None]], dim=-1)
            if self.streamer is not None:
                self.streamer.put(new.cpu())
            running = running & ~self.criteria(ids, kept.get("scores"))
            if not running.any():
                return self._output(ids, steps, kept)
            logits = steps.logits(new)

    def _kept(self) -> dict[str, tuple[Tensor, ...]]:
        """The outputs of each step that are asked for, still empty."""
        has_dict = self.config.return_dict_in_generate
        return {name: () for name in _STEP_OUTPUTS if has_dict and getattr(self.config, f"output_{name}")}

    def _pad(self) -> int:
        """The id that fills the rest of a sequence that has ended."""
        pad, ends = self.config.pad_token_id, self.config.eos_token_id
        if pad is None:
            pad = ends[0] if isinstance(ends, (list, tuple)) else ends
        return -1 if pad is None else int(pad)

    def _output(self, ids: Tensor, steps: Steps, kept: Mapping[str, tuple[Tensor, ...]]) -> Any:
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return ids
        fields: dict[str, Any] = {**kept, _CACHE_FIELD: steps.cache}
        return GenerateDecoderOnlyOutput(sequences=ids, **fields)


@dataclass(frozen=True)
class Lookup:
    """What generate()'s prompt_lookup_num_tokens asks for."""

    tokens: int  # of a draft
    longest: int  # the most last ids that are looked for

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Lookup | None:
        """What generate() was given by name. A config that asks for lookups is left to transformers, and so is a number
        that it refuses."""
        tokens, longest = given.get("prompt_lookup_num_tokens"), given.get("max_matching_ngram_size")
        numbers = [number for number in (tokens, longest) if number is not None]
        if tokens is None or not all(type(number) is int and number > 0 for number in numbers):
            return None
        return cls(tokens, longest or 2)  # 2 is transformers' own


@dataclass(frozen=True)
class Ends:
    """How the sequences of a generation end."""

    most: int  # new ids of a sequence
    ids: frozenset[int]  # that end a sequence
    pad: int  # what follows in a sequence that has ended


def _limits(criteria: Any, places: int) -> tuple[int, frozenset[int]]:
    """How many new ids the criteria allow, and which ids end a sequence."""
    lengths: list[int] = []
    ends: set[int] = set()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.update(criterion.eos_token_id.tolist())
        elif type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
            longest = getattr(criterion, "max_position_embeddings", None)
            if longest is not None and criterion.max_length > longest:
                raise StepByStep("max_length beyond max_position_embeddings")  # transformers' criterion warns of it
        else:
            raise StepByStep("a stopping criterion")
    if not lengths:
        raise StepByStep("no max_length")
    return max(min(lengths) - places, 1), frozenset(ends)  # the criteria are asked behind each new id
