"""``python -m cf_ops sweep``: a metric over the training steps of a model."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cf_ops import _core
from cf_ops._memorize import memorize
from cf_ops._results import write_text
from cf_ops._sweep import Metric, Revision, pythia_steps, surprisal, sweep
from cf_ops._text import encode, open_tokenizer
from cf_ops._token_files import DTYPES, check_rows, map_ids, map_rows
from cf_ops.cli import _program as program
from cf_ops.model import USUAL_SLOTS, Model, find_model

_MOST = 1 << 20
_METRICS = ("perplexity", "surprisal", "memorization")
_LM_EVAL = "lm_eval:"
_LENGTH = 64  # ids of a sequence: 32 are read and 32 are made


def declare(parser: argparse.ArgumentParser) -> None:
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--folders", nargs="+", metavar="DIR", help="checkpoint directories, one a revision")
    models.add_argument("--model", metavar="NAME", help="a name of the Hugging Face hub, with --revisions")
    parser.add_argument(
        "--revisions", metavar="LIST", help="revisions of --model such as step0,step1000; or pythia, for all 154 steps"
    )
    parser.add_argument(
        "--metric",
        action="append",
        required=True,
        metavar="NAME",
        help=f"{', '.join(_METRICS)}, lm_eval:TASK of lm-evaluation-harness, or FILE.py:FUNCTION, which makes a number"
        " of a model; may be repeated",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="a text in UTF-8, encoded by the first revision's tokenizer")
    source.add_argument("--tokens", metavar="FILE.npy", help="token ids in one row, for perplexity and surprisal")
    parser.add_argument("--context", type=program.integer(2, _MOST), default=2048, help="ids that a window holds")
    parser.add_argument("--stride", type=program.integer(1, _MOST), help="ids between windows; --context when left out")
    parser.add_argument("--limit", type=program.integer(2, 1 << 40), help="take the first ids alone")
    parser.add_argument("--per-token", metavar="DIR", help="write the surprisal of each token as DIR/REVISION.csv")
    parser.add_argument("--sequences", metavar="FILE", help="sequences of ids for memorization, as memorize takes them")
    parser.add_argument("--row", type=program.integer(_LENGTH, _MOST), metavar="N", help="ids of a sequence")
    parser.add_argument("--dtype", choices=DTYPES, default="uint16", help="of bare ids, little-endian (default uint16)")
    parser.add_argument(
        "--slots", type=program.integer(1, _MOST), default=USUAL_SLOTS, help="sequences that run at once"
    )
    parser.add_argument(
        "--out",
        required=True,
        type=program.output_file,
        metavar="FILE.json",
        help="the results, written after each revision; where an earlier run was interrupted, it goes on",
    )
    parser.add_argument("--csv", type=program.output_file, metavar="FILE", help="write the table")
    parser.add_argument(
        "--plot", type=program.output_file, metavar="FILE", help="draw metric against step (matplotlib)"
    )
    program.add_device(parser)


def run(args: argparse.Namespace) -> int:
    if (args.model is None) != (args.revisions is None):
        raise ValueError("--revisions: expected with --model")
    names = args.folders or (pythia_steps() if args.revisions == "pythia" else args.revisions.split(","))
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs the package matplotlib, which is missing: pip install matplotlib")
    metrics, settings, then = _metrics(args, names)
    if args.threads is not None:
        _core.set_num_threads(args.threads)
    on_gpu = program.check_device(args) is not None
    sizes = {"slots": args.slots, "capacity": max(args.context, _LENGTH)} if on_gpu else {}
    made = sweep(
        names,
        metrics,
        model=args.model,
        out=args.out,
        settings=settings,
        device=args.device,
        activation=args.activation,
        impl=args.impl or "auto",
        then=then,
        **sizes,
    )
    rows = [
        [r.name, str(r.step), *(f"{r.metrics[m]:.6g}" if m in r.metrics else "-" for m in made.metrics), r.sha256[:12]]
        for r in made.revisions
    ]
    program.print_table(["revision", "step", *made.metrics, "sha256"], rows)
    for fault in made.faults:
        print(f"{program.PROGRAM}: {fault}", file=sys.stderr)
    if args.csv is not None:
        made.to_csv(args.csv)
    if args.plot is not None and made.metrics:
        made.plot(args.plot)
    report = {"program": f"{program.PROGRAM} sweep", "version": _core.version(), "table": made.table()}
    program.write_json(args.json, report | {"faults": [{"revision": f.revision, "what": f.what} for f in made.faults]})
    return program.CHECK_FAILED if made.faults else program.OK


def _metrics(
    args: argparse.Namespace, names: Sequence[str]
) -> tuple[dict[str, Metric], dict[str, Any], Callable[[Revision], object]]:
    """The functions of --metric; what their results depend on; and what comes after each revision."""
    metrics: dict[str, Metric] = {}
    settings: dict[str, Any] = {"activation": args.activation, "device": args.device}
    if args.per_token is not None and "surprisal" not in args.metric:
        raise ValueError("--per-token: expected with --metric surprisal")
    if "perplexity" in args.metric or "surprisal" in args.metric:
        ids = _ids(args, names[0])
        per_token = _PerToken(args.per_token, names, ids)
        settings |= {"ids": _sha256(ids), "context": args.context, "stride": args.stride}
    if "memorization" in args.metric:
        if args.sequences is None:
            raise ValueError("--metric memorization: expected --sequences FILE")
        sequences = check_rows("--sequences", map_rows(args.sequences, args.row, args.dtype))
        settings |= {"sequences": _sha256(sequences[:, :_LENGTH])}
    for name in args.metric:
        if name == "perplexity":
            metrics[name] = lambda model: _perplexity(model, ids, args.context, args.stride)
        elif name == "surprisal":
            metrics[name] = lambda model: per_token.measure(model, args.context, args.stride)
        elif name == "memorization":
            metrics[name] = lambda model: _memorization(model, sequences, args.slots)
        else:
            metrics[name.rpartition(":")[2]] = _task(name) if name.startswith(_LM_EVAL) else _function(name)

    def then(row: Revision) -> None:
        values = "  ".join(f"{name} {value:.6g}" for name, value in row.metrics.items())
        times = f"{row.load_s:.1f} s to read, {row.run_s:.1f} s to run"
        print(f"{row.name}: {row.error or values} ({times})", file=sys.stderr)
        if "surprisal" in args.metric:
            per_token.write(row.name)

    return metrics, settings, then


class _PerToken:
    """The surprisal of each token of the revision that was measured last; without a folder it is not written."""

    def __init__(self, folder: str | None, names: Sequence[str], ids: NDArray[Any]) -> None:
        self._folder, self._ids = folder, ids
        self._nats: NDArray[np.float64] | None = None
        if folder is None:
            return
        files = [self._file(name) for name in names]
        if len(set(files)) < len(files):
            raise ValueError("--per-token: expected folders of different names")
        os.makedirs(folder, exist_ok=True)

    def measure(self, model: Model, context: int, stride: int | None) -> dict[str, float]:
        self._nats = surprisal(model, self._ids, context, stride)
        return {"mean": float(np.nanmean(self._nats)), "std": float(np.nanstd(self._nats))}

    def write(self, revision: str) -> None:
        """Writes what measure() has made since, as position, id and nats."""
        if self._nats is None or self._folder is None:
            return
        lines = [f"{place},{id},{nats:.9g}\n" for place, (id, nats) in enumerate(zip(self._ids, self._nats))]
        write_text(os.path.join(self._folder, self._file(revision)), "".join(["position,id,surprisal_nats\n", *lines]))
        self._nats = None

    @staticmethod
    def _file(revision: str) -> str:
        return os.path.basename(revision.rstrip("/")) + ".csv"


def _perplexity(model: Model, ids: NDArray[Any], context: int, stride: int | None) -> dict[str, float]:
    score = model.perplexity(ids, context, stride)
    return {"": score.perplexity, "error": score.error}


def _memorization(model: Model, sequences: NDArray[Any], slots: int) -> dict[str, float]:
    made = memorize(model, sequences, slots=min(slots, len(sequences)))
    return {"accuracy": float(made.equal.mean()) / made.continuation, "exact": float(made.exact.mean())}


def _ids(args: argparse.Namespace, first: str) -> NDArray[Any]:
    if args.tokens is not None:
        return map_ids(args.tokens)[: args.limit]
    if args.text is None:
        raise ValueError("--metric: expected --text FILE or --tokens FILE for perplexity and surprisal")
    directory = first if args.model is None else find_model(args.model, first)
    return np.array(encode(open_tokenizer(directory), program.read_text(args.text), "text"))[: args.limit]


def _task(name: str) -> Metric:
    """The task of lm_eval:TASK."""
    import cf_ops.lm_eval  # asks for more than the other metrics

    if name == _LM_EVAL:
        raise ValueError("--metric lm_eval: expected a task behind the colon such as lm_eval:lambada_openai")
    return cf_ops.lm_eval.task(name.removeprefix(_LM_EVAL))


def _function(name: str) -> Metric:
    """The function of FILE.py:FUNCTION."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"--metric: expected {', '.join(_METRICS)}, lm_eval:TASK or FILE.py:FUNCTION, got {name!r}")
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    if not os.path.isfile(path) or spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path}: no such file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, function, None)
    if not callable(made):
        raise ValueError(f"--metric {name}: expected a function of this name in the file")
    metric: Metric = made
    return metric


def _sha256(ids: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(ids.astype("<i8")).tobytes()).hexdigest()
