"""Whole models on a GPU. What needs no GPU, such as refusals, runs everywhere."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from cuda_models import CHECKPOINTS, Oracle, check_greedy, gpu
from test_model import LONG, constant_arrays, described, interrupt_after, interrupt_at_step

import cf_ops
from cf_ops import _core, _device

IMPLS = ["unfused", "graph", "split", "layer", "persistent"]
PROMPTS = [[1, 2, 3], [4, 5], [100, 7, 7, 7, 9], [64], [30, 31, 32, 33, 34, 35]]
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 11}
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def python(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text], env=NO_GPU | environment, capture_output=True, text=True, timeout=300, check=False
    )


# --- without a GPU ----------------------------------------------------------------------------------------------------


def test_devices_by_name() -> None:
    assert _device.cuda_index("cpu") is None
    assert [_device.cuda_index(name) for name in ("cuda", "cuda:0", "cuda:7")] == [0, 0, 7]
    for name in ("gpu", "", "cuda:", "cuda:-1", "cuda:01", "cpu:0", "CUDA", "cuda:0 ", 0, None):
        with pytest.raises(ValueError, match="device: expected 'cpu', 'cuda' or 'cuda:N', got"):
            _device.cuda_index(name)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"device": "gpu"}, "device: expected 'cpu'"),
        ({"device": "cuda", "activation": "float64"}, "activation: expected it with device='cpu' alone, got 'float64'"),
        ({"device": "cuda", "threads": 2}, "threads: expected it with device='cpu' alone, got 2"),
        ({"slots": 2}, "slots: expected it with device='cuda' alone, got 2"),
        ({"capacity": 64}, "capacity: expected it with device='cuda' alone, got 64"),
        ({"impl": "graph"}, "impl: expected it with device='cuda' alone, got 'graph'"),
        ({"dtype": "bfloat16"}, "dtype: expected it with a preset alone, got 'bfloat16'"),
        ({"activation": "bfloat16"}, "activation: expected float32 or float64, got 'bfloat16'"),
    ],
)
def test_load_refuses_by_name(checkpoints: pathlib.Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cf_ops.load(checkpoints / "neox-d80", **arguments)


def test_importing_needs_neither_gpu_nor_torch() -> None:
    done = python(
        "import sys, cf_ops\n"
        "assert cf_ops.cuda_available() is False\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n"
        "    cf_ops.load('data/checkpoints/neox-d80', device='cuda')\n"
        "except (NotImplementedError, cf_ops.CfError) as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    if _core.has_cuda():
        assert done.stdout.startswith("CfError no CUDA device")
    else:
        assert done.stdout.startswith("NotImplementedError device: this build of cf_ops has no CUDA backend")


@pytest.mark.skipif(_core.has_cuda(), reason="this build has the CUDA backend")
def test_a_build_without_cuda_says_so(checkpoints: pathlib.Path) -> None:
    weights = _core.Weights.open(str(checkpoints / "neox-d80"))
    assert cf_ops.cuda_available() is False
    for call in (
        lambda: cf_ops.load(checkpoints / "neox-d80", device="cuda"),
        lambda: _core.DeviceModel(weights),
        lambda: _core.cuda_device(),
        lambda: _core.cuda_versions(),
    ):
        with pytest.raises(NotImplementedError, match="no CUDA backend.*put nvcc on PATH, then pip install ."):
            call()


def test_weights_without_values_make_no_model() -> None:
    weights = _core.Weights.preset("pythia-14m")
    bytes = weights.bytes
    weights.drop_values()
    assert weights.bytes == bytes and weights.dtype == "float16"
    with pytest.raises(ValueError, match="weights: expected them in the memory of the host, got none"):
        _core.Runner(weights)
    with pytest.raises(ValueError, match="weights: expected their values, got none"):
        _core.DeviceModel(weights)


def test_weights_on_a_device_make_no_model_of_the_cpu() -> None:
    config, arrays = constant_arrays(np.zeros(16, np.float32))
    arrays["embed_out.weight"][0, 0] = np.nan  # not looked at
    weights = _core.Weights.from_tensors(config, described(arrays, "float32"), arrays, on_device=True)
    with pytest.raises(ValueError, match="in the memory of the host, got a device's"):
        _core.Decoder(weights)


def test_presets(checkpoints: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = cf_ops.load("pythia-14m", dtype="bfloat16")
    assert model.weights.dtype == "bfloat16" and model.device == "cpu" and model.eos_token_ids == []
    assert model.config["hidden_size"] == 128
    assert model.impl is model.slots is model.capacity is None
    first = list(model.generate([1, 2, 3], max_new_tokens=4))
    assert first == list(cf_ops.load("pythia-14m", dtype="bfloat16").generate([1, 2, 3], max_new_tokens=4))
    with pytest.raises(ValueError, match="dtype: expected float16, bfloat16 or float32, got 'float64'"):
        cf_ops.load("pythia-14m", dtype="float64")
    with pytest.raises(FileNotFoundError):
        cf_ops.load("pythia-15m")
    (tmp_path / "pythia-14m").symlink_to(checkpoints / "neox-d80")
    assert cf_ops.load("pythia-14m").config["hidden_size"] == 160  # the directory comes first


def test_cublaslt_is_found_beside_torch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {}
    for major, folder in ((12, "nvidia/cublas/lib"), (13, "nvidia/cu13/lib")):
        (tmp_path / folder).mkdir(parents=True)
        files[major] = tmp_path / folder / f"libcublasLt.so.{major}"
        files[major].touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("nvidia", "torch")]:
        monkeypatch.delitem(sys.modules, name)
    assert _device.cublaslt_file(13) == _device.cublaslt_file(14) == str(files[13])
    assert _device.cublaslt_file(12) == str(files[12])
    assert _device.cublaslt_file(0) is None
    monkeypatch.setattr(_core, "has_cuda", lambda: True)
    monkeypatch.setattr(_core, "cuda_versions", lambda: ("12.8", "13.0"))
    monkeypatch.setenv("CF_CUBLASLT", "/mine")
    _device.name_cublaslt()
    assert os.environ["CF_CUBLASLT"] == "/mine"
    monkeypatch.delenv("CF_CUBLASLT")
    _device.name_cublaslt()
    assert os.environ["CF_CUBLASLT"] == str(files[12])
    monkeypatch.delenv("CF_CUBLASLT")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--device", "gpu"], "--device: expected 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        (["--backend", "gpu"], "--device: expected 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        (["--impl", "graph"], "--impl: expected with --device cuda"),
        (["--device", "cuda", "--activation", "float64"], "--activation: expected with --device cpu"),
        (["--device", "cuda", "--threads", "2"], "--threads: expected with --device cpu"),
        (["--device", "cuda", "--impl", "fast"], "--impl: invalid choice"),
        (["--devices", "0,0"], "--devices: expected different GPUs, such as [0, 1], got [0, 0]"),
        (["--devices", "0,x"], "--devices: expected an integer of 0 to 9999, got 'x'"),
        (["--devices", "0,1", "--device", "cuda:1"], "--device: expected none beside devices, got 'cuda:1'"),
        (["--devices", "0,1", "--threads", "2"], "--threads: expected with --device cpu"),
        (["--devices", "0,1"], "no CUDA"),
        (["--device", "cuda"], "no CUDA"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "eval", "bench"])
def test_the_command_line_refuses(
    checkpoints: pathlib.Path, tmp_path: pathlib.Path, command: str, words: list[str], message: str
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.int32))
    own = {"generate": ["--prompt-ids", "1,2"], "eval": ["--tokens", str(tmp_path / "ids.npy")], "bench": []}[command]
    line = [sys.executable, "-m", "cf_ops", command, "--model", str(checkpoints / "neox-d80"), *own, *words]
    done = subprocess.run(line, env=NO_GPU, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_every_16_bit_checkpoint_is_tested(checkpoints: pathlib.Path) -> None:
    found = [path.name for path in sorted(checkpoints.iterdir()) if (path / "config.json").exists()]
    assert [name for name in found if _core.Weights.open(str(checkpoints / name)).dtype != "float32"] == CHECKPOINTS


@pytest.mark.parametrize("name", ["neox-d80", "neox-d64-sequential"])
def test_the_bound_of_an_activation_dtype(checkpoints: pathlib.Path, name: str) -> None:
    weights = _core.Weights.open(str(checkpoints / name))
    ids = list(range(3, 40))
    oracle = Oracle(weights, ids, "float32")
    oracle.check_rows(_core.Runner(weights, capacity=64).forward(0, 0, ids, len(ids)))
    assert oracle.bound < Oracle(weights, ids, "float16").bound < Oracle(weights, ids, "bfloat16").bound < 1
    runner = _core.Runner(weights, capacity=64)
    with pytest.raises(ValueError, match="expected the oracle"):
        runner.error_bound(ids, "float16")
    with pytest.raises(ValueError, match="activation: expected float16"):
        _core.Runner(weights, capacity=64, activation="float64").error_bound(ids, "int32")
    with pytest.raises(AssertionError, match="another id than float64's"):
        wrong = list(cf_ops.load(checkpoints / name).generate(ids, max_new_tokens=4, stop=()))
        check_greedy(weights, ids, [wrong[0] ^ 1], "float32")


def test_closing_on_the_cpu_does_nothing(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80")
    generation = model.generate([1, 2, 3], max_new_tokens=50, stop=())
    first = next(generation)
    generation.close()
    assert generation.finish == "interrupted" and generation.ids == [first] and list(generation) == []
    model.close()
    assert next(model.generate([1, 2, 3])) == first


# --- ids and logits ---------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_ids_are_the_oracles(checkpoints: pathlib.Path, name: str) -> None:
    model = cf_ops.load(checkpoints / name, device="cuda", slots=2, capacity=64)
    weights = _core.Weights.open(str(checkpoints / name))
    assert model.device == "cuda:0" and model.slots == 2 and model.capacity == 64 and model.impl in IMPLS
    assert model.activation == weights.dtype
    shares = []
    for prompt in PROMPTS:
        ids = list(model.generate(prompt, max_new_tokens=24, stop=()))
        assert len(ids) == 24
        shares.append(check_greedy(weights, prompt, ids, model.activation))
        # Up to the first margin that is small the ids are those that the oracle makes by itself.
        exact = list(cf_ops.load(checkpoints / name, activation="float64").generate(prompt, max_new_tokens=24, stop=()))
        oracle = Oracle(weights, prompt + exact[:-1], model.activation)
        ordered = np.sort(oracle.logits[len(prompt) - 1 :], axis=1)
        small = (ordered[:, -1] - ordered[:, -2] <= 2 * oracle.allowed).tolist()
        until = small.index(True) if True in small else len(small)
        assert ids[:until] == exact[:until]
    assert max(shares) > 0


@gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("impl", IMPLS)
def test_every_impl_is_the_oracle(impl: str, dtype: str) -> None:
    model = cf_ops.load("pythia-14m", device="cuda:0", dtype=dtype, capacity=64, impl=impl)
    weights = _core.Weights.preset("pythia-14m", dtype)
    assert model.impl == impl and model.activation == dtype
    ids = list(model.generate(PROMPTS[0], max_new_tokens=24))
    check_greedy(weights, PROMPTS[0], ids, dtype)
    assert ids == list(model.generate(PROMPTS[0], max_new_tokens=24))


@gpu
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_the_oracles_within_the_bound(checkpoints: pathlib.Path, name: str) -> None:
    ids = list(range(5, 45))
    model = cf_ops.load(checkpoints / name, device="cuda", capacity=64)
    oracle = Oracle(_core.Weights.open(str(checkpoints / name)), ids, model.activation)
    logits = model.logits(ids)
    vocab = model.config["vocab_size"]
    assert logits.dtype == np.float32 and logits.shape == (40, vocab)
    oracle.check_rows(logits)
    last, taps = model.run(np.array(ids), rows=3)
    assert taps == {} and last.shape == (3, vocab)
    oracle.check_rows(last)
    assert np.array_equal(model.logits(ids), logits)
    assert np.array_equal(cf_ops.load(checkpoints / name, device="cuda", capacity=64).logits(ids), logits)
    assert model.run(ids, rows=0)[0].shape == (0, vocab)


@gpu
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("name", ["neox-d80", "neox-bf16", "neox-gptq-sym", "neox-gptq-desc-act"])
def test_taps_are_the_oracles_within_the_bound(checkpoints: pathlib.Path, name: str, chunk: int) -> None:
    weights = _core.Weights.open(str(checkpoints / name))
    shared = _core.DeviceModel(weights, slots=2, capacity=32, chunk=chunk)
    runner, other = _core.Runner(shared), _core.Runner(shared)
    ids = list(range(5, 16))
    oracle = _core.Runner(weights, capacity=len(ids), activation="float64")
    assert runner.taps == oracle.taps
    logits, taps = runner.run(0, 0, ids, 3, runner.taps)
    exact_logits, exact = oracle.run(0, 0, ids, 3, oracle.taps)
    bound, _ = oracle.error_bound(ids, shared.activation)
    assert list(taps) == list(exact) == runner.taps
    for tap in taps:
        assert taps[tap].dtype == np.float32 and taps[tap].shape == exact[tap].shape
        assert np.linalg.norm(taps[tap] - exact[tap]) <= bound * np.linalg.norm(exact[tap]), tap
    assert np.array_equal(taps["logits"], logits) and logits.shape == exact_logits.shape
    # Neither this runner's next calls nor another's are watched, and the same call has the same bits.
    assert np.array_equal(runner.forward(0, 0, ids, 3), logits)
    other.prefill(0, 0, ids)
    other.step([(0, 1, len(ids))])
    runner.step([(0, 1, len(ids))])
    assert np.array_equal(runner.logits(0), other.logits(0))


@gpu
def test_what_a_device_model_refuses(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", device="cuda", capacity=16)
    with pytest.raises(ValueError, match=r"tap 'layers.7.output' is unknown; there are embed_in, layers.N.input_"):
        model.run([1, 2], taps=["layers.7.output"])
    with pytest.raises(NotImplementedError, match="RoPE table"):
        runner = _core.Runner(_core.DeviceModel(_core.Weights.open(str(checkpoints / "neox-d80")), capacity=8))
        runner.set_rope_table(np.zeros((1, 10), np.float32), np.zeros((1, 10), np.float32))


@gpu
def test_steps_make_the_logits_of_a_prompt(checkpoints: pathlib.Path) -> None:
    weights = _core.Weights.open(str(checkpoints / "neox-d80"))
    shared = _core.DeviceModel(weights, slots=3, capacity=32, chunk=5)
    runner = _core.Runner(shared, slots=2)
    assert (runner.slots, runner.capacity, shared.free_slots) == (2, 32, 1)
    ids = list(range(9, 29))
    oracle = Oracle(weights, ids, shared.activation)
    oracle.check_rows(runner.forward(0, 0, ids, len(ids)))
    runner.prefill(1, 0, ids[:7])
    for position in range(7, 20):
        runner.step([(1, ids[position], position)])
    assert runner.length(0) == runner.length(1) == 20
    oracle.check_rows(runner.logits(1)[None])
    runner.prefill(1, 5, ids[5:])  # entries behind the first five are replaced
    oracle.check_rows(runner.logits(1)[None])
    runner.release(1)
    assert runner.length(1) == 0 and runner.length(0) == 20
    assert shared.weight_bytes >= weights.bytes and shared.workspace_bytes > 0
    assert runner.cache_bytes * 3 == shared.cache_bytes * 2
    runner.close()
    runner.close()
    assert not runner.is_open and shared.free_slots == 3


@gpu
def test_perplexity_is_near_the_oracles(checkpoints: pathlib.Path) -> None:
    ids = np.random.default_rng(1).integers(0, 128, 60)
    weights = _core.Weights.open(str(checkpoints / "neox-d80"))
    exact = cf_ops.load(checkpoints / "neox-d80", activation="float64").perplexity(ids, 20, 10)
    ours = cf_ops.load(checkpoints / "neox-d80", device="cuda", capacity=19).perplexity(ids, 20, 10)
    # The loss is the log of the sum of exp less the next id's logit. Each of the two errs by `allowed` at most. Every
    # window has a bound of its own, and the largest one holds for all.
    windows = [ids[first : first + 20].tolist() for first in range(0, 60, 10)]
    allowed = max(Oracle(weights, window, "float16").allowed for window in windows)
    assert ours.positions == exact.positions
    assert abs(ours.nll - exact.nll) <= 2 * allowed


@gpu
@pytest.mark.parametrize("name", ["neox-d80", "neox-bf16", "neox-gptq-sym", "llama-gqa3-scaled", "gpt2-d64"])
def test_scores_are_the_oracles_within_the_bound(checkpoints: pathlib.Path, name: str) -> None:
    weights = _core.Weights.open(str(checkpoints / name))
    model = cf_ops.load(checkpoints / name, device="cuda", slots=3, capacity=64)
    generator = np.random.default_rng(6)
    prompts = [generator.integers(0, model.config["vocab_size"], n).tolist() for n in (2, 17, 41, 30, 60)]
    first = [1, 5, 1, 29, 50]
    exact = cf_ops.load(checkpoints / name, activation="float64").score(prompts, first, top=3)
    together, again = (model.score(prompts, first, top=3) for _ in range(2))
    lone = model.score(prompts, first, top=3, slots=1)
    for prompt, at, theirs, *ours in zip(prompts, first, exact, together, lone):
        # A log-probability is a logit less the log of a sum of exp, which is apart by no more than its furthest logit.
        allowed = 2 * Oracle(weights, prompt[:-1], model.activation).allowed
        sure = theirs.top_log_probs[:, 0] - theirs.top_log_probs[:, 1] > 2 * allowed
        for scored in ours:
            assert scored.error is None and scored.log_probs.shape == (len(prompt) - at,)
            assert np.abs(scored.log_probs - theirs.log_probs).max() <= allowed
            assert (scored.greedy == theirs.greedy)[sure].all()
            assert (scored.top_ids[:, 0] == theirs.top_ids[:, 0])[sure].all()
            assert np.abs(scored.top_log_probs - theirs.top_log_probs).max() <= allowed
            assert ((scored.top_ids[:, 0] == prompt[at:]) == scored.greedy).all()
    for scored, same in zip(together, again):
        assert np.array_equal(scored.log_probs, same.log_probs) and np.array_equal(scored.top_ids, same.top_ids)
    # In one slot prompts are read one after the other, and have the bits that they have alone.
    for prompt, at, scored in zip(prompts, first, lone):
        (alone,) = model.score([prompt], at, top=3, slots=1)
        assert np.array_equal(scored.log_probs, alone.log_probs)
    # More likely ids than the device names are found on the host.
    (many,) = model.score([prompts[2]], 1, top=70)
    assert many.top_ids.shape == (40, 70) and (np.diff(many.top_log_probs, axis=1) <= 0).all()


@gpu
@pytest.mark.parametrize("name", ["stdlib-4m", "stdlib-4m-gptq"])
def test_the_perplexity_of_trained_models_is_the_recorded_one(
    root: pathlib.Path, checkpoints: pathlib.Path, name: str
) -> None:
    record = json.loads((root / "data" / "bench" / f"quality-{name}.json").read_text())["beside"]
    graph = next(figures for run, figures in record.items() if run.endswith(", graph float16"))
    ids = np.load(checkpoints / "stdlib-4m" / "held_out.npy").reshape(-1)[:32768]
    scored = cf_ops.load(checkpoints / name, device="cuda", slots=8, capacity=511).perplexity(ids, 512)
    assert scored.positions == graph["positions"]
    # The recorded run read ids one by one. Its distance from float64 has this standard error, and so has ours.
    error = graph["log_perplexity_ratio"]["error"]
    assert abs(scored.nll - np.log(graph["reference_perplexity"]["mean"])) <= 6 * error
    assert abs(scored.nll - graph["nll"]["mean"]) <= 6 * np.sqrt(2) * error


# --- generation -------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["neox-d80", "neox-bf16", "neox-gptq-asym"])
def test_ids_do_not_depend_on_the_other_prompts(
    checkpoints: pathlib.Path, name: str, arguments: dict[str, Any]
) -> None:
    model = cf_ops.load(checkpoints / name, device="cuda", slots=3, capacity=64)
    results = model.generate_batch(PROMPTS, max_new_tokens=24, stop=(), **arguments)
    assert [result.finish for result in results] == ["length"] * len(PROMPTS)
    again = model.generate_batch(PROMPTS, max_new_tokens=24, stop=(), slots=2, **arguments)
    other = cf_ops.load(checkpoints / name, device="cuda", slots=3, capacity=64)
    other_results = other.generate_batch(PROMPTS, max_new_tokens=24, stop=(), **arguments)
    ids = [result.ids for result in results]
    assert ids == [result.ids for result in again] == [result.ids for result in other_results]
    if not arguments:
        assert ids == [list(model.generate(prompt, max_new_tokens=24, stop=())) for prompt in PROMPTS]


@gpu
@pytest.mark.parametrize("arguments", [{"temperature": 1.0}, SAMPLED, {"temperature": 0.7, "top_k": 5}])
def test_sampled_ids_are_the_cpus_for_equal_logits(arguments: dict[str, Any]) -> None:
    """The model makes these logits whatever it is given, in float16 on a GPU and in float32 on the CPU."""
    logits = np.random.default_rng(3).normal(0, 2, 96).astype(np.float16)
    config, arrays = constant_arrays(logits, hidden=64)
    arrays = {name: array.astype(np.float16) for name, array in arrays.items()}
    weights = _core.Weights.from_tensors(config, described(arrays, "float16"), arrays)
    on_gpu = cf_ops.Model(weights, "", "float16", [], _core.DeviceModel(weights, slots=4, capacity=64))
    on_cpu = cf_ops.Model(weights, "", "float32", [])
    assert np.array_equal(on_gpu.logits([1, 2]), on_cpu.logits([1, 2]))
    for seed in range(5):
        settings = {**arguments, "seed": seed, "max_new_tokens": 40}
        ours = on_gpu.generate_batch(PROMPTS[:2] + [[9], [1, 1]], **settings)
        theirs = on_cpu.generate_batch(PROMPTS[:2] + [[9], [1, 1]], **settings)
        assert [result.ids for result in ours] == [result.ids for result in theirs]
        assert len({id for result in ours for id in result.ids}) > 1


@gpu
def test_ids_come_one_by_one_and_stop(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", device="cuda", capacity=64)
    free = list(model.generate([1, 2, 3], max_new_tokens=20, stop=()))
    generation = model.generate([1, 2, 3], max_new_tokens=20, stop=())
    for count in range(1, 21):
        assert next(generation) == free[count - 1] and generation.ids == free[:count]
    assert list(generation) == [] and generation.finish == "length"
    last = free[6]
    stopped = model.generate([1, 2, 3], max_new_tokens=20, stop=[last])
    assert list(stopped) == free[: free.index(last) + 1] and stopped.finish == "stop"


@gpu
def test_streamed_text_is_the_decoded_text(text_checkpoint: str) -> None:
    model = cf_ops.load(text_checkpoint, device="cuda", capacity=128)
    for seed in range(5):
        generation = model.generate("the fox é", max_new_tokens=60, temperature=8.0, seed=seed, stop=())
        pieces = list(generation)
        assert all(pieces)
        assert "".join(pieces) == model.tokenizer.decode(generation.ids) == generation.text


@gpu
def test_generations_share_slots(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", device="cuda", slots=2, capacity=64)
    alone = [list(model.generate(prompt, max_new_tokens=20, stop=())) for prompt in PROMPTS[:2]]
    first, second = (model.generate(prompt, max_new_tokens=20, stop=()) for prompt in PROMPTS[:2])
    mixed = [(next(first), next(second)) for _ in range(20)]
    assert [list(ids) for ids in zip(*mixed)] == alone

    first, second = (model.generate(prompt, max_new_tokens=20, stop=()) for prompt in PROMPTS[:2])
    next(first)
    for call in (
        lambda: model.generate([1]),
        lambda: model.logits([1, 2]),
        lambda: model.perplexity([1, 2, 3]),
        lambda: model.generate_batch([[1], [2]]),
    ):
        with pytest.raises(ValueError, match="slots: expected one that is free, got a model whose 2 are all in use"):
            call()
    second.close()
    assert second.finish == "interrupted"
    assert list(model.generate(PROMPTS[1], max_new_tokens=20, stop=())) == alone[1]
    assert [first.ids[0], *first] == alone[0]
    with pytest.raises(ValueError, match="slots: expected 1 to 2, those that are free of the model's 2, got 3"):
        model.generate_batch(PROMPTS, max_new_tokens=2, slots=3)


@gpu
def test_a_refusal_keeps_no_slot(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", device="cuda", capacity=32)
    kept = []
    calls: list[tuple[str, Any]] = [
        ("prompt", lambda: model.generate([])),
        ("prompt", lambda: model.generate([128])),
        ("temperature", lambda: model.generate([1], temperature=-1)),
        ("stop", lambda: model.generate([1], stop=[128])),
        ("max_new_tokens", lambda: model.generate([1], max_new_tokens=0)),
        ("prompt 1: ", lambda: model.generate_batch([[1], [-1]], max_new_tokens=2)),
        ("at least one id", lambda: model.run([])),
        ("expected an id", lambda: model.run([128])),
        ("rows", lambda: model.run([1], rows=2)),
        (r"capacity: expected at least the 33 .* load\(..., capacity=33\)", lambda: model.generate([1] * 2)),
        ("capacity: expected at least the 40", lambda: model.logits([1] * 40)),
        ("capacity: expected at least the 39", lambda: model.perplexity([1] * 50, context=40)),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        kept.append(caught)  # with its traceback and the frames of all calls
    assert len(list(model.generate([1], max_new_tokens=32, stop=()))) == 32


@gpu
def test_what_the_device_does_not_hold_or_take(checkpoints: pathlib.Path) -> None:
    name = checkpoints / "neox-d80"
    calls: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "slots must be 1", {"slots": 0}),
        (ValueError, "slots must be 1 to 1024, got 1025", {"slots": 1025}),
        (ValueError, "capacity must be 1", {"capacity": 0}),
        (ValueError, "impl: expected auto, unfused, graph, split, layer, persistent, got 'fast'", {"impl": "fast"}),
        (NotImplementedError, "impl 'persistent': ", {"impl": "persistent", "slots": 9}),
        (cf_ops.CfError, "no CUDA device 999, there are", {"device": "cuda:999"}),
        (MemoryError, "64 slots of 67108864 entries need .* GB of device memory", {"slots": 64, "capacity": 1 << 26}),
    ]
    for error, message, arguments in calls:
        with pytest.raises(error, match=message) as caught:
            cf_ops.load(name, **{"device": "cuda", **arguments})
        assert "\n" not in str(caught.value)
    with pytest.raises(NotImplementedError, match="impl 'persistent': "):
        cf_ops.load(checkpoints / "neox-gptq-sym", device="cuda", impl="persistent")


@gpu
def test_a_sequence_that_fails_says_so() -> None:
    config, arrays = constant_arrays(np.full(16, 60000, np.float16), hidden=64)
    arrays = {name: array.astype(np.float16) for name, array in arrays.items()}

    def model() -> cf_ops.Model:
        weights = _core.Weights.from_tensors(config, described(arrays, "float16"), arrays)
        return cf_ops.Model(weights, "", "float16", [], _core.DeviceModel(weights, capacity=8))

    assert list(model().generate([1], max_new_tokens=2)) == [0, 0]
    arrays["gpt_neox.final_layer_norm.bias"][0] = 2  # weights stay finite, logits do not
    failing = model()
    (result,) = failing.generate_batch([[1]], max_new_tokens=2)
    assert result.finish == "failed" and result.ids == [] and "inf" in str(result.error)
    for _ in range(2):  # the slot is free again
        generation = failing.generate([1], max_new_tokens=2)
        with pytest.raises(cf_ops.CfError, match="inf"):
            next(generation)
        assert generation.finish == "failed" and list(generation) == []


@gpu
def test_closing_gives_the_memory_back(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", device="cuda", capacity=32)
    generation = model.generate([1, 2], max_new_tokens=9, stop=())
    next(generation)
    model.close()
    with pytest.raises(cf_ops.CfError, match="memory on the device was given back"):
        next(generation)
    assert generation.finish == "failed"
    with pytest.raises(cf_ops.CfError, match="memory on the device was given back"):
        model.logits([1])
    cf_ops.load("pythia-70m", device="cuda").close()  # what CUDA takes once for itself
    before = _core.cuda_device()[3]
    weights = _core.Weights.preset("pythia-70m").bytes
    for _ in range(10):
        model = cf_ops.load("pythia-70m", device="cuda")
        next(model.generate([1, 2, 3]))
        del model
    assert before - _core.cuda_device()[3] < weights  # leaked each time it would be ten times that


# --- interrupts and threads -------------------------------------------------------------------------------------------


@gpu
def test_an_interrupt_ends_a_generation_between_steps(checkpoints: pathlib.Path) -> None:
    weights = _core.Weights.open(str(checkpoints / "neox-tied"))
    shared = _core.DeviceModel(weights, capacity=LONG + 8)
    decoder = _core.Decoder(shared)
    sequence = decoder.add([1, 2, 3], max_new_tokens=LONG)
    decoder.decode(1)  # what the first step prepares
    timer = interrupt_after(0.1)
    with pytest.raises(KeyboardInterrupt):
        decoder.decode(LONG)
    timer.join()
    made = decoder.ids(sequence)
    assert 0 < len(made) < LONG and decoder.finish(sequence) == "running"
    decoder.decode(3)  # it goes on where it was
    made = decoder.ids(sequence)
    decoder.close()
    again = _core.Decoder(shared)
    sequence = again.add([1, 2, 3], max_new_tokens=len(made))
    again.decode(LONG)
    assert again.ids(sequence) == made


@gpu
def test_an_interrupt_leaves_what_was_made(checkpoints: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cf_ops.load(checkpoints / "neox-tied", device="cuda", capacity=LONG + 8)
    expected = list(model.generate([1, 2, 3], max_new_tokens=50, stop=()))
    interrupt_at_step(monkeypatch, 50)
    with pytest.raises(cf_ops.GenerationInterrupted) as caught:
        model.generate_batch([[1, 2, 3], [4]], max_new_tokens=LONG, stop=())
    first, waiting = caught.value.results
    assert first.ids == expected and first.finish == "interrupted"
    assert waiting.ids == [] and waiting.finish == "interrupted"
    monkeypatch.undo()
    assert list(model.generate([1, 2, 3], max_new_tokens=50, stop=())) == expected


@gpu
def test_threads_do_not_disturb_each_other(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", device="cuda", slots=8, capacity=64)
    expected = {n: list(model.generate([n, 1], max_new_tokens=40, stop=())) for n in range(8)}
    faults: list[str] = []

    def work(n: int) -> None:
        try:
            for _ in range(5):
                if list(model.generate([n, 1], max_new_tokens=40, stop=())) != expected[n]:
                    faults.append(f"prompt {n}: other ids")
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


# --- the command line -------------------------------------------------------------------------------------------------


def command(*words: object) -> str:
    line = [sys.executable, "-m", "cf_ops", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@gpu
def test_the_commands_run_on_a_gpu(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    directory, file = checkpoints / "neox-d80", tmp_path / "out.json"
    text = ";".join(",".join(map(str, prompt)) for prompt in PROMPTS)
    command(
        *("generate", "--model", directory, "--device", "cuda", "--impl", "graph", "--prompt-ids", text),
        *("--max-new-tokens", 24, "--slots", 2, "--stop", "none", "--json", file),
    )
    report = json.loads(file.read_text())
    assert (report["device"], report["impl"], report["activation_dtype"]) == ("cuda:0", "graph", "float16")
    assert report["gpu"] == _core.cuda_device()[0] and report["cuda_driver"] == _core.cuda_versions()[0]
    model = cf_ops.load(directory, device="cuda", impl="graph", slots=2, capacity=64)
    expected = [result.ids for result in model.generate_batch(PROMPTS, max_new_tokens=24, stop=())]
    assert [sequence["ids"] for sequence in report["sequences"]] == expected

    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(60, dtype=np.int32))
    words = ("--tokens", ids, "--context", 20, "--json", file)
    table = command("eval", "--model", directory, "--device", "cuda", *words)
    assert table.partition("\n")[0].split() == ["|", "what", "|", "float16", "|"]
    assert json.loads(file.read_text())["positions"] == 57

    words = ("--prompt-len", "5,9", "--new-tokens", 4, "--slots", "1,2", "--runs", 1, "--json", file)
    assert "impl " in command("bench", "--model", "pythia-14m", "--device", "cuda", *words)
    report = json.loads(file.read_text())
    assert [(result["slots"], result["prompt_len"]) for result in report["results"]] == [(1, 5), (1, 9), (2, 5), (2, 9)]


@gpu
def test_the_commands_take_text(text_checkpoint: str) -> None:
    words = ("--prompt", "the fox", "--max-new-tokens", 8, "--stop", "none")
    expected = "".join(cf_ops.load(text_checkpoint, device="cuda").generate("the fox", max_new_tokens=8, stop=()))
    assert command("generate", "--model", text_checkpoint, "--device", "cuda", *words) == expected + "\n"


@gpu
def test_the_self_check_runs_ops_and_a_model_on_the_gpu() -> None:
    output = command()
    for name in (*_core.ops(), "linear (4 bits)", "pythia-14m, float16", "pythia-14m, bfloat16"):
        assert re.search(rf"^\| {re.escape(name)} +\| +cuda \|", output, re.M), name
    assert "FAIL" not in output


# --- many sequences at once -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize(
    "options",
    [
        {"pages": 20},
        {"pages": 3, "share_prefixes": True},  # for some of the prompts: the others wait
        {"pages": 8, "page_entries": 128, "step_tokens": 4},
        {"step_tokens": 7, "invariant": True},
    ],
)
def test_pages_and_pieces_of_prompts_leave_the_ids(checkpoints: pathlib.Path, options: dict[str, Any]) -> None:
    prompts = [*PROMPTS, [*range(1, 90)], [*range(1, 91)]]
    with cf_ops.load(checkpoints / "neox-d80", device="cuda", slots=4, capacity=128, **options) as model:
        for _ in range(2):
            for result in model.generate_batch(prompts, max_new_tokens=30, stop=()):
                assert result.finish == "length", result.error
                check_greedy(_core.Weights.open(str(checkpoints / "neox-d80")), result.prompt, result.ids, "float16")
        three = model.generate_batch(prompts[:2], n=3, max_new_tokens=20, stop=(), **SAMPLED)
        one = model.generate_batch(prompts[:2], max_new_tokens=20, stop=(), **SAMPLED)
        assert [three[0].ids, three[3].ids] == [r.ids for r in one]


@gpu
@pytest.mark.parametrize("name", ["neox-d80", "llama-gqa3-scaled"])
def test_a_stream_goes_on_behind_its_window_on_a_gpu(checkpoints: pathlib.Path, name: str) -> None:
    window = {"window": 60, "sinks": 4}
    prompt = [1, 2, 3]
    with cf_ops.load(checkpoints / name, device="cuda", **window) as model:
        ids = list(model.stream(prompt, max_new_tokens=400))
        activation = model.activation
        assert list(model.generate(prompt, max_new_tokens=400, stop=())) == ids
    fed = prompt + ids[:-1]
    oracle = _core.Runner(_core.Weights.open(str(checkpoints / name)), chunk=len(fed), activation="float64", **window)
    logits = oracle.forward(0, 0, fed, len(ids))
    _, largest_error = oracle.error_bound(fed, activation)
    behind = logits.max(axis=1) - logits[np.arange(len(ids)), ids]
    assert (behind <= 2 * largest_error * np.abs(logits).max()).all()


@gpu
def test_a_model_is_longer_than_its_window_on_a_gpu(checkpoints: pathlib.Path) -> None:
    name = "mistral-gqa4-sharded"  # whose window is 64
    prompt = [(7 * i) % 31 + 1 for i in range(100)]
    weights = _core.Weights.open(str(checkpoints / name))
    with cf_ops.load(checkpoints / name, device="cuda", capacity=256) as model:
        assert model.impl == "graph"
        ids = list(model.generate(prompt, max_new_tokens=60, stop=()))
        check_greedy(weights, prompt, ids, model.activation)
        Oracle(weights, prompt + ids, model.activation).check_rows(model.logits(prompt + ids))
