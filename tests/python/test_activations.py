"""Activations: Hugging Face's hidden states and modules' outputs, in files that go on, and batches of them."""

from __future__ import annotations

import json
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cuda_models import gpu

import cf_ops
from cf_ops import _activations, _core, _safetensors, _tap_names

VOCAB = 128
# Models with a parallel and with a sequential residual, without biases, and with learned positions.
MODELS = ("neox-d80", "neox-d64-sequential", "llama-gqa8", "gpt2-d16")
IN_DOUBLE = 1e-10  # relative L2, as for all logits and taps of whole models in float64
PROMPTS = [[1, 2, 3, 4, 5], [9], list(range(20, 60)), [7, 7, 7]]


@pytest.fixture(scope="module")
def model(checkpoints: pathlib.Path) -> cf_ops.Model:
    return cf_ops.load(checkpoints / "neox-d80", activation="float64")


def rel_l2(made: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(made - expected) / np.linalg.norm(expected))


def theirs(checkpoint: pathlib.Path) -> tuple[dict[str, np.ndarray[Any, Any]], int]:
    """Hugging Face's hidden states and the outputs of its modules in float64, rows of all prompts; its layers."""
    torch = pytest.importorskip("torch", reason="torch is missing")
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.float64)
    made: dict[str, list[np.ndarray[Any, Any]]] = {}
    weights = cf_ops.load(checkpoint).weights

    def rotary(x: Any, position_ids: Any) -> Any:
        """The library's table: Hugging Face's own differs by a rounding of float32."""
        tables = [torch.from_numpy(table)[position_ids].double() for table in weights.rope_table(64)]
        return tuple(torch.cat([table, table], -1) for table in tables)

    def rms_norm(module: Any) -> Any:
        """In float64: Hugging Face's own computes in float32, whatever the model's dtype is."""
        return lambda x: module.weight * x * torch.rsqrt(x.square().mean(-1, True) + module.variance_epsilon)

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            made.setdefault(name, []).append(value.detach().numpy().reshape(-1, value.shape[-1]))

        return hook

    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            module.forward = rotary
        elif hasattr(module, "variance_epsilon"):
            module.forward = rms_norm(module)
        if name.count("."):
            module.register_forward_hook(keep(name))
    for ids in PROMPTS:
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for i, state in enumerate(states):
            made.setdefault(f"hidden_states.{i}", []).append(state[0].numpy())
    return {name: np.concatenate(rows) for name, rows in made.items()}, model.config.num_hidden_layers


@pytest.mark.parametrize("name", MODELS)
def test_taps_are_hugging_faces(name: str, checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected, layers = theirs(checkpoints / name)
    exact = cf_ops.load(checkpoints / name, activation="float64")
    known = _tap_names.sources(exact.config, [])
    names = [tap for tap in known if not tap.startswith(("blocks.", "hook_"))]
    assert {f"hidden_states.{i}" for i in range(layers + 1)} <= set(names) <= set(expected)
    assert len(names) == layers + 1 + 5 * layers + 1 + ("gpt2" not in name)
    made = cf_ops.activations(exact, PROMPTS, names, out=tmp_path / "f64")
    assert made.dtype == "float64" and len(made) == sum(map(len, PROMPTS))
    for tap in names:
        assert rel_l2(made.rows(tap), expected[tap]) <= IN_DOUBLE, tap
    assert made.rows("ids").tolist() == sum(PROMPTS, [])
    assert made.rows("prompt").tolist() == [i for i, ids in enumerate(PROMPTS) for _ in ids]
    assert made.rows("position").tolist() == [i for ids in PROMPTS for i in range(len(ids))]
    # In float32 the bound of the logits holds for all that they are made of.
    with exact._runner(40) as runner:
        bounds = [runner.error_bound(ids, "float32")[0] for ids in PROMPTS]
    fast = cf_ops.activations(cf_ops.load(checkpoints / name), PROMPTS, out=tmp_path / "f32")
    assert fast.taps == [f"hidden_states.{i}" for i in range(layers + 1)]
    for tap in fast.taps:
        for number, bound in enumerate(bounds):
            rows = fast.rows("prompt") == number
            assert rel_l2(fast.rows(tap)[rows], expected[tap][rows]) <= bound


@pytest.mark.parametrize("name", MODELS[:2])
def test_transformer_lens_names_mean_the_same(name: str, checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / name, activation="float64")
    made = cf_ops.activations(model, PROMPTS, ["gpt_neox.*", "hidden_states.*", "blocks.*", "hook_embed"], out=tmp_path)
    pairs = {"hook_embed": "gpt_neox.embed_in"}
    for i in range(model.config["num_hidden_layers"]):
        block, layer = f"blocks.{i}.", f"gpt_neox.layers.{i}"
        pairs |= {f"{block}hook_resid_pre": f"hidden_states.{i}", f"{block}hook_resid_post": layer}
        pairs |= {f"{block}hook_attn_out": f"{layer}.attention", f"{block}hook_mlp_out": f"{layer}.mlp"}
        # What resid_mid means, where there is one.
        is_sequential = f"{block}hook_resid_mid" in made.taps
        assert is_sequential == (not model.config["use_parallel_residual"])
        if is_sequential:
            added = made.rows(f"{block}hook_resid_pre") + made.rows(f"{block}hook_attn_out")
            np.testing.assert_allclose(made.rows(f"{block}hook_resid_mid"), added, rtol=1e-12, atol=1e-12)
        z, hidden = made.rows(f"{block}attn.hook_z"), made.rows(layer)
        assert z.shape == (len(made), model.config["num_attention_heads"], z.shape[2])
        assert made.rows(f"{block}mlp.hook_post").shape == (len(made), model.config["intermediate_size"])
        assert hidden.shape == (len(made), model.config["hidden_size"])
    for lens, own in pairs.items():
        assert (made.rows(lens) == made.rows(own)).all(), lens


def test_it_stops_at_a_layer(model: cf_ops.Model, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = cf_ops.activations(model, PROMPTS, out=tmp_path / "every")
    ran: list[int] = []
    kind = _core.TapReader

    def reader(weights: Any, **sizes: Any) -> Any:
        ran.append(weights.config["num_hidden_layers"])
        return kind(weights, **sizes)

    monkeypatch.setattr(_core, "TapReader", reader)
    first = cf_ops.activations(model, PROMPTS, out=tmp_path / "first", stop_at_layer=1)
    assert first.taps == ["hidden_states.0", "hidden_states.1"]
    needed = cf_ops.activations(model, PROMPTS, "hidden_states.1", out=tmp_path / "needed")
    assert ran == [1, 1]
    for tap in first.taps:
        assert (first.rows(tap) == every.rows(tap)).all()
    assert (needed.rows("hidden_states.1") == every.rows("hidden_states.1")).all()
    with pytest.raises(ValueError, match="expected one of the first 1 layers"):
        cf_ops.activations(model, PROMPTS, "blocks.1.hook_mlp_out", out=tmp_path / "none", stop_at_layer=1)
    short = model.weights.first_layers(1)
    assert 0 < short.bytes < model.weights.bytes and short.config["num_hidden_layers"] == 1
    assert short.layers_left_out == 1 and model.weights.layers_left_out == 0
    cut = cf_ops.load(model.directory, activation="float64", layers=1)
    assert cut.notes[-1] == "neox-d80: the first 1 of 2 layers alone, before the last norm and the head"
    made = cf_ops.activations(cut, PROMPTS, out=tmp_path / "cut")  # a last state that the last norm has not seen
    assert made.taps == first.taps
    assert all((made.rows(tap) == every.rows(tap)).all() for tap in made.taps)
    # The logit lens: the last norm and the head behind the first layer.
    with pytest.raises(ValueError, match="unknown"):
        cut.run([1], "layers.1.output")
    lens, states = cut.run(PROMPTS[0], ["layers.0.output", "final_layer_norm"])
    logits, whole = model.run(PROMPTS[0], ["layers.0.output", "final_layer_norm"])
    assert (states["layers.0.output"] == whole["layers.0.output"]).all()
    assert lens.shape == logits.shape and not np.allclose(lens, logits)
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"layers: expected 1 to 2, those of the model, got {count}"):
            model.weights.first_layers(count)


def test_positions_and_masks(model: cf_ops.Model, tmp_path: pathlib.Path) -> None:
    every = cf_ops.activations(model, PROMPTS, "hidden_states.1", out=tmp_path / "every")
    place, prompt = every.rows("position"), every.rows("prompt")
    lengths = np.array([len(PROMPTS[i]) for i in prompt])
    masks = [np.arange(len(ids)) % 2 == 0 for ids in PROMPTS]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"positions": slice(1, None)}, place >= 1),
        ({"positions": [-1]}, place == lengths - 1),
        ({"masks": masks}, place % 2 == 0),
        ({"masks": lambda ids: ids > 6}, every.rows("ids") > 6),
    ]
    for number, (options, expected) in enumerate(cases):
        made = cf_ops.activations(model, PROMPTS, "hidden_states.1", out=tmp_path / str(number), **options)
        assert len(made) == expected.sum()
        for name in ("hidden_states.1", "ids", "prompt", "position"):
            assert (made.rows(name) == every.rows(name)[expected]).all()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"positions": [1]}, "prompt 1: expected positions of its 1 ids, got 1"),
        ({"masks": masks[:3]}, "prompt 3: expected a mask of 3 booleans, got none"),
        ({"masks": [*masks, masks[0]]}, "masks: expected one for each of 4 prompts, got more"),
        ({"masks": [[1]] * 4}, "prompt 0: expected a mask of 5 booleans, got int64 of the shape \\(1,\\)"),
        ({"masks": lambda ids: ids < 0}, "at least one position"),
        ({"masks": masks, "positions": [0]}, "expected one of them"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            cf_ops.activations(model, PROMPTS, "hidden_states.1", out=tmp_path / "refused", **options)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_files_are_read_by_safetensors(dtype: str, model: cf_ops.Model, tmp_path: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is missing")
    torch = pytest.importorskip("torch", reason="torch is missing")
    made = cf_ops.activations(model, PROMPTS, ["hidden_states.1"], out=tmp_path, dtype=dtype, rows_of_file=8)
    rows = np.concatenate([model.run(ids, ["layers.0.output"])[1]["layers.0.output"] for ids in PROMPTS])
    expected = torch.from_numpy(rows).to(getattr(torch, dtype))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in files] == [f"activations-{i:05d}-of-00003.safetensors" for i in range(3)]
    found = []
    for path in files:
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["dtype"] == dtype
            found.append(file.get_tensor("hidden_states.1"))
    assert [len(part) for part in found] == [6, 40, 3]  # prompts are whole
    assert torch.equal(torch.cat(found), expected)
    batches = list(made.batches(7, "hidden_states.1", seed=None, tensors="torch"))
    assert batches[0].dtype == expected.dtype and torch.equal(torch.cat(batches), expected)


def test_batches_are_shuffled_by_a_seed(model: cf_ops.Model, tmp_path: pathlib.Path) -> None:
    made = cf_ops.activations(model, PROMPTS, "hidden_states.*", out=tmp_path, rows_of_file=8, dtype="bfloat16")
    assert "49 rows of 3 taps, bfloat16" in repr(made)

    def order_of(opened: cf_ops.Activations, **options: Any) -> list[tuple[int, ...]]:
        batches = opened.batches(10, ["prompt", "position"], seed=3, **options)
        return [tuple((batch["prompt"] * 100 + batch["position"]).tolist()) for batch in batches]

    order = order_of(made, epochs=2)
    assert [len(part) for part in order] == [10, 10, 10, 10, 9] * 2
    first, second = sum(order[:5], ()), sum(order[5:], ())
    assert sorted(first) == sorted(second) == (made.rows("prompt") * 100 + made.rows("position")).tolist()
    assert first != second and list(first) != sorted(first)
    assert order_of(cf_ops.Activations(tmp_path)) == order[:5]
    for batch in made.batches(16, ["hidden_states.2", "prompt", "position"], seed=5, drop_last=True):
        assert len(batch["prompt"]) == 16
        for value, prompt, place in zip(batch["hidden_states.2"], batch["prompt"], batch["position"]):
            row = np.flatnonzero((made.rows("prompt") == prompt) & (made.rows("position") == place))
            assert (value == made.rows("hidden_states.2", row)[0]).all()
    # Another process maps the files: what it is sent does not grow with them.
    sent = pickle.dumps(made)
    assert len(sent) < 1000 and order_of(pickle.loads(sent)) == order[:5]
    with pytest.raises(ValueError, match="tap 'hidden_states.9' is not in"):
        made.batches(4, "hidden_states.9")
    with pytest.raises(ValueError, match="tensors: expected numpy or torch, got 'jax'"):
        made.batches(4, tensors="jax")


def test_an_interrupted_run_goes_on(
    model: cf_ops.Model, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cf_ops.activations(model, PROMPTS, "hidden_states.2", out=tmp_path / "whole")
    read, ran = _activations._Work._read, []

    def interrupted(work: Any, prompts: list[int]) -> Any:
        ran.append([len(PROMPTS[number]) for number in prompts])
        if len(ran) == 4:
            raise KeyboardInterrupt
        return read(work, prompts)

    monkeypatch.setattr(_activations._Work, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cf_ops.activations(model, PROMPTS, "hidden_states.2", out=tmp_path / "cut", rows_of_file=8)
    assert sorted(p.name for p in (tmp_path / "cut").glob("*.safetensors")) == [
        "activations-00000-of-00003.safetensors",
        "activations-00001-of-00003.safetensors",
    ]
    assert not list((tmp_path / "cut").glob("*.tmp"))
    with pytest.raises(FileNotFoundError, match="was interrupted; repeat it"):
        cf_ops.Activations(tmp_path / "cut")
    made = cf_ops.activations(model, PROMPTS, "hidden_states.2", out=tmp_path / "cut", rows_of_file=8)
    assert ran == [[5], [1], [40], [3], [3]]
    assert (made.rows("hidden_states.2") == expected.rows("hidden_states.2")).all()
    with pytest.raises(ValueError, match='dtype is "float64", and "float16" was asked'):
        cf_ops.activations(model, PROMPTS, "hidden_states.2", out=tmp_path / "cut", rows_of_file=8, dtype="float16")
    (tmp_path / "cut" / "activations.json").unlink()
    with pytest.raises(ValueError, match="out: expected a new folder"):
        cf_ops.activations(model, PROMPTS, "hidden_states.2", out=tmp_path / "cut", rows_of_file=8)


def test_what_is_refused(model: cf_ops.Model, tmp_path: pathlib.Path) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (
            PROMPTS,
            {"taps": "blocks.7.hook_mlp_out"},
            "tap 'blocks.7.hook_mlp_out' is unknown; there are .*hidden_states.N",
        ),
        (PROMPTS, {"taps": []}, "taps: expected at least one, got none"),
        (PROMPTS, {"dtype": "int8"}, "dtype: expected float64, float32, float16, bfloat16, got 'int8'"),
        (PROMPTS, {"stop_at_layer": 3}, "stop_at_layer: expected 1 to 2, got 3"),
        ([[1, VOCAB]], {}, "prompt 0: expected ids of 0 to 127, got 1 to 128"),
        ([], {}, "prompts: expected at least one, got none"),
        ([[1], []], {}, "prompt 1: expected ids of 0 to 127, got none"),
        (np.zeros((2, 2)), {}, r"expected integers \(prompts, ids\), got float64"),
    ]
    for prompts, options, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            cf_ops.activations(model, prompts, out=tmp_path / "none", **options)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "none").exists()
    work = object.__new__(_activations._Work)
    work._kind, work._dtype = "float64", "float16"
    with pytest.raises(ValueError, match="tap 'x': expected values that float16 holds, got 70000: dtype='bfloat16'"):
        work._cast("x", np.array([1.0, -70000.0]))
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="expected a file of safetensors, got a header of"):
        _safetensors.read(str(tmp_path / "bad.safetensors"))


def test_the_command(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = np.random.default_rng(1).integers(0, VOCAB, (4, 12)).astype(np.uint16)
    rows.tofile(tmp_path / "rows.bin")
    command = [sys.executable, "-m", "cf_ops", "activations", "--model", str(checkpoints / "neox-d80")]
    command += [
        "--tokens",
        "rows.bin",
        "--row",
        "12",
        "--limit",
        "3",
        "--tap",
        "blocks.*.hook_mlp_out",
        "--positions=-4:",
    ]
    command += ["--stop-at-layer", "1", "--dtype", "float16", "--out", "acts", "--json", "report.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made = cf_ops.Activations(tmp_path / "acts")
    assert made.taps == ["blocks.0.hook_mlp_out"] and (made.rows("ids") == rows[:3, -4:].ravel()).all()
    assert json.loads((tmp_path / "report.json").read_text())["rows"] == 12
    assert "| tap of 12 rows, float16 | shape of a row |" in done.stdout
    done = subprocess.run([*command, "--positions", "x"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--positions: expected places such as 0,-1" in done.stderr


@gpu
@pytest.mark.parametrize("name", ["neox-d80", "neox-bf16", "llama-gqa3-scaled"])
def test_on_a_gpu_prompts_that_share_passes_have_the_oracles(
    name: str, checkpoints: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    model = cf_ops.load(checkpoints / name, device="cuda", slots=3, capacity=48)
    prompts = [list(range(3, 12)), [5], list(range(40, 80)), list(range(20, 27)), [1, 2, 3]]
    layers = model.config["num_hidden_layers"]
    made = cf_ops.activations(model, prompts, out=tmp_path / "made", dtype="float32", rows_of_file=50)
    assert made.taps == [f"hidden_states.{i}" for i in range(layers + 1)] and len(made) == 60
    exact = cf_ops.activations(
        cf_ops.load(checkpoints / name, activation="float64"), prompts, out=tmp_path / "exact", rows_of_file=50
    )
    weights = _core.Weights.open(str(checkpoints / name))
    bounds = {
        number: _core.Runner(weights, capacity=len(ids), activation="float64").error_bound(ids, model.activation)[0]
        for number, ids in enumerate(prompts)
    }
    for about in ("ids", "prompt", "position"):
        assert (made.rows(about) == exact.rows(about)).all()
    for tap in made.taps:
        for number, bound in bounds.items():
            rows = np.flatnonzero(made.rows("prompt") == number)
            ours, theirs = made.rows(tap, rows), exact.rows(tap, rows)
            assert np.linalg.norm(ours - theirs) <= bound * np.linalg.norm(theirs), (tap, number)
    # In the model's own 16 bits the same values.
    own = cf_ops.activations(model, prompts, "hidden_states.1", out=tmp_path / "own", rows_of_file=50)
    assert own.dtype == model.activation
    np.testing.assert_array_equal(own.rows("hidden_states.1").astype(np.float32), made.rows("hidden_states.1"))
