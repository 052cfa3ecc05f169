"""transformers' continuous batching, ``generate_batch()``, on a patched model's ``generate()``."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

_TOGETHER = 8  # prompts of a batch: as many sequences as a GPU's fastest kernel has


def _requests() -> Any:
    """transformers' module of requests, whose name 4.57 has changed."""
    package = "transformers.generation.continuous_batching"
    name = "requests" if importlib.util.find_spec(f"{package}.requests") else "classes"
    return importlib.import_module(f"{package}.{name}")


def generate_batch(
    model: Any, inputs: Sequence[Sequence[int]], generation_config: Any = None, max_new_tokens: int | None = None
) -> dict[str, Any]:
    """What transformers' own returns: a GenerationOutput for each prompt, by the names req_0, req_1 and so on, and with
    several sequences a prompt req_0__child#0 and so on before req_0."""
    requests = _requests()
    own = model.generation_config
    config = copy.copy(own if generation_config is None else generation_config)
    config.cache_implementation = None  # "paged" is the value by which generate() calls this function
    if max_new_tokens is not None:
        config.max_new_tokens, config.max_length = max_new_tokens, None
    ends = own.eos_token_id if config.eos_token_id is None else config.eos_token_id
    ends = set(ends if isinstance(ends, (list, tuple)) else [ends])
    prompts, results = [list(prompt) for prompt in inputs], {}
    for first in range(0, len(prompts), _TOGETHER):
        batch = prompts[first : first + _TOGETHER]
        places = max(map(len, batch))
        ids = torch.tensor([[0] * (places - len(prompt)) + prompt for prompt in batch], device=model.device)
        mask = torch.tensor([[0] * (places - len(prompt)) + [1] * len(prompt) for prompt in batch], device=model.device)
        made = model.generate(ids, attention_mask=mask, generation_config=config)
        rows = getattr(made, "sequences", made).tolist()
        each = len(rows) // len(batch)
        for number, row in enumerate(rows):
            prompt, child = divmod(number, each)
            name = f"req_{first + prompt}" + (f"__child#{child}" if child < each - 1 else "")
            new = row[places:]
            end = next((place for place, id in enumerate(new) if id in ends), len(new))
            results[name] = requests.GenerationOutput(
                request_id=name,
                prompt_ids=batch[prompt],
                generated_tokens=new[: end + 1],
                status=requests.RequestStatus.FINISHED,
            )
    return results
