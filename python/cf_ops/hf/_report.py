"""What a patched model's calls ran on."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """Calls of a model's ``forward``, by the path that they ran on. In ``generate()`` each new token takes one call.

    Attributes
    ----------
    cf_ops: calls on cf_ops by what they were: ``"greedy prefill"``, ``"greedy loop"``, ``"greedy step"``,
        ``"sampled prefill"``, ``"sampled step"`` inside ``generate()``; ``"forward prefill"``, ``"forward step"``
        outside. In a step of ``"greedy loop"`` the runner has chosen the ids; no logits were made for torch.
    hugging_face: calls on Hugging Face's path by reason.
    weight_bytes: the parameters that cf_ops reads, where torch keeps them.
    cache_bytes: what the living caches of cf_ops take.
    copied_bytes: what cf_ops has copies of: parameters that begin where a GPU's kernels cannot read, quantised Linears
        in a GPU's layout or joined with others, biases of a gate and its up.
    step_by_step: the calls of ``generate()`` on cf_ops whose ids torch has chosen from each step's logits, by reason.
    """

    cf_ops: dict[str, int]
    hugging_face: dict[str, int]
    weight_bytes: int
    cache_bytes: int
    copied_bytes: int = 0
    step_by_step: dict[str, int] = field(default_factory=dict)

    @property
    def in_place(self) -> bool:
        """Whether all parameters are read where torch keeps them."""
        return self.copied_bytes == 0

    @property
    def share(self) -> float:
        """The share of calls that ran on cf_ops, 0 to 1; 1 where there were none."""
        ours, theirs = sum(self.cf_ops.values()), sum(self.hugging_face.values())
        return ours / (ours + theirs) if ours + theirs else 1.0

    def __str__(self) -> str:
        rows = [("cf_ops", what, count) for what, count in sorted(self.cf_ops.items())]
        rows += [("Hugging Face", why, count) for why, count in sorted(self.hugging_face.items())]
        rows += [("by step", why, count) for why, count in sorted(self.step_by_step.items())]
        lines = [f"{path:<12}  {count:>8}  {what}" for path, what, count in rows]
        lines.append(
            f"{self.share:.1%} of calls on cf_ops; weights {self.weight_bytes} bytes, "
            f"{'read in place' if self.in_place else f'{self.copied_bytes} bytes of copies'}; "
            f"caches {self.cache_bytes} bytes"
        )
        return "\n".join(lines)


class Counts:
    """Calls by path, counted from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours: Counter[str] = Counter()
        self._theirs: Counter[str] = Counter()
        self._by_step: Counter[str] = Counter()

    def count_ours(self, what: str) -> None:
        with self._lock:
            self._ours[what] += 1

    def count_theirs(self, reason: str) -> bool:
        """Counts a call, and says whether it is the first for this reason."""
        with self._lock:
            self._theirs[reason] += 1
            return self._theirs[reason] == 1

    def count_step_by_step(self, reason: str) -> None:
        with self._lock:
            self._by_step[reason] += 1

    def report(self, weight_bytes: int, cache_bytes: int, copied_bytes: int) -> Report:
        with self._lock:
            ours, theirs, by_step = (dict(counts) for counts in (self._ours, self._theirs, self._by_step))
            return Report(ours, theirs, weight_bytes, cache_bytes, copied_bytes, by_step)
