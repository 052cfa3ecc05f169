"""What a request asks for: Dynamo's request as the arguments of the decoder, or a refusal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

MOST_CHOICES = 128

# What the front end passes on and no decoder here computes, with the value that asks for nothing.
_UNSUPPORTED: dict[str, dict[str, Any]] = {
    "sampling_options": {
        "best_of": 1,
        "use_beam_search": False,
        "length_penalty": 1,
        "guided_decoding": None,
    },
    "stop_conditions": {"max_thinking_tokens": None},
    "vllm": {"detokenize": True, "allowed_token_ids": None, "bad_words_token_ids": None, "logprob_token_ids": None},
}
_BIAS = "logit_bias:"


class Refused(ValueError):
    """A request that cannot be answered; the message names what was expected and what came."""


class Asked(NamedTuple):
    """A request. prompt: its ids. options: the arguments of Decoder.add() for each choice. echo: whether the prompt comes
    back first, with log-probabilities where the options have them."""

    prompt: list[int]
    options: list[dict[str, Any]]
    echo: bool = False


def read_request(request: Mapping[str, Any], capacity: int, most_choices: int = MOST_CHOICES) -> Asked:
    """Reads a request of Dynamo's; `capacity` is the number of entries that a sequence has room for, `most_choices` the
    number of sequences that a worker takes.

    The random numbers of choice i are those of sequence i and the request's seed, so that they depend on the request
    alone. Without a seed it gets one that nobody can guess. Raises Refused.
    """
    sampling, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    groups = {**request, "vllm": (request.get("extra_args") or {}).get("sampling_options")}
    for group, neutral in _UNSUPPORTED.items():
        given = groups.get(group) or {}
        for name, value in neutral.items():
            if given.get(name) not in (None, value):
                expected = "none" if value is None else value
                raise Refused(f"{name}: expected {expected}, since this server has no other, got {given[name]!r}")
    prompt = list(request["token_ids"])
    room = capacity + 1 - len(prompt)  # the last new id needs no entry
    if room < 1:
        raise Refused(f"prompt: expected at most {capacity} ids, the entries of a sequence, got {len(prompt)}")
    most = stop.get("max_tokens")
    if most is None:
        most = room
    elif most > room:
        raise Refused(
            f"max_tokens: expected at most {room} beside a prompt of {len(prompt)} ids in {capacity} entries, got "
            f"{most}"
        )
    stop_ids = sorted(
        {
            id
            for key in ("stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible")
            for id in stop.get(key) or ()
        }
    )
    least = stop.get("min_tokens") or 0
    if least > most:
        raise Refused(f"min_tokens: expected at most {most}, which max_tokens or the capacity allow, got {least}")
    choices = 1 if sampling.get("n") is None else sampling["n"]
    most_choices = min(most_choices, MOST_CHOICES)
    if not 1 <= choices <= most_choices:
        raise Refused(f"n: expected 1 to {most_choices}, got {choices}")
    echo = (request.get("output_options") or {}).get("prompt_logprobs") is not None  # as the front end calls it
    if echo and stop.get("stop"):
        raise Refused("echo: expected it without texts of stop, which the prompt may have, got both")
    seed = sampling.get("seed")
    options = _draw(sampling) | {
        "seed": int.from_bytes(os.urandom(8), "little") if seed is None else seed % 2**64,
        "stop": stop_ids,
        "max_new_tokens": most,
        "min_new_tokens": least,
        "logit_bias": _logit_bias(request.get("annotations") or ()),
        "logprobs": (request.get("output_options") or {}).get("logprobs"),
    }
    return Asked(prompt, [options | {"id": choice} for choice in range(choices)], echo)


def _draw(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """How an id is drawn. OpenAI's temperature is 1 where nothing is said. At temperature 0 nothing is cut off, since
    the most likely id is always kept."""
    temperature = _real(sampling.get("temperature"), 1.0)
    options: dict[str, Any] = {
        "temperature": temperature,
        "repetition_penalty": _real(sampling.get("repetition_penalty"), 1.0),
        "frequency_penalty": _real(sampling.get("frequency_penalty"), 0.0),
        "presence_penalty": _real(sampling.get("presence_penalty"), 0.0),
    }
    if temperature == 0:
        return options
    top_k = sampling.get("top_k")
    return options | {
        "top_k": 0 if top_k in (None, -1) else top_k,
        "top_p": _real(sampling.get("top_p"), 1.0),
        "min_p": _real(sampling.get("min_p"), 0.0),
    }


def _logit_bias(annotations: Iterable[str]) -> list[tuple[int, float]]:
    """The biases of an annotation such as 'logit_bias:{"5": -100}'. OpenAI's own field does not come this far."""
    given = [text for text in annotations if text.startswith(_BIAS)]
    if not given:
        return []
    try:
        return [(int(id), float(bias)) for id, bias in json.loads(given[-1].removeprefix(_BIAS)).items()]
    except (ValueError, TypeError, AttributeError):
        raise Refused(f"annotations: expected {_BIAS}{{ID: BIAS, ...}} in JSON, got {given[-1]!r}") from None


def _real(value: float | None, default: float) -> float:
    """A number as the client wrote it: the front end passes it on as a float32, 0.9 as 0.8999999761581421."""
    return default if value is None else float(str(np.float32(value)))
