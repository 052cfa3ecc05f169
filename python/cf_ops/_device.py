"""Where a model runs: the CPU or a GPU, and what a GPU's models need before they are made."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from cf_ops import _core
from cf_ops._arguments import integer

_CUBLASLT = "CF_CUBLASLT"  # the environment variable that names cuBLASLt's file to the compiled part


def cuda_available() -> bool:
    """Whether models run with ``device="cuda"``: this build has the CUDA backend, and there is a GPU that it has kernels
    for. ``python -m cf_ops`` says what is missing. Takes no memory of the GPU."""
    try:
        _core.check_cuda_device(0)
    except (NotImplementedError, _core.CfError):
        return False
    return True


def cuda_index(device: object) -> int | None:
    """The number of the GPU that a device's name means, None for the CPU. Takes a torch.device too.

    Raises ValueError for another name.
    """
    found = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]{0,3}))?", str(device))
    if found is None:
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {str(device)!r}")
    if found[0] == "cpu":
        return None
    return int(found[1] or 0)


def gpu_numbers(device: object, devices: object) -> list[int]:
    """The GPUs that share a model, none where `devices` is None.

    Raises TypeError for what is no sequence of integers, ValueError for an empty one, for a number that is negative or
    stands twice, and for a `device` beside it.
    """
    if devices is None:
        return []
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices: expected the numbers of GPUs, such as [0, 1], got {devices!r}")
    numbers = [integer("devices", number, 0, 9999) for number in devices]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"devices: expected different GPUs, such as [0, 1], got {numbers}")
    if str(device) != "cpu":
        raise ValueError(f"device: expected none beside devices, got {str(device)!r}")
    return numbers


def device_model(
    weights: _core.Weights,
    device: int,
    slots: int,
    capacity: int,
    chunk: int,
    impl: str = "auto",
    **cache: Any,
) -> _core.DeviceModel:
    """A model on a GPU; `cache` are further options of its. Raises what :class:`cf_ops._core.DeviceModel` raises."""
    name_cublaslt()
    return _core.DeviceModel(weights, device=device, slots=slots, capacity=capacity, chunk=chunk, impl=impl, **cache)


@cache
def prepare_ops(device: int) -> Callable[[int], Any]:
    """Makes a GPU ready for ops, and returns what allocates memory of it: a function of a number of bytes that makes a
    torch tensor.

    Raises NotImplementedError in a build without the CUDA backend, CfError for a GPU that it has no kernels for.
    """
    _core.check_cuda_device(device)
    name_cublaslt()
    torch: Any = sys.modules["torch"]
    return partial(torch.empty, dtype=torch.uint8, device=torch.device("cuda", device))


def current_stream(device: int) -> int:
    """The handle of torch's current stream of a GPU."""
    torch: Any = sys.modules["torch"]
    try:
        # The function that torch's generated code calls: it makes no object for the stream.
        return int(torch._C._cuda_getCurrentRawStream(device))
    except AttributeError:
        return int(torch.cuda.current_stream(device).cuda_stream)


def cublaslt_file(newest: int) -> str | None:
    """The libcublasLt.so of torch or of a package of pip's, such as nvidia-cublas; the newest that a driver for CUDA
    `newest` runs. None of these packages is imported."""
    folders = []
    for package, pattern in (("nvidia", "*/lib"), ("torch", "lib")):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        for place in (spec.submodule_search_locations or []) if spec is not None else []:
            folders += sorted(glob.glob(os.path.join(glob.escape(place), pattern)))
    for major in (13, 12):
        for folder in folders:
            file = os.path.join(folder, f"libcublasLt.so.{major}")
            if major <= newest and os.path.isfile(file):
                return os.path.abspath(file)
    return None


def name_cublaslt() -> None:
    """Sets CF_CUBLASLT, where it is not set and a file is found, before the compiled part looks for the library."""
    if _CUBLASLT in os.environ or not _core.has_cuda():
        return
    driver, _ = _core.cuda_versions()
    file = cublaslt_file(int(driver.partition(".")[0]))
    if file is not None:
        os.environ[_CUBLASLT] = file
