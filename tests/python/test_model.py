"""Whole models: golden files, decoding, text, perplexity, refusals, lifetimes."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import weakref
from typing import Any

import made_gptq
import numpy as np
import pytest
from conftest import ROOT, read_safetensors

import cf_ops
import gptq  # in golden/tools, as families is
from cf_ops import _core
from cf_ops._text import TextStream
from families import NAMES, join

GOLDENS = sorted(p for p in (ROOT / "data" / "golden_model").glob("*.h5") if not p.name.startswith("pythia-"))
ORACLE_BOUND = 1e-10  # relative L2 against Hugging Face's float64: what the C++ tests hold the oracle to


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def relative_l2(ours: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(ours - reference) / np.linalg.norm(reference))


def datasets(group: Any) -> dict[str, np.ndarray[Any, Any]]:
    import h5py

    found: dict[str, np.ndarray[Any, Any]] = {}
    group.visititems(lambda name, item: found.update({name: item[:]}) if isinstance(item, h5py.Dataset) else None)
    return found


class Golden:
    """A golden file of a whole model."""

    def __init__(self, path: pathlib.Path) -> None:
        h5py = pytest.importorskip("h5py", reason="h5py reads golden files")
        with h5py.File(path, "r") as file:
            self.directory = str(path.parent / text_of(file.attrs["weights_checkpoint"]))
            self.ids = file["ids"][:]
            self.prompt = self.ids[: int(file.attrs["prompt_len"])]
            self.tables = [file[f"inputs/{name}"][:] for name in ("cos", "sin") if name in file["inputs"]]
            self.taps = datasets(file["taps/float64"]) if "taps" in file else {}
            logits = file["logits/float64"]
            self.top = logits["ids"][:] if isinstance(logits, h5py.Group) else None
            self.logits = logits["values"][:] if isinstance(logits, h5py.Group) else logits[:]

    def of(self, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The logits that the file has."""
        return logits if self.top is None else np.take_along_axis(logits, self.top, 1)


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_logits_taps_and_greedy_ids_are_hugging_faces(path: pathlib.Path) -> None:
    golden = Golden(path)
    fed = len(golden.ids) - 1
    weights = _core.Weights.open(golden.directory)
    # Chunks that divide nothing: a tap is put together from several passes.
    runner = _core.Runner(weights, capacity=fed, chunk=7, activation="float64")
    if golden.tables:
        runner.set_rope_table(*golden.tables)
    logits, taps = runner.run(0, 0, golden.ids[:-1], fed, list(golden.taps))
    assert logits.dtype == np.float64 and logits.shape == (fed, weights.config["vocab_size"])
    assert relative_l2(golden.of(logits), golden.logits) <= ORACLE_BOUND
    for name, reference in golden.taps.items():
        assert taps[name].shape == reference.shape
        assert relative_l2(taps[name], reference) <= ORACLE_BOUND, name
    if golden.tables:  # The check can fail: a table that is a millionth off shows.
        cos, sin = golden.tables
        runner.set_rope_table(cos, sin * np.float32(1 + 1e-6))
        changed = runner.forward(0, 0, golden.ids[:-1], fed)
        assert relative_l2(golden.of(changed), golden.logits) > ORACLE_BOUND

    model = cf_ops.load(golden.directory, activation="float64")
    new = len(golden.ids) - len(golden.prompt)
    assert list(model.generate(golden.prompt, max_new_tokens=new, stop=())) == golden.ids[len(golden.prompt) :].tolist()


def test_run_gives_the_last_rows_and_any_tap(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", activation="float64")
    heads, head_dim = 2, 80
    ids = list(range(5, 16))
    names = ["layers.1.attention.rotary_emb.k", "final_layer_norm", "layers.0.output", "logits", "embed_in"]
    logits, taps = model.run(ids, taps=names, rows=3)
    assert logits.shape == (3, 128)
    assert list(taps) == names
    assert taps["layers.1.attention.rotary_emb.k"].shape == (11, heads, head_dim)
    assert taps["final_layer_norm"].shape == (3, 160)
    assert taps["layers.0.output"].shape == (11, 160)
    assert np.array_equal(taps["logits"], logits)
    assert np.array_equal(model.logits(ids)[-3:], logits)
    assert model.run(ids, rows=0)[0].shape == (0, 128)
    embedding = read_safetensors(checkpoints / "neox-d80" / "model.safetensors")["gpt_neox.embed_in.weight"][0]
    assert np.array_equal(taps["embed_in"], embedding[ids].astype(np.float64))
    with pytest.raises(
        ValueError, match=r"tap 'layers.7.output' is unknown; there are embed_in, layers.N.input_.*N from 0 to 1$"
    ):
        model.run(ids, taps=["layers.7.output"])
    with pytest.raises(ValueError, match="rows: expected 0 to 11"):
        model.run(ids, rows=12)


def test_float32_is_near_the_oracle(checkpoints: pathlib.Path) -> None:
    fast = cf_ops.load(checkpoints / "neox-d128").logits(range(1, 40))
    oracle = cf_ops.load(checkpoints / "neox-d128", activation="float64").logits(list(range(1, 40)))
    assert fast.dtype == np.float32
    # 9 sites of each layer, embedding, norm and head round once each; a product of n terms errs by 4 sqrt(n) roundoffs.
    sites, terms = 9 * 1 + 3, 4 * 256
    assert relative_l2(fast, oracle) <= sites * 4 * np.sqrt(terms) * 2.0**-24


# --- decoding ---------------------------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3], [4, 5], [100, 7, 7, 7, 9], [64]]
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 11}


def ids_of_cf_model(program: str, directory: str, arguments: dict[str, Any], slots: int, path: pathlib.Path) -> Any:
    words = [
        program,
        "generate",
        "--model",
        directory,
        "--max-new-tokens",
        "24",
        "--stop",
        "none",
        "--slots",
        str(slots),
    ]
    words += ["--prompt-ids", ";".join(",".join(map(str, p)) for p in PROMPTS), "--json", str(path)]
    for name, value in arguments.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    subprocess.run(words, check=True, capture_output=True)
    return [sequence["ids"] for sequence in json.loads(path.read_text())["sequences"]]


@pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("slots", [1, 3, 4])
@pytest.mark.parametrize("name", ["neox-d80", "neox-gptq-asym"])
def test_ids_are_those_of_cf_model(
    cf_model: str, checkpoints: pathlib.Path, tmp_path: pathlib.Path, name: str, slots: int, arguments: dict[str, Any]
) -> None:
    directory = str(checkpoints / name)
    expected = ids_of_cf_model(cf_model, directory, arguments, slots, tmp_path / "out.json")
    model = cf_ops.load(directory)
    results = model.generate_batch(PROMPTS, max_new_tokens=24, stop=(), slots=slots, **arguments)
    assert [result.ids for result in results] == expected
    assert [result.finish for result in results] == ["length"] * len(PROMPTS)


def test_draws_depend_on_the_seed_and_the_place(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80")
    first = model.generate_batch([[1, 2, 3]] * 3, temperature=1.0, seed=5, stop=(), max_new_tokens=20)
    again = model.generate_batch([[1, 2, 3]] * 3, temperature=1.0, seed=5, stop=(), max_new_tokens=20)
    other = model.generate_batch([[1, 2, 3]] * 3, temperature=1.0, seed=6, stop=(), max_new_tokens=20)
    assert [r.ids for r in first] == [r.ids for r in again]
    assert all(a.ids != b.ids for a, b in zip(first, other))
    assert first[0].ids != first[1].ids != first[2].ids
    assert list(model.generate([1, 2, 3], temperature=1.0, seed=5, stop=(), max_new_tokens=20)) == first[0].ids


def constant_arrays(logits: np.ndarray[Any, Any], hidden: int = 8) -> tuple[str, dict[str, np.ndarray[Any, Any]]]:
    """The config and tensors of a model that makes these logits whatever it is given: the last norm's gain is 0 and its
    bias a unit vector."""
    vocab = len(logits)
    config = {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": hidden,
        "vocab_size": vocab,
        "rotary_pct": 0.25,
    }
    layer = "gpt_neox.layers.0."
    norms = ["gpt_neox.final_layer_norm", layer + "input_layernorm", layer + "post_attention_layernorm"]
    linears = dict.fromkeys(["attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"], hidden)
    linears["attention.query_key_value"] = 3 * hidden
    arrays = {name: np.zeros((vocab, hidden), np.float32) for name in ("gpt_neox.embed_in.weight", "embed_out.weight")}
    for norm in norms:
        arrays |= {norm + ".weight": np.zeros(hidden, np.float32), norm + ".bias": np.zeros(hidden, np.float32)}
    for name, out in linears.items():
        arrays[layer + name + ".weight"] = np.zeros((out, hidden), np.float32)
        arrays[layer + name + ".bias"] = np.zeros(out, np.float32)
    arrays["gpt_neox.final_layer_norm.bias"][0] = 1
    arrays["embed_out.weight"][:, 0] = logits
    return json.dumps(config), arrays


def weights_of(config: str, arrays: dict[str, np.ndarray[Any, Any]]) -> _core.Weights:
    return _core.Weights.from_tensors(config, described(arrays, "float32"), arrays)


def constant_model(logits: np.ndarray[Any, Any]) -> _core.Weights:
    return weights_of(*constant_arrays(logits))


def described(arrays: dict[str, Any], dtype: str) -> dict[str, tuple[int, str, tuple[int, ...]]]:
    return {name: (array.ctypes.data, dtype, array.shape) for name, array in arrays.items()}


CASES = json.loads((ROOT / "data" / "sampling_cases.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_sampled_ids_are_those_that_hugging_face_keeps(case: dict[str, Any]) -> None:
    import procedural  # in golden/tools, where the cases' logits are defined

    values = procedural.values("float32", (case["vocabulary"],), "activation", case["seed"], "logits")
    logits = (values.astype(np.float64) * case["scale"] + np.arange(case["vocabulary"]) * 2.0**-20).astype(np.float32)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    decoder = _core.Decoder(constant_model(logits), capacity=len(case["history"]))
    draws = 2000
    counts = dict.fromkeys(case["ids"], 0)
    for number in range(draws):
        sequence = decoder.add(
            case["history"], max_new_tokens=1, seed=3, id=number, **{name: case[name] for name in names}
        )
        ((_, id),) = decoder.prefill()
        counts[id] += 1  # an id that is not kept is a KeyError
        decoder.drop(sequence)
    # The number of draws of an id is binomial. It lies more than six standard deviations from its mean with a
    # probability below 1e-8. The 1 is for ids whose mean is so small that one draw is more than that.
    for id, p in zip(case["ids"], case["probabilities"]):
        assert abs(counts[id] - draws * p) <= 6 * np.sqrt(draws * p * (1 - p)) + 1


def test_stop_ids_end_a_sequence(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80")
    free = list(model.generate([1, 2, 3], max_new_tokens=20, stop=()))
    last = free[6]
    expected = free[: free.index(last) + 1]
    generation = model.generate([1, 2, 3], max_new_tokens=20, stop=[last])
    assert list(generation) == expected
    assert generation.finish == "stop" and generation.ids == expected and generation.text is None
    assert model.eos_token_ids == [0]


def test_a_sequence_that_fails_says_so() -> None:
    config, arrays = constant_arrays(np.full(16, np.finfo(np.float32).max, np.float32))
    model = cf_ops.Model(weights_of(config, arrays), "", "float32", [])
    assert list(model.generate([1], max_new_tokens=2)) == [0, 0]
    arrays["gpt_neox.final_layer_norm.bias"][0] = 2  # weights stay finite, logits do not
    model = cf_ops.Model(weights_of(config, arrays), "", "float32", [])
    (result,) = model.generate_batch([[1]], max_new_tokens=2)
    assert result.finish == "failed" and result.ids == [] and "inf" in str(result.error)
    generation = model.generate([1], max_new_tokens=2)
    with pytest.raises(cf_ops.CfError, match="inf"):
        next(generation)
    assert generation.finish == "failed" and list(generation) == []


# --- text -------------------------------------------------------------------------------------------------------------


def test_streamed_text_is_the_decoded_text(text_checkpoint: str) -> None:
    model = cf_ops.load(text_checkpoint)
    seen = ""
    for seed in range(20):
        generation = model.generate("the fox é", max_new_tokens=60, temperature=8.0, seed=seed, stop=())
        pieces = list(generation)
        assert all(pieces)
        assert "".join(pieces) == model.tokenizer.decode(generation.ids) == generation.text
        seen += "".join(pieces)
    assert "\ufffd" in seen and "the" in seen  # bytes that form no character, and merged tokens
    ids = model.encode("the fox é")
    assert (
        list(model.generate(ids, max_new_tokens=9, stop=()))
        == model.generate_batch(["the fox é"], max_new_tokens=9, stop=())[0].ids
    )


def test_characters_come_whole_and_special_tokens_do_not(text_checkpoint: str) -> None:
    model = cf_ops.load(text_checkpoint)
    text = "the €, 漢 and 😀ß."
    ids = model.encode(text)
    assert len(ids) > len(text)  # characters of several ids
    stream = TextStream(model.tokenizer)
    pieces = [stream.put(id) for id in ids]
    assert stream.finish() == ""
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert {"€", "漢", "😀"} <= set(pieces)
    # Random ids: bytes in any order, special tokens between them.
    generator = np.random.default_rng(0)
    for length in (1, 2, 3, 50, 200):
        for _ in range(20):
            ids = generator.integers(0, 128, length).tolist()
            stream = TextStream(model.tokenizer)
            made = "".join(map(stream.put, ids)) + stream.finish()
            assert made == model.tokenizer.decode(ids)


def test_text_needs_a_tokenizer(checkpoints: pathlib.Path, text_checkpoint: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json: no such file"):
        cf_ops.load(checkpoints / "neox-tied").generate("text")
    with pytest.raises(ValueError, match="prompt: expected text that UTF-8 can hold"):
        cf_ops.load(text_checkpoint).generate("\udcff")
    directory = tmp_path / "broken"
    shutil.copytree(text_checkpoint, directory)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json"):
        cf_ops.load(directory).generate("text")


# --- perplexity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context, stride", [(2048, None), (16, 16), (16, 4), (16, 1), (2, 1), (40, 39), (39, 20)])
def test_perplexity_is_that_of_plain_numpy(checkpoints: pathlib.Path, context: int, stride: int | None) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", activation="float64")
    ids = np.random.default_rng(1).integers(0, 128, 40)
    # The loop of transformers' page on perplexity (docs/source/en/perplexity.md): a window scores only the ids that the
    # window before it has not scored.
    nll: list[float] = []
    previous_end = 0
    for begin in range(0, len(ids), stride or context):
        end = min(begin + context, len(ids))
        logits = model.logits(ids[begin:end])
        targets = end - previous_end
        for position in range(begin + 1, end):
            if position >= end - targets:
                row = logits[position - begin - 1]
                nll.append(float(np.log(np.exp(row).sum()) - row[ids[position]]))
        previous_end = end
        if end == len(ids):
            break
    score = model.perplexity(ids, context, stride)
    assert score.positions == len(nll)
    assert score.nll == pytest.approx(np.mean(nll), rel=1e-12)
    assert score.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-12)
    error = np.std(nll, ddof=1) / np.sqrt(len(nll))
    assert score.nll_error == pytest.approx(error, rel=1e-9)
    assert score.error == pytest.approx(error * score.perplexity, rel=1e-9)


def test_perplexity_refuses(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80")
    for arguments, message in [
        (([1],), "at least 2"),
        (([[1, 2], [3, 4]],), "ids: expected ids in one row, got 2 rows$"),
        ((np.ones((2, 2), int),), "one dimension"),
        (([1, 128],), "0 to 127"),
        (([1, -1],), "0 to 127"),
        ((np.array([1.5, 2.5]),), "float64"),
        (([1, 2], 1), "context"),
        (([1, 2], 4, 5), "stride: expected 1 to 4"),
        (([1, 2], 4, 0), "stride"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.perplexity(*arguments)  # type: ignore[arg-type]


# --- weights in memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["neox-bf16", "neox-tied", "neox-gptq-desc-act", "neox-gptq-mixed"])
def test_tensors_in_memory_make_the_same_model(checkpoints: pathlib.Path, name: str) -> None:
    directory = checkpoints / name
    tensors = read_safetensors(directory / "model.safetensors")
    addresses = {key: (array.ctypes.data, dtype, array.shape) for key, (array, dtype) in tensors.items()}
    before = {key: array.copy() for key, (array, _) in tensors.items()}
    quantised = directory / "quantize_config.json"
    weights = _core.Weights.from_tensors(
        (directory / "config.json").read_text(),
        addresses,
        tensors,
        gptq=quantised.read_text() if quantised.exists() else None,
    )
    mapped = _core.Weights.open(str(directory))
    assert weights.dtype == mapped.dtype and weights.bytes == mapped.bytes
    ids = list(range(3, 20))
    made = _core.Runner(weights, capacity=32).forward(0, 0, ids, len(ids))
    assert np.array_equal(made, _core.Runner(mapped, capacity=32).forward(0, 0, ids, len(ids)))
    # A file's pages may be dropped when the weights die; memory must stay as it was.
    del weights
    gc.collect()
    assert all(np.array_equal(array, before[key]) for key, (array, _) in tensors.items())


@pytest.mark.parametrize(
    "name",
    ["neox-gptq-asym", "llama-gptq-desc-act", "stdlib-4m-gptq", "stdlib-llama-2m-gptq", *made_gptq.RECIPES],
)
def test_a_quantised_model_makes_the_logits_of_its_dequantised_weights(name: str) -> None:
    directory = made_gptq.checkpoint(name)
    config = json.loads((directory / "config.json").read_text())
    names = NAMES[config["model_type"]]
    form = gptq.Format(config.pop("quantization_config"), name, names.linears, names.transposed)
    stored = read_safetensors(directory / "model.safetensors")
    dense = join(names, form.dense({key: array for key, (array, _) in stored.items()}))
    arrays = {key: np.ascontiguousarray(array, np.float32) for key, array in dense.items()}
    ids, logits = list(range(3, 60)), []
    for weights in (
        _core.Weights.open(str(directory)),
        _core.Weights.from_tensors(json.dumps(config), described(arrays, "float32"), arrays),
    ):
        logits.append(_core.Runner(weights, capacity=64, activation="float64").forward(0, 0, ids, len(ids)))
    assert relative_l2(*logits) <= 1e-12


def test_memory_lives_as_long_as_what_reads_it() -> None:
    class Owner(dict):  # type: ignore[type-arg]
        pass

    config, arrays = constant_arrays(np.arange(1 << 12, dtype=np.float32))
    owner = Owner(arrays)
    alive = weakref.ref(owner)
    runner = _core.Runner(_core.Weights.from_tensors(config, described(arrays, "float32"), owner), capacity=4)
    del owner, arrays
    gc.collect()
    assert alive() is not None
    assert np.array_equal(runner.forward(0, 0, [1], 1)[0], np.arange(1 << 12, dtype=np.float32))
    del runner
    gc.collect()
    assert alive() is None


def test_tensors_in_memory_are_checked() -> None:
    config, arrays = constant_arrays(np.zeros(16, np.float32))
    good = described(arrays, "float32")
    name = "gpt_neox.layers.0.attention.dense.weight"

    def refused(message: str, **changes: Any) -> None:
        tensors = good | changes
        with pytest.raises(ValueError, match=message):
            _core.Weights.from_tensors(
                config, {key: value for key, value in tensors.items() if value is not None}, arrays
            )

    address = good[name][0]
    refused(f"tensor '{name}' is missing", **{name: None})
    refused("tensor 'lm_head.weight': expected names", **{"lm_head.weight": (address, "float32", (8, 8))})
    refused(rf"tensor '{name}': expected shape \(8, 8\), got \(8, 4\)", **{name: (address, "float32", (8, 4))})
    refused(f"tensor '{name}': expected dtype float32 as", **{name: (address, "float16", (8, 8))})
    refused(f"tensor '{name}': expected dtype F16, BF16 or F32, got float64", **{name: (address, "float64", (8, 8))})
    refused(f"tensor '{name}': expected the address", **{name: (0, "float32", (8, 8))})
    refused(f"tensor '{name}': expected fewer", **{name: (address, "float32", (2**40, 2**40))})
    refused(f"tensor '{name}': expected fewer", **{name: (address, "float32", (-8, 8))})
    with pytest.raises(ValueError, match="config"):
        _core.Weights.from_tensors("{", good, arrays)
    with pytest.raises(ValueError, match="bits"):
        _core.Weights.from_tensors(config, good, arrays, gptq="{}")
    arrays[name][3, 5] = np.nan
    refused(rf"tensor '{name}': element \(3, 5\): expected a finite number, got NaN")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_checkpoints_that_are_none_are_refused(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        cf_ops.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        cf_ops.load(tmp_path)
    with pytest.raises(ValueError, match="activation: expected float32 or float64, got 'float16'"):
        cf_ops.load(checkpoints / "neox-d80", activation="float16")

    directory = tmp_path / "truncated"
    shutil.copytree(checkpoints / "neox-d64-sharded", directory)
    shard = directory / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors: truncated"):
        cf_ops.load(directory)

    directory = tmp_path / "nan"
    shutil.copytree(checkpoints / "neox-d80", directory)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2:] = b"\x00\x7e"  # float16's NaN
    path.write_bytes(data)
    with pytest.raises(ValueError, match="expected a finite number, got NaN"):
        cf_ops.load(directory)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"prompt": []}, "prompt: expected at least one id"),
        ({"prompt": [1, 128]}, r"prompt\[1\]: expected an id of 0 to 127, got 128"),
        ({"prompt": [-1]}, "got -1"),
        ({"prompt": [2**40]}, "0 to 127"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2**40}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.5}, "top_p must be 1, without effect at temperature 0"),
        ({"temperature": 1, "top_p": 1.5}, "top_p"),
        ({"temperature": 1, "top_k": -1}, "top_k"),
        ({"temperature": 1, "min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"stop": [128]}, "stop"),
    ],
)
def test_generate_refuses(checkpoints: pathlib.Path, arguments: dict[str, Any], message: str) -> None:
    model = cf_ops.load(checkpoints / "neox-d80")
    with pytest.raises(ValueError, match=message):
        model.generate(**({"prompt": [1]} | arguments))
    # Of several prompts a bad one is refused before the first is read.
    prompt = arguments.get("prompt", [1])
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[1], prompt], slots=1, **{k: v for k, v in arguments.items() if k != "prompt"})


def test_the_compiled_objects_refuse(checkpoints: pathlib.Path) -> None:
    weights = _core.Weights.open(str(checkpoints / "neox-d80"))
    runner = _core.Runner(weights, slots=2, capacity=8)
    other = _core.Runner(weights, capacity=8)
    other.prefill(0, 0, [1, 2])
    decoder = _core.Decoder(weights, slots=1, capacity=8)
    running = decoder.add([1, 2])
    calls: list[tuple[str, Any]] = [
        ("slot: expected 0 to 1, got 2", lambda: runner.prefill(2, 0, [1])),
        ("slot: expected 0 to 1, got -1", lambda: runner.forward(-1, 0, [1], 1)),
        ("expected at least one id", lambda: runner.prefill(0, 0, [])),
        ("first position of 0 to 0", lambda: runner.prefill(0, 1, [1])),
        ("at most 8 entries", lambda: runner.prefill(0, 0, [1] * 9)),
        (r"ids\[1\]: expected an id of 0 to 127, got 128", lambda: runner.prefill(0, 0, [1, 128])),
        ("integers", lambda: runner.prefill(0, 0, [1.0])),
        ("integers", lambda: runner.prefill(0, 0, np.array([1], np.uint64))),
        ("one dimension", lambda: runner.prefill(0, 0, [[1]])),
        ("rows: expected 0 to 1", lambda: runner.forward(0, 0, [1], 2)),
        ("rows", lambda: runner.forward(0, 0, [1], -1)),
        ("slot: expected 0 to 1, got 7", lambda: runner.step([(7, 1, 0)])),
        ("expected an id", lambda: runner.step([(0, 128, 0)])),
        ("first position", lambda: runner.step([(0, 1, 3)])),
        ("one run a step, got two", lambda: runner.step([(1, 1, 0), (1, 2, 0)])),
        ("expected a prefill", lambda: runner.logits(0)),
        ("slot", lambda: runner.logits(9)),
        ("slot 1: expected a prefill", lambda: runner.choose([(1, 0, 0)])),
        ("slot: expected 0 to 1, got 2", lambda: runner.choose([(2, 0, 0)])),
        ("choice for position 2, its length, got 3", lambda: other.choose([(0, 3, 0)])),
        ("slot 0: left: expected at least 0, got -1", lambda: other.choose([(0, 2, -1)])),
        ("slot", lambda: runner.length(-1)),
        ("slot", lambda: runner.release(2)),
        ("RoPE table", lambda: runner.set_rope_table(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32))),
        ("slots must be 1", lambda: _core.Runner(weights, slots=0)),
        ("capacity must be 1", lambda: _core.Runner(weights, capacity=0)),
        ("chunk must be 1", lambda: _core.Decoder(weights, chunk=-1)),
        ("activation", lambda: _core.Decoder(weights, activation="bfloat16")),
        ("activation", lambda: _core.Decoder(weights, activation="double")),
        ("at most 8 ids, the cache's capacity, got 9", lambda: decoder.add([1] * 9)),
        ("sequence 5 is unknown", lambda: decoder.drop(5)),
        ("sequence 5 is unknown", lambda: decoder.ids(5)),
        ("sequence 5 is unknown", lambda: decoder.finish(5)),
        ("sequence 5 is unknown", lambda: decoder.status(5)),
        ("sequence 5 is unknown", lambda: decoder.logits(5)),
        ("has no logits", lambda: decoder.logits(running)),
        ("steps: expected at least 1", lambda: decoder.decode(0)),
        ("threads: expected 1 to 1024, got 0", lambda: _core.set_num_threads(0)),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    # Nothing was changed, and both still work.
    assert runner.length(0) == runner.length(1) == 0
    assert decoder.prefill() == [(running, decoder.ids(running)[0])]
    assert decoder.logits(running).argmax() == decoder.ids(running)[0]
    # The capacity ends a sequence that had no limit of its own.
    while decoder.active:
        decoder.decode(4)
    assert decoder.finish(running) == "failed"
    assert "capacity of 8 entries is reached after 7 new tokens" in str(decoder.status(running))
    decoder.drop(running)
    assert decoder.free_slots == 1
    with pytest.raises(MemoryError, match="need .* GB for the cache"):
        _core.Runner(weights, slots=1 << 20, capacity=1 << 30)
    with pytest.raises(MemoryError):
        cf_ops.load(checkpoints / "neox-d80").generate([1], max_new_tokens=2**31 - 1)


def test_steps_make_the_logits_of_a_prefill(checkpoints: pathlib.Path) -> None:
    runner = _core.Runner(_core.Weights.open(str(checkpoints / "neox-d80")), slots=2, capacity=8, activation="float64")
    whole = runner.forward(0, 0, [9, 8, 7, 6], 4)
    runner.prefill(1, 0, np.array([9, 8], np.int16))
    assert relative_l2(runner.logits(1), whole[1]) <= ORACLE_BOUND
    runner.step([(1, 7, 2)])
    runner.step([(1, 6, 3)])
    assert runner.length(1) == 4
    assert relative_l2(runner.logits(1), whole[3]) <= ORACLE_BOUND
    runner.release(1)
    assert runner.length(1) == 0


@pytest.mark.parametrize("name", ["neox-d80", "neox-gptq-asym"])
def test_a_runners_choices_are_those_of_a_decoder(checkpoints: pathlib.Path, name: str) -> None:
    """Sequences of different lengths; one ends before the others, and its slot is left out."""
    weights = _core.Weights.open(str(checkpoints / name))
    prompts, new = [[1, 2, 3], [9], [8, 7, 6, 5, 4]], [12, 5, 9]
    decoder = _core.Decoder(weights, slots=3, capacity=20)
    numbers = [decoder.add(prompt, max_new_tokens=count) for prompt, count in zip(prompts, new)]
    while decoder.active:
        decoder.decode()
    runner = _core.Runner(weights, slots=3, capacity=20)
    for slot, prompt in enumerate(prompts):
        runner.prefill(slot, 0, prompt)
    made: list[list[int]] = [[], [], []]
    running = [0, 1, 2]
    while running:
        draws = [(s, len(prompts[s]) + len(made[s]), new[s] - len(made[s]) - 1) for s in running]
        chosen = runner.choose(draws, [])
        assert chosen == [int(runner.logits(slot).argmax()) for slot in running]
        for slot, id in zip(running, chosen):
            made[slot].append(id)
        for slot in [slot for slot in running if len(made[slot]) == new[slot]]:
            runner.release(slot)
            running.remove(slot)
        runner.step([(slot, made[slot][-1], len(prompts[slot]) + len(made[slot]) - 1) for slot in running])
    assert made == [decoder.ids(number) for number in numbers]
    assert runner.choose([]) == []


def test_equal_logits_have_the_lowest_id_and_no_number_has_none() -> None:
    config, arrays = constant_arrays(np.full(16, np.finfo(np.float32).max, np.float32))
    runner = _core.Runner(weights_of(config, arrays), capacity=4)
    runner.prefill(0, 0, [1])
    assert runner.choose([(0, 1, 0)]) == [0]
    arrays["gpt_neox.final_layer_norm.bias"][0] = 2  # weights stay finite, logits do not
    runner = _core.Runner(weights_of(config, arrays), capacity=4)
    runner.prefill(0, 0, [1])
    with pytest.raises(ValueError, match="inf"):
        runner.choose([(0, 1, 0)])


# --- interrupts, threads, lifetimes -----------------------------------------------------------------------------------


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def interrupt_at_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Sends Ctrl-C at the end of step `number` of the sessions to come."""
    step, steps = cf_ops.model.Session.step, 0

    def interrupted_step(session: cf_ops.model.Session) -> list[int]:
        nonlocal steps
        made = step(session)
        steps += 1
        if steps == number:
            os.kill(os.getpid(), signal.SIGINT)
        return made

    monkeypatch.setattr(cf_ops.model.Session, "step", interrupted_step)


LONG = 20_000  # steps, of which each takes 50 us at the least: longer than the time to the signal


def test_an_interrupt_leaves_what_was_made(checkpoints: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cf_ops.load(checkpoints / "neox-tied")
    expected = list(model.generate([1, 2, 3], max_new_tokens=50, stop=()))
    interrupt_at_step(monkeypatch, 50)
    generation = model.generate([1, 2, 3], max_new_tokens=LONG, stop=())
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert generation.ids == expected
    monkeypatch.undo()
    interrupt_at_step(monkeypatch, 50)
    with pytest.raises(cf_ops.GenerationInterrupted) as caught:
        model.generate_batch([[1, 2, 3], [4]], max_new_tokens=LONG, stop=(), slots=1)
    first, waiting = caught.value.results
    assert first.ids == expected and first.finish == "interrupted"
    assert waiting.ids == [] and waiting.finish == "interrupted"
    monkeypatch.undo()
    assert list(model.generate([1, 2, 3], max_new_tokens=50, stop=())) == expected


def test_an_interrupt_ends_a_long_prompt(checkpoints: pathlib.Path) -> None:
    weights = _core.Weights.open(str(checkpoints / "neox-d80"))
    tokens = 20_000
    runner = _core.Runner(weights, capacity=tokens, chunk=64)
    timer = interrupt_after(0.3)
    with pytest.raises(KeyboardInterrupt):
        runner.prefill(0, 0, np.ones(tokens, np.int32))
    timer.join()
    assert 0 < runner.length(0) < tokens  # it came between two sites, not at the end
    runner.prefill(0, 0, [1, 2, 3])
    assert runner.length(0) == 3


def test_a_signals_handler_may_not_use_what_it_interrupts(checkpoints: pathlib.Path) -> None:
    runner = _core.Runner(_core.Weights.open(str(checkpoints / "neox-d80")), capacity=LONG, chunk=64)
    before = signal.signal(signal.SIGINT, lambda *_: print(runner.length(0)))
    try:
        timer = interrupt_after(0.2)
        with pytest.raises(cf_ops.CfError, match="a signal's handler used the object"):
            runner.prefill(0, 0, np.ones(LONG, np.int32))
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert 0 < runner.length(0) < LONG


def test_a_generation_outlives_its_model(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoints / "neox-d80", directory)
    model = cf_ops.load(directory)
    expected = list(model.generate([1, 2, 3], max_new_tokens=20, stop=()))
    generation = model.generate([1, 2, 3], max_new_tokens=20, stop=())
    made = [next(generation)]
    del model
    shutil.rmtree(directory)
    gc.collect()
    made += list(generation)
    assert made == expected


def test_threads_do_not_disturb_each_other(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80")
    shared = _core.Decoder(model.weights, slots=8, capacity=64)
    expected = {n: list(model.generate([n, 1], max_new_tokens=40, stop=())) for n in range(8)}
    faults: list[str] = []

    def work(n: int) -> None:
        try:
            for _ in range(5):
                if list(model.generate([n, 1], max_new_tokens=40, stop=())) != expected[n]:
                    faults.append(f"prompt {n}: other ids")
            sequence = shared.add([n, 1], max_new_tokens=40)
            while shared.finish(sequence) == "running":
                shared.decode(1)  # steps the sequences of all threads
            if shared.ids(sequence) != expected[n]:
                faults.append(f"prompt {n}: other ids of the shared decoder")
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_the_number_of_threads_changes_no_bit(checkpoints: pathlib.Path) -> None:
    before = _core.num_threads()
    model = cf_ops.load(checkpoints / "neox-d80", threads=1)
    assert _core.num_threads() == 1
    try:
        one = model.logits(list(range(30)))
        _core.set_num_threads(3)
        assert np.array_equal(model.logits(list(range(30))), one)
    finally:
        _core.set_num_threads(before)


def resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_a_thousand_cycles_leave_no_memory(checkpoints: pathlib.Path) -> None:
    directory = checkpoints / "neox-tied"

    def cycle() -> None:
        model = cf_ops.load(directory)
        generation = model.generate([1, 2, 3], max_new_tokens=64, stop=())
        next(generation)  # and is left in the middle
        model.run([1, 2], taps=["layers.0.output"])
        with pytest.raises(ValueError):
            model.generate([])

    for _ in range(100):
        cycle()
    sizes = []
    for _ in range(3):
        gc.collect()
        sizes.append(resident_bytes())
        for _ in range(500):
            cycle()
    # The smallest thing that a cycle takes from the library is a row of logits: 512 bytes of float32, and an array of
    # about 100. Leaked in each cycle it would be 300 kB in each part; caches (32 kB) or weights (200 kB) would be 16 MB
    # or more. The allocator may take pages for its own lists, but not in each part.
    assert min(np.diff(sizes)) < 500 * 600
