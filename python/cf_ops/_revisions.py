"""What a revision of a model is: the files it was read from, checksums of its tensors, and what is wrong with them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cf_ops import _core


@dataclass
class Revision:
    """A revision's row of a sweep.

    name: as it was asked for. step: the training step that the name says. directory, files, config: what was read,
    files with their bytes. files_sha256: of these files, as the hub has it. sha256: of all tensors, their names, dtypes
    and shapes. tensors: each one's own. metrics: what was measured. error: why nothing was. load_s: seconds in which it
    was read, beside the one before. swap_s: until the model had its weights, of run_s: until it was measured.
    """

    name: str
    step: int
    directory: str = ""
    files: dict[str, int] = field(default_factory=dict)
    files_sha256: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""
    tensors: dict[str, str] = field(default_factory=dict)
    elements: str = ""  # some of the matrices', float32 in hexadecimal digits
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    load_s: float = 0.0
    swap_s: float = 0.0
    run_s: float = 0.0

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a revision, or that it shares with another."""

    revision: str
    what: str

    def __str__(self) -> str:
        return f"{self.revision}: {self.what}"


def identify(revision: Revision) -> None:
    """Takes the checksums of the files in a revision's directory."""
    made = _core.identify(revision.directory, min(4, os.cpu_count() or 1))
    revision.config = json.loads(made.config)
    revision.files, revision.files_sha256 = made.files, made.files_sha256
    revision.sha256, revision.tensors, revision.elements = made.sha256, made.tensors, made.elements


def faults(revisions: Sequence[Revision]) -> list[Fault]:
    """What is wrong: errors; configs that differ; tensors of another revision or of another place; and weights that do
    not lie where their step says, between those of the steps before and after."""
    rows = [(r.name, r.step, json.dumps(r.config), r.sha256, r.tensors, r.elements, r.error) for r in revisions]
    return [Fault(name, what) for name, what in _core.faults_of(rows)]
