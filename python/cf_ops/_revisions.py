"""What a revision of a model is: the files it was read from, checksums of its tensors, and what is wrong with them."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cf_ops import _safetensors
from cf_ops._results import read_json

_SAMPLES = 2048  # elements of a revision that distances are measured by
_MARGIN = 1.1  # by how much another revision must be nearer than a neighbour
_ASIDE = 1.5  # how much farther from both neighbours than these are from each other
_IN_LAYER = re.compile(r"\.\d+\.")
_NOT_COMPARED = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path")


@dataclass
class Revision:
    """A revision's row of a sweep.

    name: as it was asked for. step: the training step that the name says. directory, files, config: what was read,
    files with their bytes. sha256: of all tensors, their names, dtypes and shapes. tensors: each one's own. metrics:
    what was measured. error: why nothing was. load_s: seconds in which it was read, beside the one before. swap_s: until
    the model had its weights, of run_s: until it was measured.
    """

    name: str
    step: int
    directory: str = ""
    files: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""
    tensors: dict[str, str] = field(default_factory=dict)
    sample: str = ""  # elements of the matrices, float32 in base64
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
    revision.config = read_json(os.path.join(revision.directory, "config.json"))
    stored: dict[str, _safetensors.Tensor] = {}
    for name in files_of(revision.directory):
        path = os.path.join(revision.directory, name)
        revision.files[name] = os.stat(path).st_size
        stored |= _safetensors.read(path)[0]
    names = sorted(stored)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashlib works without the GIL
        digests = list(pool.map(lambda name: hashlib.sha256(stored[name].data.data).hexdigest(), names))
    revision.tensors = {
        name: f"{stored[name].dtype}{list(stored[name].shape)} {digest}" for name, digest in zip(names, digests)
    }
    whole = "".join(f"{name} {described}\n" for name, described in revision.tensors.items())
    revision.sha256 = hashlib.sha256(whole.encode()).hexdigest()
    revision.sample = base64.b64encode(_sample(stored).tobytes()).decode("ascii")


def files_of(directory: str) -> list[str]:
    """The names of the files that hold a checkpoint's tensors, as a model reads them."""
    if os.path.exists(os.path.join(directory, "model.safetensors")):
        return ["model.safetensors"]
    index = os.path.join(directory, "model.safetensors.index.json")
    if os.path.exists(index):
        return sorted(set(read_json(index).get("weight_map", {}).values()))
    return sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))


def faults(revisions: Sequence[Revision]) -> list[Fault]:
    """What is wrong: errors; configs that differ; tensors of another revision or of another place; and weights that do
    not lie where their step says, between those of the steps before and after."""
    found = [Fault(r.name, r.error) for r in revisions if r.error is not None]
    read = sorted((r for r in revisions if r.sha256), key=lambda r: r.step)
    return found + list(_other_configs(read)) + list(_equal(read)) + list(_moved(read)) + list(_aside(read))


def _other_configs(read: Sequence[Revision]) -> Iterator[Fault]:
    for r in read[1:]:
        first = read[0]
        for key in sorted({*first.config, *r.config} - {*_NOT_COMPARED}):
            theirs, own = first.config.get(key), r.config.get(key)
            if theirs != own:
                yield Fault(r.name, f"config.json says {key} {own!r}, that of {first.name} {theirs!r}")


def _equal(read: Sequence[Revision]) -> Iterator[Fault]:
    """Revisions with all or some matrices of one before."""
    for i, r in enumerate(read):
        copied = next((other for other in read[:i] if other.sha256 == r.sha256), None)
        if copied is not None:
            yield Fault(r.name, f"all tensors are those of {copied.name}")
            continue
        matrices = _matrices(r)
        same = [[name for name, own in matrices.items() if other.tensors.get(name) == own] for other in read[:i]]
        names = max(same, key=len, default=[])
        if names:
            other = read[same.index(names)]
            yield Fault(
                r.name, f"{len(names)} of {len(matrices)} matrices are those of {other.name}, such as {names[0]}"
            )


def _moved(read: Sequence[Revision]) -> Iterator[Fault]:
    """Matrices that another name has, in the same revision or in one before."""
    first: dict[str, tuple[Revision, str]] = {}
    for r in read:
        moved = []
        for name, described in _matrices(r).items():
            where, before = first.setdefault(described, (r, name))
            is_tied = not _IN_LAYER.search(name) and not _IN_LAYER.search(before)
            if before != name and not is_tied:
                moved.append(f"{name} has the elements of {before} in {where.name}")
        if moved:
            yield Fault(r.name, moved[0] + (f", and {len(moved) - 1} more are as wrong" if len(moved) > 1 else ""))


def _aside(read: Sequence[Revision]) -> Iterator[Fault]:
    """Weights far from their neighbours'. In training each step lies near the ones before and after it."""
    checksums = [r.sha256 for r in read]
    line: list[tuple[str, NDArray[np.float32]]] = []
    for r in read:
        sample = np.frombuffer(base64.b64decode(r.sample), np.float32)
        # Which of two equal revisions is the wrong one is not known.
        if (
            sample.size
            and np.isfinite(sample).all()
            and checksums.count(r.sha256) == 1
            and (not line or line[0][1].size == sample.size)
        ):
            line.append((r.name, sample))
    if len(line) < 3:
        return
    samples = np.stack([sample for _, sample in line])
    far = np.stack([np.linalg.norm(samples - sample, axis=1) for sample in samples])
    for i, (name, _) in enumerate(line):
        beside = [j for j in (i - 1, i + 1) if 0 <= j < len(line)]
        near = min(float(far[i, j]) for j in beside)
        if len(beside) == 2 and near > _ASIDE * far[beside[0], beside[1]]:
            names = f"{line[beside[0]][0]} and {line[beside[1]][0]}"
            yield Fault(name, f"its weights lie farther from those of {names} than these lie from each other")
            continue
        others = [j for j in range(len(line)) if j != i and j not in beside]
        nearest = min(others, key=lambda j: float(far[i, j]), default=i)
        if others and near > _MARGIN * far[i, nearest]:
            yield Fault(name, f"its weights lie nearest to those of {line[nearest][0]}, which is no neighbour")


def _matrices(revision: Revision) -> Mapping[str, str]:
    """The tensors that no two revisions share by chance: neither vectors, which begin as ones and zeros, nor masks."""
    return {
        name: described
        for name, described in revision.tensors.items()
        if described.partition("[")[0] in ("F16", "BF16", "F32", "F64", "I32") and "," in described
    }


def _sample(stored: Mapping[str, _safetensors.Tensor]) -> NDArray[np.float32]:
    """Elements of the matrices, at the same places in each revision."""
    matrices = [
        stored[n] for n in sorted(stored) if len(stored[n].shape) == 2 and stored[n].dtype[:2] in ("F1", "F3", "BF")
    ]
    parts = []
    for number, tensor in enumerate(matrices):
        elements = tensor.elements().reshape(-1)
        count = min(elements.size, -(-_SAMPLES // len(matrices)))
        taken = elements[np.random.default_rng(number).integers(0, max(1, elements.size), count)]
        parts.append(_safetensors.from_bfloat16(taken) if tensor.dtype == "BF16" else taken.astype(np.float32))
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
