"""What the commands share: arguments, messages, tables, files."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from cf_ops import _core
from cf_ops._device import cuda_index, gpu_numbers
from cf_ops._results import replacing
from cf_ops.model import Model, find_model, load, on_device, open_weights

OK, CHECK_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
PROGRAM = "cf_ops"
# The options of load() that add_streams() and add_serving() declare.
_SERVING = ("window", "sinks", "pages", "page_entries", "share_prefixes", "step_tokens", "invariant")


def fail(message: str) -> int:
    """Prints one line on stderr; returns BAD_INPUT."""
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


def message_of(error: Exception) -> str:
    """One line: of an OSError of the system, the file and the system's words."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


class Parser(argparse.ArgumentParser):
    """Bad usage is one line on stderr and the exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        # An option of two names goes by the first.
        sys.exit(fail(re.sub(r"^argument ([^/: ]+)(/\S+)?: ", r"\1: ", message)))


def integer(least: int, most: int) -> Callable[[str], int]:
    """An argument's type: an integer of least to most."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected an integer of {least} to {most}, got {text!r}")
        return value

    return parse


def integers(least: int, most: int) -> Callable[[str], list[int]]:
    """An argument's type: integers such as 1,2,3."""
    one = integer(least, most)
    return lambda text: [one(part) for part in text.split(",")]


def output_file(path: str) -> str:
    """An argument's type: a file that can be written, checked before the work that it is to hold."""
    directory = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(directory) or not os.access(directory, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {path!r}")
    return path


def read_text(path: str) -> str:
    """A text file's content. Raises ValueError where it is no UTF-8."""
    with open(path, encoding="utf-8") as file:
        try:
            return file.read()
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(f"{path}: expected UTF-8, got the byte {byte:#04x}") from None


def check_output(args: argparse.Namespace) -> None:
    """Refuses an output in the place of a file that the command reads, or of one in the model's folder."""
    for name in ("json", "out", "csv", "plot"):
        path = getattr(args, name, None)
        if path is not None and os.path.isfile(path):
            _check_own(args, f"--{name}", path)


def _check_own(args: argparse.Namespace, name: str, output: str) -> None:
    for option in ("text", "tokens", "sequences", "prompts_file"):
        path = getattr(args, option, None)
        if path is not None and os.path.exists(path) and os.path.samefile(path, output):
            raise ValueError(f"{name}: expected a file of its own, got {output!r} as for --{option.replace('_', '-')}")
    option = "--folders" if getattr(args, "folders", None) else "--model"
    for model in getattr(args, "folders", None) or [args.model]:
        if not os.path.isdir(model):
            continue
        folder = os.path.realpath(model)
        with os.scandir(folder) as entries:
            linked = any(entry.is_file() and os.path.samefile(entry.path, output) for entry in entries)
        if linked or os.path.commonpath([folder, os.path.realpath(output)]) == folder:
            raise ValueError(f"{name}: expected a file of its own, got {output!r}, which is one of {option} {model}")


def add_model(parser: argparse.ArgumentParser, json: bool = True, several: bool = True) -> None:
    """Declares the arguments of every command that runs a model. json: whether it writes a report. several: whether
    several GPUs may share the model, which then has no taps."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="checkpoint directory: config.json, safetensors; or a preset with procedural weights, such as pythia-70m; "
        "with --revision a name of the Hugging Face hub, such as EleutherAI/pythia-70m",
    )
    parser.add_argument("--revision", metavar="NAME", help="download this branch, tag or commit of the hub's model")
    add_device(parser, json)
    if several:
        parser.add_argument(
            "--devices",
            type=integers(0, 9999),
            metavar="N,...",
            help="the numbers of GPUs that share the model, such as 0,1, in place of --device",
        )


def add_device(parser: argparse.ArgumentParser, json: bool = True) -> None:
    """Declares where a model runs and, with json, where a report is written to."""
    parser.add_argument(
        "--device", "--backend", type=device, default="cpu", metavar="DEVICE", help="cpu, cuda or cuda:N (default cpu)"
    )
    parser.add_argument(
        "--impl",
        choices=["auto", "unfused", "graph", "split", "layer", "persistent"],
        help="how a GPU's step is launched; auto, when left out, is the fastest that takes the model",
    )
    parser.add_argument(
        "--activation", choices=["float32", "float64"], help="the CPU's; float32 when left out, float64 is the oracle"
    )
    parser.add_argument("--threads", type=integer(1, 1024), help="the CPU's threads; one a core when left out")
    if json:
        parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything as JSON")


def add_streams(parser: argparse.ArgumentParser, window: int | None = None, sinks: int | None = None) -> None:
    """Declares what makes each text a stream without end, with the defaults `window` and `sinks`."""
    most = 1 << 20
    parser.add_argument(
        "--window",
        type=integer(1, most),
        default=window,
        metavar="N",
        help="make each text a stream without end: a token sees the newest N tokens and the sinks"
        + (f" (default {window})" if window else ""),
    )
    parser.add_argument(
        "--sinks",
        type=integer(0, most),
        default=sinks,
        metavar="N",
        help="first tokens of a stream that all others see" + (f" (default {sinks})" if sinks else ""),
    )


def add_serving(parser: argparse.ArgumentParser) -> None:
    """Declares how many sequences share a cache and a step; open_model() reads it."""
    parser.add_argument(
        "--pages",
        type=integer(1, 2**31 - 1),
        metavar="N",
        help="all texts share N pages of the cache; when left out each slot has memory of its own",
    )
    parser.add_argument(
        "--page-entries", type=integer(1, 2**31 - 1), metavar="N", help="entries of a page (default 64)"
    )
    parser.add_argument(
        "--share-prefixes", action="store_true", help="texts that begin alike share pages, and are read once that far"
    )
    parser.add_argument(
        "--step-tokens",
        type=integer(0, 1 << 20),
        metavar="N",
        help="tokens of a step: running texts, and pieces of prompts beside them; 0 reads each prompt whole",
    )
    parser.add_argument(
        "--invariant", action="store_true", help="the same bits for each text, whatever else is in its steps"
    )


def device(text: str) -> str:
    """An argument's type: the name of a device."""
    try:
        cuda_index(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("device: ")) from None
    return text


def check_device(args: argparse.Namespace) -> int | None:
    """The number of the first GPU that the arguments name, None for the CPU. Refuses a GPU that is not there, and
    arguments of the other device."""
    try:
        shared = gpu_numbers(args.device, getattr(args, "devices", None))
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    index = shared[0] if shared else cuda_index(args.device)
    others = ("impl",) if index is None else ("activation", "threads")
    for name in others:
        if getattr(args, name, None) is not None:
            raise ValueError(f"--{name}: expected with --device {'cuda' if index is None else 'cpu'}")
    if index is not None:
        for number in shared or [index]:
            _core.check_cuda_device(number)
    return index


def model_directory(args: argparse.Namespace) -> str:
    """Where the files of the model lie that the arguments name; a preset has none and gives its name."""
    return find_model(args.model, args.revision)


def open_model(args: argparse.Namespace, slots: int, capacity: int, layers: int | None = None) -> Model:
    """The model that the arguments name, with its first layers alone where `layers` says how many, on a GPU with so many
    slots and entries. Prints its checkpoint's notes on stderr."""
    index = check_device(args)
    for name in ("page_entries", "share_prefixes"):
        if getattr(args, name, None) and not args.pages:
            raise ValueError(f"--{name.replace('_', '-')}: expected with --pages")
    directory = model_directory(args)
    options: dict[str, Any] = {name: value for name in _SERVING if (value := getattr(args, name, None)) is not None}
    if index is None:
        model = load(directory, layers=layers, activation=args.activation, threads=args.threads, **options)
    else:
        options |= {"devices": args.devices} if getattr(args, "devices", None) else {"device": args.device}
        options |= {"slots": slots, "capacity": max(1, capacity), "impl": args.impl or "auto"}
        model = load(directory, layers=layers, **options)
    print_notes(model)
    return model


def open_models(args: argparse.Namespace, slots: Sequence[int], capacity: int) -> Iterator[tuple[int, Model]]:
    """The model with each number of slots in turn; on a GPU the one before is closed first. The weights are loaded
    once."""
    index = check_device(args)
    if index is None:
        model = open_model(args, 1, capacity)
        yield from ((count, model) for count in slots)
        return
    directory = model_directory(args)
    weights, eos_token_ids = open_weights(directory, for_gpu=True)
    for place, count in enumerate(slots):
        options: dict[str, Any] = {"slots": count, "capacity": capacity, "devices": args.devices or ()}
        model = on_device(weights, directory, eos_token_ids, index, **options, impl=args.impl or "auto")
        if place == 0:
            print_notes(model)
        yield count, model
        model.close()


def print_notes(model: Model) -> None:
    """Prints the first note of each kind of a checkpoint on stderr, and how many more say the same of others.
    That of a preset is logged when it is loaded."""
    if model.weights.procedural:
        return
    kinds: dict[str, list[str]] = {}
    for note in model.notes:
        # Without what they quote, such as a tensor's name, notes of one kind are equal.
        kinds.setdefault("".join(note.split("'")[::2]), []).append(note)
    for first, *others in kinds.values():
        more = f" (and {len(others)} more like it)" if others else ""
        print(f"{PROGRAM}: note: {first}{more}", file=sys.stderr)


def about(command: str, args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """What every report says of its run."""
    report: dict[str, Any] = {
        "program": f"{PROGRAM} {command}",
        "version": _core.version(),
        "command": shlex.join(["python", "-m", PROGRAM, *args.argv]),
        "device": model.device,
    }
    if model.device == "cpu":
        report |= {"cpu": cpu_name(), "threads": _core.num_threads()}
    else:
        driver, runtime = _core.cuda_versions()
        report |= {"gpu": gpu_name(model), "cuda_driver": driver, "cuda_runtime": runtime, "impl": model.impl}
        if len(model.devices) > 1:
            report["devices"] = model.devices
    return report | {"model": args.model, "activation_dtype": model.activation}


def describe_device(model: Model) -> str:
    """What has run a model: "2 threads of <CPU>", or the GPU's name and the impl."""
    if model.device == "cpu":
        return f"{_core.num_threads()} threads of {cpu_name()}"
    several = f"{len(model.devices)} x " if len(model.devices) > 1 else ""
    return f"{several}{gpu_name(model)}, impl {model.impl}"


def gpu_name(model: Model) -> str:
    """The name of the GPU that a model is on, or of the first of several, which are of one kind."""
    index = cuda_index(model.device)
    return "" if index is None else _core.cuda_device(index)[0]


def write_json(path: str | None, report: dict[str, Any]) -> None:
    """Writes a report under a temporary name and renames it; a file that is replaced keeps its mode. Does nothing
    without a path."""
    if path is None:
        return
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
        return
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
        file.write("\n")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows)]

    def line(cells: Sequence[str]) -> str:
        return " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths)))

    print(f"| {line(headers)} |")
    print("| " + " | ".join("-" * (w - 1) + ":" if i else "-" * w for i, w in enumerate(widths)) + " |")
    for row in rows:
        print(f"| {line(row)} |")


def cpu_name() -> str:
    """The processor's name, or "unknown CPU"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"


def version_of(package: str) -> str | None:
    """An installed package's version; it is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
