"""Parameters that Hugging Face keeps apart or transposed and the library reads as one: they become views of one
matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

from cf_ops.hf._families import Join, family_of, layers_of
from cf_ops.hf._runner import Tensor

Module = Any


class Joined:
    """The joined matrices of a model. A parameter stays the same object, and a change in place is one of the matrix:
    its memory is a part of it, with strides where every second row is the parameter's. A bias whose elements would
    alternate with another's stays where it is, and has a copy: torch's products round otherwise with strides there.
    """

    def __init__(self) -> None:
        self.copied_bytes = 0  # of the tensors that join() returned as copies
        self._views: list[tuple[Tensor, Tensor]] = []  # a parameter, and the matrix that its memory is a part of

    def join(self, model: Module) -> dict[str, Tensor]:
        """The matrices by the library's names; moves parameters into them that are not there yet."""
        before, known = self._views, {id(part) for part, _ in self._views}
        made, self._views, self.copied_bytes = {}, [], 0
        try:
            for whole, parts, join in _parameters(model):
                matrix = _matrix_of(parts, join)
                if matrix is not None:
                    made[whole] = matrix
                    # The caller's own memory may already hold the parts side by side. Then it stays.
                    self._views += [(part, matrix) for part in parts if id(part) in known]
                    continue
                made[whole] = matrix = _copied_together(parts, join)
                if join.interleaved and matrix.dim() == 1:
                    self.copied_bytes += matrix.nbytes
                    continue
                for part, view in zip(parts, _views(matrix, parts, join), strict=True):
                    part.data = view
                    self._views.append((part, matrix))
        except BaseException:
            self._views += before
            raise
        return made

    def part(self) -> None:
        """Gives each parameter memory of its own again. One that others have moved stays where it is."""
        for parameter, matrix in self._views:
            if parameter.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr():
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
        self._views = []


def parts_of(model: Module) -> set[int]:
    """The parameters that are parts of a joined matrix, by id."""
    return {id(part) for _, parts, _ in _parameters(model) for part in parts}


def _parameters(model: Module) -> Iterator[tuple[str, list[Tensor], Join]]:
    """The library's name, the parameters and how they lie, of each matrix and each bias that it reads as one."""
    family, seen = family_of(model), set[int]()
    for index, layer in enumerate(layers_of(model)):
        for join in family.joins:
            modules = [layer.get_submodule(part) for part in join.parts]
            for kind in ("weight", "bias"):
                # A quantised Linear has no "weight", and its bias is a buffer.
                parts = [{**module._parameters, **module._buffers}.get(kind) for module in modules]
                # A parameter that several modules share stays where it is: it cannot lie in two matrices. Parts whose
                # dtypes, devices or shapes differ stay too: reading the weights refuses them.
                if not _fit(parts) or any(id(part) in seen for part in parts) or len({*map(id, parts)}) < len(parts):
                    continue
                seen.update(map(id, parts))
                yield f"{family.layers}.{index}.{join.whole}.{kind}", parts, join


def _fit(parts: Sequence[Any]) -> bool:
    """Whether parts make one matrix."""
    first = parts[0]
    return all(part is not None for part in parts) and all(
        (part.dtype, part.device, part.shape[1:]) == (first.dtype, first.device, first.shape[1:]) for part in parts
    )


def _shape(parts: Sequence[Tensor], join: Join) -> tuple[int, ...]:
    if join.transposed:
        return tuple(reversed(parts[0].shape))
    return sum(part.shape[0] for part in parts), *parts[0].shape[1:]


def _views(matrix: Tensor, parts: Sequence[Tensor], join: Join) -> list[Tensor]:
    """Where the parts lie in their matrix."""
    if join.transposed:
        return [matrix.permute(*reversed(range(matrix.dim())))]
    if join.interleaved:
        return [matrix[place :: len(parts)] for place in range(len(parts))]
    return list(matrix.split([part.shape[0] for part in parts]))


def _matrix_of(parts: Sequence[Tensor], join: Join) -> Tensor | None:
    """The matrix that the parts are views of, None where they are not."""
    first = parts[0].detach()
    shape = _shape(parts, join)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    storage = first.untyped_storage()
    if (first.storage_offset() + math.prod(shape)) * first.element_size() > storage.nbytes():
        return None
    matrix = first.as_strided(shape, strides)
    for part, view in zip(parts, _views(matrix, parts, join), strict=True):
        place = part.untyped_storage().data_ptr(), part.data_ptr(), part.shape, part.stride()
        if place != (storage.data_ptr(), view.data_ptr(), view.shape, view.stride()):
            return None
    return matrix


def _copied_together(parts: Sequence[Tensor], join: Join) -> Tensor:
    """A matrix of the parts' values."""
    matrix = torch.empty(_shape(parts, join), dtype=parts[0].dtype, device=parts[0].device)
    for part, view in zip(parts, _views(matrix, parts, join), strict=True):
        view.copy_(part.detach())
    return matrix
