"""The command line: ``python -m cf_ops``."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

import cf_ops
from cf_ops import _core, cli
from cf_ops.cli import info

COMMAND = [sys.executable, "-m", "cf_ops"]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, check=False, timeout=300)


def ok(*words: object) -> str:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture(scope="session")
def model(checkpoints: pathlib.Path) -> str:
    return str(checkpoints / "neox-d80")


# --- without a command ------------------------------------------------------------------------------------------------


def test_it_says_what_is_installed() -> None:
    facts = dict(info.facts())
    assert facts["cf_ops"] == cf_ops.__version__
    assert facts["numpy"] == np.__version__
    assert facts["python"].count(".") == 2
    if not _core.has_cuda():
        assert facts["backend cuda"] == "not in this build"
    elif cf_ops.cuda_available():
        assert re.search(r"compute capability \d+\.\d, .* GB free; driver for CUDA \d+\.\d", facts["backend cuda"])
        assert facts["cublaslt"]
    else:
        assert re.search(r"^built with CUDA \d+\.\d; ", facts["backend cuda"])
    assert re.search(r"float32 with \w+, \d+ threads", facts["backend cpu"])
    output = ok()
    for name, value in facts.items():
        constant = value.partition(",")[0]  # a GPU's free memory changes, and tests set the number of threads
        assert re.search(rf"^{name} +{re.escape(constant)}", output, re.M)
    assert ok("--version") == f"cf_ops {cf_ops.__version__}\n"


class Row(NamedTuple):
    op: str
    relative_l2: float
    ok: bool


def test_a_check_that_fails_is_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(*rows: Row) -> int:
        monkeypatch.setitem(sys.modules, "cf_ops.selfcheck", types.SimpleNamespace(rows=lambda: rows))
        return cli.main([])

    assert checked(Row("a", 1e-8, True), Row("b", 2e-8, True)) == 0
    assert checked(Row("a", 1e-8, True), Row("b", 0.5, False)) == 1
    output = capsys.readouterr().out
    assert re.search(r"^\| b +\| +5.00e-01 \| FAIL \|$", output, re.M)
    monkeypatch.setitem(sys.modules, "cf_ops.selfcheck", None)
    assert cli.main([]) == 0
    assert re.search("^self-check +missing: ", capsys.readouterr().out, re.M)


# --- generate ---------------------------------------------------------------------------------------------------------


def test_ids_stream_as_they_are_made(model: str, tmp_path: pathlib.Path) -> None:
    expected = list(cf_ops.load(model).generate([1, 2, 3], max_new_tokens=12, stop=()))
    report = tmp_path / "out.json"
    words = ["generate", "--model", model, "--prompt-ids", "1,2,3", "--max-new-tokens", 12, "--stop", "none"]
    done = run(*words, "--json", report)
    assert done.returncode == 0
    assert done.stdout == ",".join(map(str, expected)) + "\n"
    assert re.fullmatch(
        r"1 prompts, 12 new tokens in [\d.]+ s: first token after [\d.]+ ms on average, then [\d.]+ ms a token, "
        r"[\d.]+ tokens/s\n",
        done.stderr,
    )
    content = json.loads(report.read_text())
    (sequence,) = content["sequences"]
    assert sequence["prompt"] == [1, 2, 3] and sequence["ids"] == expected and sequence["finish"] == "length"
    assert 0 < sequence["first_token_s"] <= sequence["total_s"] <= content["total_s"] and content["load_s"] > 0
    assert content["program"] == "cf_ops generate" and content["version"] == cf_ops.__version__
    assert content["command"].startswith("python -m cf_ops generate --model ")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # no temporary file is left


SAMPLED = "--temperature 0.8 --top-k 20 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.2 --seed 7".split()


@pytest.mark.parametrize("slots", [[], ["--slots", "1"], ["--slots", "2"]], ids=["all", "1", "2"])
@pytest.mark.parametrize("sampling", [[], SAMPLED], ids=["greedy", "sampled"])
def test_several_prompts_are_those_of_cf_model(
    cf_model: str, model: str, tmp_path: pathlib.Path, sampling: list[str], slots: list[str]
) -> None:
    words = ["generate", "--model", model, "--prompt-ids", "1,2,3;4,5;9", "--max-new-tokens", "15", *sampling, *slots]
    theirs = tmp_path / "theirs.json"
    printed = subprocess.run([cf_model, *words, "--json", str(theirs)], check=True, capture_output=True, text=True)
    ours = tmp_path / "ours.json"
    assert sorted(ok(*words, "--json", ours).splitlines()) == sorted(printed.stdout.splitlines())
    for a, b in zip(json.loads(ours.read_text())["sequences"], json.loads(theirs.read_text())["sequences"]):
        assert {key: a[key] for key in ("prompt", "ids", "finish")} == {
            key: b[key] for key in ("prompt", "ids", "finish")
        }


def test_text_comes_in_and_goes_out(text_checkpoint: str, tmp_path: pathlib.Path) -> None:
    model = cf_ops.load(text_checkpoint)
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": 8.0, "seed": 4}
    words = ["--max-new-tokens", 30, "--temperature", 8, "--seed", 4]
    expected = "".join(model.generate("the é", **settings))
    done = subprocess.run(
        [*COMMAND, "generate", "--model", text_checkpoint, "--prompt", "the é", *map(str, words)],
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    assert done.stdout.decode() == expected + "\n"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the é\n\nfox\n", encoding="utf-8")
    report = tmp_path / "out.json"
    ok("generate", "--model", text_checkpoint, "--prompts-file", prompts, *words, "--json", report)
    made = [sequence["text"] for sequence in json.loads(report.read_text())["sequences"]]
    assert made == [result.text for result in model.generate_batch(["the é", "fox"], **settings)]
    assert made[0] == expected


def test_a_stop_text_ends_the_text(text_checkpoint: str) -> None:
    words = ["generate", "--model", text_checkpoint, "--prompt", "the é", "--max-new-tokens", 60, "--temperature", 8]
    whole = ok(*words, "--stop", "none").removesuffix("\n")
    plain = [whole[i : i + 2] for i in range(4, len(whole)) if "\ufffd" not in whole[i : i + 2]]
    stop = plain[len(plain) // 2]
    assert (
        ok(*words, "--stop", "none", "--stop-text", "never there", "--stop-text", stop)
        == whole.partition(stop)[0] + "\n"
    )
    model = cf_ops.load(text_checkpoint)
    ended = "".join(
        model.generate("the é", max_new_tokens=60, temperature=8, stop=[stop])
    )  # or with the checkpoint's id
    assert ok(*words, "--stop-text", stop) == ended + "\n"


def test_an_interrupt_ends_the_stream_cleanly(model: str, tmp_path: pathlib.Path) -> None:
    report = tmp_path / "out.json"
    words = ["generate", "--model", model, "--prompt-ids", "1,2", "--max-new-tokens", "20000", "--stop", "none"]
    with subprocess.Popen(
        [*COMMAND, *words, "--json", str(report)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        begin = process.stdout.read(20)  # it has begun
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    note, summary = errors.splitlines()
    assert note.startswith("cf_ops: positions beyond max_position_embeddings 512 are used") and "new tokens" in summary
    (sequence,) = json.loads(report.read_text())["sequences"]
    assert sequence["finish"] == "interrupted" and 0 < len(sequence["ids"]) < 20000
    printed = begin + output
    assert printed.endswith("\n")
    # An id that was made while the signal came may be in the report alone.
    assert (",".join(map(str, sequence["ids"])) + "\n").startswith(printed[:-1])


def test_a_closed_pipe_is_one_line(model: str) -> None:
    words = ["generate", "--model", model, "--prompt-ids", "1,2", "--max-new-tokens", "5000", "--stop", "none"]
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 2
    assert errors.splitlines()[1:] == ["cf_ops: standard output: cannot be written"]  # behind a note


def test_a_checkpoints_notes_are_a_line_of_each_kind(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "noted"
    shutil.copytree(checkpoints / "neox-gptq-sym", directory)
    config = json.loads((directory / "quantize_config.json").read_text())
    (directory / "quantize_config.json").write_text(json.dumps(config | {"checkpoint_format": "gptq_v2"}))
    notes = cf_ops.load(directory).notes
    done = run("generate", "--model", directory, "--prompt-ids", "1", "--max-new-tokens", 2)
    assert done.returncode == 0 and len(notes) > 2
    expected = [f"cf_ops: note: {notes[0]}", f"cf_ops: note: {notes[1]} (and {len(notes) - 2} more like it)"]
    assert done.stderr.splitlines()[:2] == expected


# --- eval -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [[], ["--stride", "8"]], ids=["whole", "stride"])
def test_perplexity_is_that_of_cf_model(cf_model: str, model: str, tmp_path: pathlib.Path, stride: list[str]) -> None:
    tokens = tmp_path / "ids.npy"
    np.save(tokens, np.random.default_rng(2).integers(0, 128, 100))
    words = ["eval", "--model", model, "--tokens", str(tokens), "--context", "32", "--activation", "float64", *stride]
    theirs, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    subprocess.run([cf_model, *words, "--json", str(theirs)], check=True, capture_output=True)
    output = ok(*words, "--json", ours)
    expected = json.loads(theirs.read_text())["figures"]["float64"]
    made = json.loads(ours.read_text())
    assert made["positions"] == expected["positions"]
    for key, value in [("perplexity", "perplexity"), ("nll", "nll")]:
        assert made[key] == pytest.approx(expected[value]["mean"], rel=1e-12)
    assert made["error"] == pytest.approx(expected["perplexity"]["error"], rel=1e-9)
    assert f"{made['perplexity']:.6g} +- {made['error']:.2g}" in output


@pytest.mark.parametrize(
    "content, message",
    [
        (b"PK\x03\x04", "expected a .npy file of ids: "),
        (
            b"\x93NUMPY\x01\x00\xa1\x0f{'descr': '<i4', 'fortran_order': False, 'shape': " + b"(" * 3950,
            "expected a .npy",
        ),
        (b"", "expected a .npy file of ids: "),
        (_npy(np.zeros(3)), "expected at least 2 integers, got 3 of float64"),
        (_npy(np.zeros(1, np.int32)), "expected at least 2 integers, got 1 of int32"),
        (_npy(np.array([1, 128])), "expected ids of 0 to 127, got 1 to 128"),
        (_npy(np.zeros((2, 2), np.int32)), "expected ids in one row, got (2, 2)"),
        (_npy(np.array([{}])), "expected a .npy file of ids: "),
    ],
    ids=["zip", "deep", "empty", "float", "one", "large", "rows", "objects"],
)
def test_a_bad_token_file_is_one_line(model: str, tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    file = tmp_path / "ids.npy"
    file.write_bytes(content)
    done = run("eval", "--model", model, "--tokens", file)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"cf_ops: {file}: {message}")


def test_no_more_ids_are_read_than_the_limit(model: str, tmp_path: pathlib.Path) -> None:
    # 3 GB, as a hole that takes no room on the disk. An id beyond the limit may be any.
    file = tmp_path / "ids.npy"
    ids = np.lib.format.open_memmap(file, mode="w+", dtype="<u2", shape=(1_500_000_000,))
    ids[16] = 40_000
    del ids
    ok("eval", "--model", model, "--tokens", file, "--limit", 16, "--context", 8, "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["ids"] == 16


def test_texts_that_are_not_utf_8_name_their_file(model: str, text_checkpoint: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"ab\xff")
    for words in (
        ["eval", "--model", text_checkpoint, "--text", file],
        ["generate", "--model", text_checkpoint, "--prompts-file", file],
    ):
        done = run(*words)
        assert done.returncode == 2 and done.stderr == f"cf_ops: {file}: expected UTF-8, got the byte 0xff\n"


def test_a_text_is_scored(text_checkpoint: str, tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the fox, the é and the €.\n" * 4, encoding="utf-8")
    report = tmp_path / "out.json"
    ok("eval", "--model", text_checkpoint, "--text", text, "--context", 16, "--stride", 4, "--json", report)
    model = cf_ops.load(text_checkpoint)
    score = model.perplexity(model.encode(text.read_text(encoding="utf-8")), 16, 4)
    assert json.loads(report.read_text())["perplexity"] == score.perplexity


# --- bench ------------------------------------------------------------------------------------------------------------


def test_bench_times_every_configuration(model: str, tmp_path: pathlib.Path) -> None:
    report = tmp_path / "out.json"
    words = ["--prompt-len", "16,32", "--new-tokens", "1,6", "--slots", "1,3", "--runs", 2, "--json", report]
    words += ["--score-len", "40,150"]
    start = time.perf_counter()
    output = ok("bench", "--model", model, *words)
    most_ms = 1e3 * (time.perf_counter() - start)
    assert len([line for line in output.splitlines() if line.startswith("| ")]) == 2 + 8 + 2 + 2
    assert json.loads(report.read_text())["capacity"] == 150
    results = json.loads(report.read_text())["results"]
    assert [(r["slots"], r["prompt_len"], r["new_tokens"]) for r in results] == [
        (slots, prompt, new) for slots in (1, 3) for prompt in (16, 32) for new in (1, 6)
    ]
    for r in results:
        assert 0 < r["ttft_ms"] <= r["total_ms"] < most_ms
        assert r["tokens_per_s"] == pytest.approx(1e3 * r["new_tokens"] * r["slots"] / r["total_ms"])
        steps = r["new_tokens"] - 1
        assert r["tpot_ms"] * steps == pytest.approx(r["total_ms"] - r["ttft_ms"], abs=1e-9)
        assert r["inter_token_p50_ms"] <= r["inter_token_p90_ms"] <= r["inter_token_p99_ms"]
        assert (r["inter_token_p50_ms"] > 0) == (steps > 0)
    scores = json.loads(report.read_text())["scores"]
    assert [s["prompt_len"] for s in scores] == [40, 150]
    for s in scores:
        assert s["share"] == pytest.approx(s["score_ids_per_s"] / s["prefill_ids_per_s"]) and s["share"] > 0


# --- bad usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["bogus"], "bogus"),
        (["--bogus"], "--bogus"),
        (["generate"], "--model"),
        (["generate", "--model", "X"], "--prompt"),
        (["generate", "--model", "/nowhere", "--prompt-ids", "1"], "/nowhere: no such directory"),
        (["generate", "--model", "no/where", "--prompt-ids", "1"], "hf download no/where --local-dir DIR"),
        (["generate", "--model", "MODEL", "--revision", "x", "--prompt-ids", "1"], "revision: expected it with a name"),
        (["generate", "--model", "MODEL", "--stop-text", "x", "--prompt-ids", "1"], "stop: expected ids, which end"),
        (["generate", "--model", "X", "--prompt-ids", "1,x"], "--prompt-ids: expected an integer"),
        (["generate", "--model", "X", "--prompt-ids", "1", "--prompt", "x"], "not allowed with"),
        (["generate", "--model", "X", "--prompt-ids", "1", "--max-new-tokens", "0"], "--max-new-tokens: expected"),
        (["generate", "--model", "X", "--prompt-ids", "1", "--seed", "-1"], "--seed: expected"),
        (["generate", "--model", "X", "--prompt-ids", "1", "--threads", "0"], "--threads: expected"),
        (["generate", "--model", "X", "--prompt-ids", "1", "--json", "/nowhere/x"], "--json: expected a file"),
        (["generate", "--model", "X", "--prompts-file", "/nowhere"], "/nowhere: No such file"),
        (["generate", "--model", "MODEL", "--prompt-ids", "128"], "prompt[0]: expected an id of 0 to 127, got 128"),
        (["generate", "--model", "MODEL", "--prompt-ids", "1", "--top-p", "0.5"], "without effect at temperature 0"),
        (["generate", "--model", "MODEL", "--prompt", "x"], "tokenizer.json: no such file"),
        (["eval", "--model", "MODEL"], "--text"),
        (["eval", "--model", "MODEL", "--tokens", "/nowhere.npy"], "/nowhere.npy: No such file"),
        (["eval", "--model", "MODEL", "--tokens", "MODEL/config.json"], "expected a .npy file"),
        (["eval", "--model", "MODEL", "--tokens", "X", "--context", "4", "--stride", "5"], "at most --context 4"),
        (["bench", "--model", "MODEL", "--slots", "1,65"], "--slots: expected an integer of 1 to 64, got '65'"),
        (["bench", "--model", "MODEL", "--prompt-len", ""], "--prompt-len: expected"),
        (["bench", "--model", "MODEL", "--score-len", "1"], "--score-len: expected an integer of 2 to 524288, got '1'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_one_line(model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main([word.replace("MODEL", model) for word in words])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.startswith("cf_ops: ") and output.err.count("\n") == 1
    assert message in output.err


def test_bad_usage_is_the_exit_code_2(model: str) -> None:
    done = run("generate", "--model", model)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_a_sequence_that_fails_is_the_exit_code_2(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    # Finite weights whose logits are infinite: bfloat16's largest number in the last norm and in the head.
    directory = tmp_path / "broken"
    shutil.copytree(checkpoints / "neox-bf16", directory)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name in ("gpt_neox.final_layer_norm.bias", "embed_out.weight"):
        begin, end = (8 + length + offset for offset in header[name]["data_offsets"])
        data[begin:end] = b"\x7f" * (end - begin)
    path.write_bytes(data)
    report = tmp_path / "out.json"
    done = run("generate", "--model", directory, "--prompt-ids", "1;2", "--json", report)
    assert done.returncode == 2
    assert re.search("^cf_ops: prompt 1: .*inf", done.stderr, re.M)
    for sequence in json.loads(report.read_text())["sequences"]:
        assert sequence["finish"] == "failed" and sequence["ids"] == [] and "inf" in sequence["fault"]
