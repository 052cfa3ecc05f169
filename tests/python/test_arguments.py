"""What new users hand over: taken, or refused in one plain line; names of the hub; presets; progress; threads."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import pty
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cf_ops
from cf_ops import _core
from cf_ops._progress import Progress

SIGNATURES = ("::", "std.", "Invoked with", "incompatible function", "nanobind", "arg:", "->", "_core.")


def plain_line(error: BaseException) -> str:
    """An error's message, which is one line without words of C++."""
    message = str(error)
    assert message and "\n" not in message
    assert not any(word in message for word in SIGNATURES), message
    return message


Model = Any
load: Any = cf_ops.load  # takes what its types refuse

REFUSED: list[tuple[Callable[[Model], object], type[Exception], str]] = [
    (lambda m: m.generate(b"abc"), TypeError, "prompt: expected a text or ids, got bytes"),
    (lambda m: m.generate(bytearray(b"abc")), TypeError, "prompt: expected a text or ids, got bytearray"),
    (lambda m: m.generate(None), TypeError, "prompt: expected a text or ids, got NoneType"),
    (lambda m: m.generate(7), TypeError, "prompt: expected a text or ids, got int"),
    (lambda m: m.generate({1, 2}), TypeError, "prompt: expected a text or ids, got set"),
    (lambda m: m.generate(np.array(7)), TypeError, "prompt: expected a text or ids, got one int"),
    (lambda m: m.generate({"input_ids": [1]}), TypeError, "got dict, whose 'input_ids' are ids"),
    (lambda m: m.generate(["a", "b"]), TypeError, "a list of texts; generate_batch() takes several prompts"),
    (lambda m: m.generate([[1, 2], [3, 4]]), ValueError, "got 2 rows; generate_batch() takes several prompts"),
    (lambda m: m.generate(np.ones((2, 3), int)), ValueError, "expected ids in one row, got 2 rows"),
    (lambda m: m.generate([1.5]), TypeError, "prompt[0]: expected an integer, got 1.5"),
    (lambda m: m.generate([1, None]), TypeError, "prompt[1]: expected an integer, got None"),
    (lambda m: m.generate([True]), TypeError, "prompt[0]: expected an integer, got True"),
    (lambda m: m.generate([1], temperature="x"), TypeError, "temperature: expected a number, got 'x'"),
    (lambda m: m.generate([1], temperature=None), TypeError, "temperature: expected a number, got None"),
    (lambda m: m.generate([1], top_p=[0.5]), TypeError, "top_p: expected a number, got [0.5]"),
    (lambda m: m.generate([1], min_p=1j), TypeError, "min_p: expected a number, got 1j"),
    (lambda m: m.generate([1], repetition_penalty=b"1"), TypeError, "repetition_penalty: expected a number, got b'1'"),
    (lambda m: m.generate([1], top_k=1.5), TypeError, "top_k: expected an integer, got 1.5"),
    (lambda m: m.generate([1], top_k="all"), TypeError, "top_k: expected an integer, got 'all'"),
    (lambda m: m.generate([1], seed="x" * 99), TypeError, "seed: expected an integer, got str"),
    (lambda m: m.generate([1], max_new_tokens=None), TypeError, "max_new_tokens: expected an integer, got None"),
    (lambda m: m.generate([1], stop=["x"]), ValueError, "stop: expected ids, which end a prompt of ids, got 'x'"),
    (lambda m: m.generate([1], stop=[b"x"]), TypeError, "stop: expected ids and texts, got bytes"),
    (lambda m: m.generate([1], stop=b"x"), TypeError, "stop: expected ids and texts, got bytes"),
    (lambda m: m.generate([1], stop=[1.5]), TypeError, "stop: expected an integer, got 1.5"),
    (lambda m: m.generate([1], stop=[2**70]), ValueError, "stop"),
    (lambda m: m.generate([2**70]), ValueError, "prompt"),
    (lambda m: m.generate_batch("abc"), TypeError, "prompts: expected a list of prompts, got one str"),
    (lambda m: m.generate_batch(b"abc"), TypeError, "prompts: expected a list of prompts, got one bytes"),
    (lambda m: m.generate_batch(3), TypeError, "prompts: expected a list of prompts, got one int"),
    (lambda m: m.generate_batch([1, 2]), TypeError, "prompt 0: expected a text or ids, got int"),
    (lambda m: m.generate_batch([[1], b"x"]), TypeError, "prompt 1: expected a text or ids, got bytes"),
    (lambda m: m.generate_batch([[1]], slots="2"), TypeError, "slots: expected an integer, got '2'"),
    (lambda m: m.generate_batch([[1]], slots=1025), ValueError, "slots: expected 1 to 1024, got 1025"),
    (lambda m: m.run(b"abc"), TypeError, "ids: expected a text or ids, got bytes"),
    (lambda m: m.run([1], rows="x"), TypeError, "rows: expected an integer, got 'x'"),
    (lambda m: m.run([1], rows=2**70), ValueError, "rows: expected 0 to 1"),
    (lambda m: m.run([1], taps=[3]), TypeError, "taps: expected a text, got int"),
    (lambda m: m.run([1], taps="logit"), ValueError, "tap 'logit' is unknown"),
    (lambda m: m.run([]), ValueError, "ids"),
    (lambda m: m.logits([[1], [2]]), ValueError, "ids: expected ids in one row, got 2 rows"),
    (lambda m: m.perplexity(b"abc"), TypeError, "ids: expected a text or ids, got bytes"),
    (lambda m: m.perplexity([1, 2, 3], context="x"), TypeError, "context: expected an integer, got 'x'"),
    (lambda m: m.perplexity([1, 2, 3], stride=1.5), TypeError, "stride: expected an integer, got 1.5"),
    (lambda m: load(""), ValueError, "path_or_preset: expected a path or a name, got ''"),
    (lambda m: load(None), TypeError, "path_or_preset: expected a path or a name, got NoneType"),
    (lambda m: load("a\0b"), ValueError, "path_or_preset: expected a path or a name, got 'a\\x00b'"),
    (lambda m: load("a\nb"), FileNotFoundError, "'a\\nb': no such directory"),
    (lambda m: load("owner/name", revision=3), TypeError, "revision: expected a text, got int"),
    (lambda m: load("\udcff"), ValueError, "path_or_preset: expected a path that UTF-8 can hold"),
    (lambda m: load(m.directory, threads="2"), TypeError, "threads: expected an integer, got '2'"),
    (lambda m: load(m.directory, threads=0), ValueError, "threads: expected 1 to 1024, got 0"),
    (lambda m: load(m.directory, activation=32), ValueError, "activation: expected float32 or float64"),
    (lambda m: load(m.directory, device=0), ValueError, "device: expected 'cpu', 'cuda' or 'cuda:N'"),
    (lambda m: load(m.directory, impl=3), TypeError, "impl: expected a text, got int"),
    (lambda m: load(m.directory, dtype="float16"), ValueError, "dtype: expected it with a preset alone"),
    (lambda m: load("pythia-14m", dtype="int4"), ValueError, "dtype: expected float16, bfloat16 or float32"),
    (lambda m: load("pythia-14m", dtype=int), ValueError, "dtype: expected float16, bfloat16 or float32"),
    (lambda m: load("pythia-14m", dtype=7), ValueError, "dtype: expected float16, bfloat16 or float32"),
    (lambda m: load(m.directory, revision="main"), ValueError, "revision: expected it with a name of the hub"),
    (lambda m: load("pythia-14m", revision="main"), ValueError, "revision: expected it with a name of the hub"),
]


@pytest.mark.parametrize("call, kind, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_what_is_refused_is_one_plain_line(
    checkpoints: pathlib.Path, call: Callable[[Model], object], kind: type[Exception], message: str
) -> None:
    model = cf_ops.load(checkpoints / "neox-d80")
    with pytest.raises(kind) as caught:
        call(model)
    assert message in plain_line(caught.value)


def test_ids_come_in_the_forms_that_users_have(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80")
    expected = list(model.generate([1, 2, 3], max_new_tokens=5, stop=()))
    forms: list[Any] = [(1, 2, 3), range(1, 4), np.array([1, 2, 3], np.uint8), np.array([[1, 2, 3]]), [[1, 2, 3]]]
    forms += [[np.int64(1), np.int32(2), 3], np.array([3, 2, 1])[::-1], iter([1, 2, 3])]
    try:
        import torch

        forms += [torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]]), list(torch.tensor([1, 2, 3]))]
    except ImportError:
        pass
    for form in forms:
        assert list(model.generate(form, max_new_tokens=5, stop=())) == expected
    assert [r.ids for r in model.generate_batch(np.array([[1, 2, 3]] * 2), max_new_tokens=5, stop=())] == [expected] * 2
    assert np.array_equal(model.logits(np.array([[1, 2, 3]])), model.logits([1, 2, 3]))
    nested: Any = [[1, 2, 3]]
    assert model.perplexity(nested) == model.perplexity(np.array([1, 2, 3])) == model.perplexity((1, 2, 3))
    numbers: dict[str, Any] = {"max_new_tokens": np.int32(5), "temperature": np.float32(0)}
    assert list(model.generate([1, 2, 3], **numbers, stop=())) == expected
    assert list(model.run([1, 2], taps="logits")[1]) == ["logits"]


def test_a_text_is_scored_where_ids_are(text_checkpoint: str) -> None:
    model = cf_ops.load(text_checkpoint)
    ids = model.encode("the fox é")
    assert np.array_equal(model.logits("the fox é"), model.logits(ids))
    assert model.perplexity("the fox é") == model.perplexity(ids)


# --- presets and names of the hub -------------------------------------------------------------------------------------


def test_a_preset_says_that_its_weights_are_procedural(
    checkpoints: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = "pythia-14m: procedural weights, made of random numbers and not trained"
    with caplog.at_level(logging.WARNING):
        model = cf_ops.load("pythia-14m")
    assert [(r.name, r.getMessage()) for r in caplog.records] == [("cf_ops", f"cf_ops: {note}")]
    assert model.notes == [note]
    assert repr(model) == "cf_ops.Model('pythia-14m', procedural weights, activation='float32')"
    done = subprocess.run(
        [sys.executable, "-c", "import cf_ops; cf_ops.load('pythia-14m')"], capture_output=True, text=True, check=True
    )
    assert done.stderr == f"cf_ops: {note}\n" and done.stdout == ""
    words = ["generate", "--model", "pythia-14m", "--prompt-ids", "1", "--max-new-tokens", "1"]
    done = subprocess.run([sys.executable, "-m", "cf_ops", *words], capture_output=True, text=True, check=True)
    assert done.stderr.count("procedural weights") == 1
    stored = cf_ops.load(checkpoints / "neox-d80")
    assert "procedural" not in repr(stored) and not stored.weights.procedural


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), "torch.float32"], ids=str)
def test_a_presets_dtype_is_a_name_or_a_dtype(dtype: Any) -> None:
    assert cf_ops.load("pythia-14m", dtype=dtype).weights.dtype == "float32"


def test_a_presets_dtype_may_be_torchs() -> None:
    torch = pytest.importorskip("torch")
    assert cf_ops.load("pythia-14m", dtype=torch.bfloat16).weights.dtype == "bfloat16"


def test_a_name_of_the_hub_says_how_it_is_downloaded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        cf_ops.load("EleutherAI/pythia-70m")
    line = plain_line(caught.value)
    assert "hf download EleutherAI/pythia-70m --local-dir DIR" in line and "revision='main'" in line
    with pytest.raises(FileNotFoundError) as caught:
        cf_ops.load("./some/missing/folder")
    assert "hf download" not in plain_line(caught.value)
    # What is there is no name of the hub.
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        cf_ops.load("owner/name")


def test_a_revision_downloads_what_a_model_needs(
    checkpoints: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        if options["revision"] == "gone":
            raise RuntimeError("404\n\nRevision Not Found")
        return str(checkpoints / "neox-d80")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    model = cf_ops.load("owner/name", revision="step3000")
    assert model.directory == str(checkpoints / "neox-d80")
    assert calls == [("owner/name", {"revision": "step3000", "allow_patterns": ["*.json", "*.safetensors", "*.jinja"]})]
    with pytest.raises(OSError) as failed:
        cf_ops.load("owner/name", revision="gone")
    assert plain_line(failed.value) == "owner/name: the download failed: 404 Revision Not Found"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError) as missing:
        cf_ops.load("owner/name", revision="main")
    assert "pip install huggingface_hub" in plain_line(missing.value)


def test_the_hubs_own_package_without_a_network(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A revision of its cache is read; one that is missing there is one line that says so."""
    pytest.importorskip("huggingface_hub")
    cache = tmp_path / "hub" / "models--owner--name"
    (cache / "refs").mkdir(parents=True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    (cache / "refs" / "step3000").write_text(commit)
    shutil.copytree(checkpoints / "neox-d80", cache / "snapshots" / commit)
    command = [sys.executable, "-m", "cf_ops", "generate", "--model", "owner/name", "--prompt-ids", "1,2"]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def generate(revision: str) -> subprocess.CompletedProcess[str]:
        words = [*command, "--revision", revision, "--max-new-tokens", "3"]
        return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    found = generate("step3000")
    expected = list(cf_ops.load(checkpoints / "neox-d80").generate([1, 2], max_new_tokens=3))
    assert (found.returncode, found.stdout) == (0, ",".join(map(str, expected)) + "\n"), found.stderr
    missing = generate("step4000")
    assert missing.returncode == 2 and missing.stdout == ""
    assert missing.stderr.count("\n") == 1 and "owner/name: the download failed: " in missing.stderr


# --- progress ---------------------------------------------------------------------------------------------------------


def _read_terminal(shown: int) -> str:
    """All that was written to a pseudo-terminal whose other end is closed: the kernel passes it on in parts."""
    parts = []
    with contextlib.suppress(OSError):  # EIO: the end
        while part := os.read(shown, 10_000):
            parts.append(part)
    os.close(shown)
    return b"".join(parts).decode()


def test_progress_is_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, terminal = pty.openpty()
    monkeypatch.setattr("cf_ops._progress._AFTER_S", 0.0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Progress("scoring") as progress:
            for done in (0, 1, 1, 2):
                progress.set(done, 4)
    text = _read_terminal(shown)
    lines = text.split("\r\x1b[K")
    assert lines[1:] == [f"scoring [{bar:.<30}] {n:3d}%" for bar, n in (("", 0), ("#" * 7, 25), ("#" * 15, 50))] + [""]
    for no_terminal in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", no_terminal)
        with Progress("scoring") as progress:
            progress.set(1, 2)
        assert no_terminal is None or no_terminal.getvalue() == ""


def test_progress_is_a_bar_of_tqdm_where_it_is_installed_and_shown_or_not_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cf_ops._progress._AFTER_S", 0.0)
    bars: list[Any] = []

    class Bar:
        n = 0

        def __init__(self, **options: Any) -> None:
            self.options, self.steps, self.is_open = options, [], True
            bars.append(self)

        def refresh(self) -> None:
            self.steps.append(self.n)

        def close(self) -> None:
            self.is_open = False

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    for shown, expected in ((True, [0, 25, 50]), (False, None), (None, None)):  # stderr is no terminal here
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with Progress("scoring", shown) as progress:
            for done in (0, 1, 1, 2):
                progress.set(done, 4)
        steps = [bar.steps for bar in bars]
        assert steps == ([] if expected is None else [expected])
        assert all(bar.options["desc"] == "scoring" and not bar.is_open for bar in bars)
        bars.clear()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with Progress("scoring", True) as progress:
        progress.set(1, 2)
    assert "scoring [" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_long_work_tells_its_progress(checkpoints: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    class Told(Progress):
        def set(self, done: int, total: int) -> None:
            told.setdefault(self._label, []).append((done, total))

    monkeypatch.setattr("cf_ops.model.Progress", Told)
    monkeypatch.setattr("cf_ops._score.Progress", Told)
    cf_ops.load("pythia-14m")
    model = cf_ops.load(checkpoints / "neox-d80")
    model.generate_batch([[1, 2], [3], [4]], max_new_tokens=6, stop=(), slots=2)
    model.perplexity(list(range(100)), context=10)
    model.score([list(range(9 + i)) for i in range(6)])
    of_weights = {"making the weights of pythia-14m", "reading neox-d80"}
    assert set(told) == of_weights | {"continuing 3 prompts", "scoring", "scoring 6 prompts"}
    for steps in told.values():
        done, totals = [d for d, _ in steps], {t for _, t in steps}
        assert len(steps) >= 6 and done == sorted(done) and totals == {done[-1]}


def test_what_progress_raises_ends_the_making_of_weights() -> None:
    def interrupted(made: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.Weights.preset("pythia-14m", progress=interrupted)


# --- threads and the interpreter's end --------------------------------------------------------------------------------


def run_python(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=inherited | environment,
    )


@pytest.mark.parametrize(
    "work",
    [
        "list(model.generate([1, 2, 3], max_new_tokens=900, stop=()))",
        "[list(model.generate([1, 2, 3], max_new_tokens=2, stop=())) for _ in range(10**6)]",
        "model.logits([1] * 900)",
        "[cf_ops.load('pythia-14m') for _ in range(100)]",
        "[cf_ops.ops.layernorm(*arrays) for _ in range(10**6)]",
    ],
)
def test_a_daemon_thread_lets_the_interpreter_end(checkpoints: pathlib.Path, work: str) -> None:
    code = f"""
import logging, sys, threading, time, cf_ops, numpy
logging.disable()
model = cf_ops.load(sys.argv[1])
arrays = numpy.ones((64, 96), numpy.float32), numpy.ones(96, numpy.float32), numpy.zeros(96, numpy.float32)
for _ in range(3):
    threading.Thread(target=lambda: {work}, daemon=True).start()
time.sleep(0.2)
"""
    done = run_python(code, str(checkpoints / "neox-d80"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_end_may_still_generate(checkpoints: pathlib.Path) -> None:
    """What runs behind the package's own end of the interpreter."""
    code = """
import atexit, sys
atexit.register(lambda: print(len(list(model.generate([1, 2, 3], max_new_tokens=5, stop=())))))
import cf_ops
model = cf_ops.load(sys.argv[1])
keeps = [model, model.weights]
"""
    done = run_python(code, str(checkpoints / "neox-d80"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


def test_objects_that_outlive_the_interpreter_are_no_news(checkpoints: pathlib.Path) -> None:
    code = """
import sys, cf_ops
class Model:
    made = []
model = cf_ops.load(sys.argv[1])
model.itself = model, model.weights, model.generate([1])
Model.made.append(model)
sys.modules["kept"] = Model
sys.last_value = model
"""
    done = run_python(code, str(checkpoints / "neox-d80"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("prompt", [[1, 2, 3], "the fox"], ids=["ids", "text"])
def test_threads_that_pull_one_generation_share_its_pieces(text_checkpoint: str, prompt: Any) -> None:
    model = cf_ops.load(text_checkpoint)
    expected = list(model.generate(prompt, max_new_tokens=300, stop=()))
    generation = model.generate(prompt, max_new_tokens=300, stop=())
    pulled: list[list[Any]] = [[], [], []]
    faults: list[str] = []

    def pull(mine: list[Any]) -> None:
        try:
            mine.extend(generation)
        except BaseException as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=pull, args=(mine,)) for mine in pulled]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert sorted(sum(pulled, []), key=str) == sorted(expected, key=str)
    assert generation.result.finish == "length"


def test_a_generation_that_another_thread_closes_ends(checkpoints: pathlib.Path) -> None:
    generation = cf_ops.load(checkpoints / "neox-d80").generate([1, 2, 3], max_new_tokens=20_000, stop=())
    next(generation)
    thread = threading.Thread(target=lambda: list(generation))
    thread.start()
    generation.close()
    thread.join(timeout=60)
    assert not thread.is_alive() and generation.finish == "interrupted"


@pytest.mark.parametrize(
    "said, expected",
    [
        ({}, (None, "1000")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        ({"GOMP_SPINCOUNT": "77"}, (None, "77")),
    ],
    ids=["nothing", "a policy", "a number of spins"],
)
def test_threads_spin_shortly_unless_the_environment_says_how_they_wait(
    said: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    code = "import cf_ops, os; print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"
    done = run_python(code, OMP_DISPLAY_ENV="VERBOSE", **said)
    assert done.returncode == 0
    shown = {
        line.split("=")[0].strip(): line.split("'")[1]
        for line in done.stderr.splitlines()
        if "='" in line.replace(" ", "")
    }
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("OpenMP is not GCC's")
    policy, spins = expected
    assert policy in (None, shown["OMP_WAIT_POLICY"]) and spins in (None, shown["GOMP_SPINCOUNT"])
    # Children and packages that are imported later see nothing of it.
    assert done.stdout.split() == [str(said.get(name)) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")]


def test_opening_a_checkpoint_tells_how_far_it_has_come(checkpoints: pathlib.Path) -> None:
    told: list[tuple[int, int]] = []
    weights = _core.Weights.open(str(checkpoints / "neox-d80"), progress=lambda done, all: told.append((done, all)))
    assert told == sorted(told) and len(told) > 10
    assert {all for _, all in told} == {weights.bytes} and told[-1][0] == weights.bytes

    def fails(done: int, all: int) -> None:
        raise ZeroDivisionError("a callback's own mistake")

    with pytest.raises(ZeroDivisionError, match="own mistake"):
        _core.Weights.open(str(checkpoints / "neox-d80"), progress=fails)
