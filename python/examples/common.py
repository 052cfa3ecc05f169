"""What the example programs share: command lines, checks, tables, times. Needs numpy alone."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

import cf_ops
from cf_ops import CfError, ops

OK, FAILED, BAD_USAGE = 0, 1, 2

Array = NDArray[Any]
K = TypeVar("K")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class Parser(argparse.ArgumentParser):
    """Bad usage is one line on stderr and the exit code 2."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        where = "where the kernels run; a GPU where there is one and what the program needs for it, else the CPU"
        self.add_argument("--device", choices=("cpu", "cuda"), help=where)
        self.add_argument("--inject-fault", action="store_true", help="put one fault in; the checks must fail")

    def error(self, message: str) -> NoReturn:
        sys.exit(_refuse(message))


def integer(least: int) -> Callable[[str], int]:
    """An argument's type: an integer of at least `least`."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
        return int(text)

    return parse


def device_of(wanted: str | None) -> str:
    """The device that was asked for, or the best one. Refuses one that torch or this installation of cf_ops does not
    have. Needs torch."""
    import torch

    if wanted == "cpu" or wanted is None and not torch.cuda.is_available():
        return "cpu"
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU, expected cpu")
    one = torch.ones(1, 8, dtype=torch.float16, device="cuda")
    try:
        ops.layernorm(one, one[0], one[0])
    except (NotImplementedError, CfError) as error:
        if wanted is None:
            return "cpu"
        raise ValueError(f"--device cuda: {error}") from None
    return "cuda"


def device_without_torch(wanted: str | None) -> str:
    """The same for a program that needs no torch on a GPU either."""
    if wanted == "cuda" and not cf_ops.cuda_available():
        raise ValueError("--device cuda: cf_ops finds no GPU, expected cpu; python -m cf_ops says what is missing")
    return "cuda" if wanted != "cpu" and cf_ops.cuda_available() else "cpu"


def activation_dtype(device: str) -> Any:
    """The torch dtype in which a backend computes a decode step. Needs torch."""
    import torch

    return torch.float32 if device == "cpu" else torch.float16


def model_bound(device: str, dtype: Any) -> tuple[str, float]:
    """In what dtype a model of a torch dtype stores activations on a device, and how far logits are rounded besides:
    the CPU stores float32, and rounds logits to the dtype in which they come back. Needs torch."""
    import torch

    if device == "cpu":
        return "float32", float(torch.finfo(dtype).eps) / 2
    return str(dtype).removeprefix("torch."), 0.0


def synchronised(call: Callable[[], object], device: str) -> Callable[[], object]:
    """The call, which waits for the device's work to end. Needs torch."""
    import torch

    def waiting() -> object:
        result = call()
        torch.cuda.synchronize()
        return result

    return call if device == "cpu" else waiting


def hugging_face(directory: str | Path, dtype: Any = "auto") -> Any:
    """A dense checkpoint's GPTNeoXForCausalLM, which generates until a length is reached. Needs transformers."""
    import transformers

    # transformers 4.56 renames the argument.
    is_new = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
    transformers.utils.logging.disable_progress_bar()
    options = {"dtype" if is_new else "torch_dtype": dtype}
    model = transformers.GPTNeoXForCausalLM.from_pretrained(directory, **options).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Checks:
    """What a program asserts."""

    def __init__(self) -> None:
        self._made: list[tuple[bool, str]] = []

    def expect(self, holds: bool, what: str) -> None:
        self._made.append((holds, what))

    def end(self) -> int:
        """Prints a line for each check; returns the exit code."""
        for holds, what in self._made:
            print(f"{'ok    ' if holds else 'FAILED'} {what}")
        return OK if all(holds for holds, _ in self._made) else FAILED


def run(main: Callable[[], int], *packages: str) -> NoReturn:
    """Ends the program with main()'s exit code; with 2 and one line where an input, a package or a backend is missing.
    main() is not called without the packages, unless help is asked for."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing and not {"-h", "--help"} & set(sys.argv):
        sys.exit(
            _refuse(f"needs {' and '.join(missing)}, which this Python does not have: pip install {' '.join(missing)}")
        )
    try:
        sys.exit(main())
    except (ValueError, OSError, NotImplementedError, MemoryError, ImportError) as error:
        sys.exit(_refuse(str(error)))


def _refuse(message: str) -> int:
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr)
    return BAD_USAGE


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A markdown table; numbers stand to the right."""
    cells = [list(headers), *([f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)])
    for row in cells:
        print("| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))) + " |")


class Error(NamedTuple):
    """How far an array is from another: mean and largest absolute error, and both norms' relative errors."""

    mae: float
    max: float
    rel_l2: float
    rel_max: float

    def within(self, bound: ops.Budget) -> bool:
        return self.rel_l2 <= bound.rel_l2 and self.rel_max <= bound.rel_max


def error_of(got: Array, exact: Array) -> Error:
    got, exact = got.astype(np.float64), exact.astype(np.float64)
    off = np.abs(got - exact)
    largest = float(off.max())
    return Error(
        float(off.mean()),
        largest,
        float(np.linalg.norm(off) / np.linalg.norm(exact)),
        largest / float(abs(exact).max()),
    )


def medians_ms(calls: Mapping[K, Callable[[], object]], runs: int, warmup: int = 2) -> dict[K, float]:
    """The median time of each call in milliseconds. The calls take turns, so that all see the same machine."""
    times: dict[K, list[float]] = {name: [] for name in calls}
    for i in range(warmup + runs):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if i >= warmup:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(1, vocab_size, count)]
