"""What is known of a running ``generate()``, and its token loop where that runs here instead of in transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from transformers.generation import (  # type: ignore[import-not-found, unused-ignore]
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
)

from cf_ops.hf._cache import RunnerCache
from cf_ops.hf._runner import Tensor

# What a generate() may return besides the ids; it takes the logits, attentions or states of each step.
_STEP_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class StepByStep(Exception):
    """The reason why transformers' own loop makes a generation's tokens, one call of forward each."""


@dataclass
class Generation:
    """What is known of a running ``generate()``."""

    given: Mapping[str, Any]  # its arguments by name
    config: Any = None  # the effective GenerationConfig
    processors: Any = None  # the lists that it has made of the config and of its arguments
    criteria: Any = None
    input_ids: Tensor = None  # all ids so far, padding included
    prepared: Mapping[str, Any] = field(default_factory=dict)  # what it has made for the next call of forward
    has_begun: bool = False  # whether forward was called
    # The cache of its last call that ran on cf_ops: what it makes for the next call follows from what was checked then.
    cache: RunnerCache | None = None
    revision: int = 0  # of that cache

    @property
    def has_own_cache(self) -> bool:
        """Whether the caller has given the cache."""
        return self.given.get("past_key_values") is not None

    @functools.cached_property
    def _mode_of_config(self) -> str:
        return str(self.config.get_generation_mode(self.given.get("assistant_model")).value)

    @property
    def mode(self) -> str:
        is_custom = self.given.get("custom_generate") is not None
        return "custom_generate" if is_custom or self.config is None else self._mode_of_config

    def spare_entries(self, places: int) -> int | None:
        """How many tokens may follow a prompt of so many places."""
        if self.config is None:
            return None
        if self.config.max_new_tokens is not None:
            return int(self.config.max_new_tokens)
        return None if self.config.max_length is None else max(int(self.config.max_length) - places, 0)

    def has_prepared(self, arguments: Mapping[str, Any]) -> bool:
        """Whether forward's arguments are those that generate() has prepared, and nothing that was put in between."""
        return all(
            value is self.prepared.get(name)
            for name, value in arguments.items()
            if name != "return_dict" and value is not None and value is not False
        )


@dataclass
class GreedyLoop:
    """The loop of a greedy ``generate()`` whose tokens depend on the model alone."""

    input_ids: Tensor
    most: int  # new ids of a sequence
    ends: frozenset[int]  # ids that end a sequence
    pad: int  # what follows in a sequence that has ended
    streamer: Any
    returns_dict: bool

    @classmethod
    def of(cls, generation: Generation, vocab_size: int, default_pad: Any) -> GreedyLoop:
        """The loop that gives what transformers' own would give. Raises StepByStep where there is none."""
        config = generation.config
        if config.do_sample:
            raise StepByStep("sampling")
        for name in _STEP_OUTPUTS:
            if getattr(config, name, None):
                raise StepByStep(name)
        if getattr(config, "is_assistant", False):
            raise StepByStep("an assistant's generation")
        if getattr(config, "prefill_chunk_size", None) is not None:
            raise StepByStep("prefill_chunk_size")
        if config.return_dict_in_generate and getattr(config, "return_legacy_cache", None):
            raise StepByStep("return_legacy_cache")
        if generation.given.get("synced_gpus") or (generation.given.get("synced_gpus") is None and _syncs_by_itself()):
            raise StepByStep("synced_gpus")
        ids = generation.input_ids
        told = (ids, generation.processors, generation.criteria)
        if any(one is None for one in told) or type(ids) is not torch.Tensor or ids.dim() != 2:
            raise StepByStep("a method of generate() was replaced")
        if len(generation.processors) > 0:
            raise StepByStep("a logits processor")
        most, ends = _limits(generation.criteria, int(ids.shape[1]))
        # Before transformers 4.41 the config has the number alone.
        pads = [getattr(config, "_pad_token_tensor", None), config.pad_token_id, default_pad]
        pad = int(next((id for id in pads if id is not None), -1)) if ends else 0
        if not 0 <= pad < vocab_size:
            raise StepByStep("no id of the vocabulary to pad with")
        returns_dict = bool(config.return_dict_in_generate)
        return cls(ids, most, ends, pad, generation.given.get("streamer"), returns_dict)

    def run(self, ids: list[int], advance: Callable[[list[int], list[int], int], list[int]]) -> Tensor:
        """All ids, as transformers' loop returns them, the prompt's first; `ids` are the first new ones.

        `advance(ids, running, left)` appends an id to each sequence and returns the next ids of the running ones, which
        may get `left` more behind these.
        """
        made, running = [ids], list(range(len(ids)))
        while True:
            if self.streamer is not None:
                self.streamer.put(torch.tensor(ids))
            running = [row for row in running if ids[row] not in self.ends]
            if not running or len(made) == self.most:
                break
            chosen = advance(ids, running, self.most - len(made) - 1)
            ids = [self.pad] * len(ids)
            for row, id in zip(running, chosen, strict=True):
                ids[row] = id
            made.append(ids)
        if self.streamer is not None:
            self.streamer.end()
        return torch.cat([self.input_ids, torch.tensor(made, device=self.input_ids.device).T], dim=-1)

    def output(self, ids: Tensor, cache: Any) -> Any:
        return GenerateDecoderOnlyOutput(sequences=ids, past_key_values=cache) if self.returns_dict else ids


class Prefilled(BaseException):
    """Leaves transformers' loop once the prompt is in the cache. No ``except Exception`` on the way may take it."""

    def __init__(self, loop: GreedyLoop, logits: Tensor, cache: RunnerCache) -> None:
        super().__init__("a prompt is in the cache, and its generation goes on in cf_ops")
        self.loop, self.logits, self.cache = loop, logits, cache


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
                raise StepByStep("max_length beyond max_position_embeddings")  # of which the criterion warns
        else:
            raise StepByStep("a stopping criterion")
    if not lengths:
        raise StepByStep("no max_length")
    return max(min(lengths) - places, 1), frozenset(ends)  # the criteria are asked behind each new id


def _syncs_by_itself() -> bool:
    """Whether generate() keeps in step with other processes. Models of FSDP have modules that no runner takes."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return False
    from transformers.integrations.deepspeed import (  # type: ignore[import-not-found, unused-ignore]
        is_deepspeed_zero3_enabled,
    )

    return bool(is_deepspeed_zero3_enabled())
