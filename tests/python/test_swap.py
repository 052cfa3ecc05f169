"""Other weights in the place of a model's own: bit for bit those of a fresh load, and what is refused."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
from cuda_models import gpu

import cf_ops

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def revision(checkpoints: pathlib.Path, folder: pathlib.Path, name: str = "neox-d80") -> pathlib.Path:
    """The same model with other weights: two layers in each other's place."""
    made = folder / f"{name}-other"
    shutil.copytree(checkpoints / name, made)
    path = made / "model.safetensors"
    data = path.read_bytes()
    for one, other in ((b"layers.0.", b"layers.9."), (b"layers.1.", b"layers.0."), (b"layers.9.", b"layers.1.")):
        data = data.replace(one, other)
    path.write_bytes(data)
    return made


def made_by(model: cf_ops.Model) -> tuple[Any, ...]:
    ids = [one.ids for one in model.generate_batch([IDS, IDS[:3]], max_new_tokens=12, stop=())]
    sampled = list(model.generate(IDS, max_new_tokens=12, stop=(), temperature=1.0, seed=5))
    return ids, sampled, model.logits(IDS).tobytes(), model.score([IDS])[0].log_probs.tobytes()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("name", ["neox-d80", "neox-gptq-sym"])
def test_a_swap_is_a_fresh_load(device: str, name: str, checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options: dict[str, Any] = {"device": device} if device == "cpu" else {"device": device, "slots": 2, "capacity": 64}
    other = revision(checkpoints, tmp_path, name)
    expected = made_by(cf_ops.load(other, **options))
    model = cf_ops.load(checkpoints / name, **options)
    own = made_by(model)
    assert own != expected
    model.swap(other)
    assert made_by(model) == expected and model.directory == str(other)
    model.swap(checkpoints / name)
    assert made_by(model) == own
    model.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_what_does_not_fit_is_refused_and_the_model_goes_on(
    device: str, checkpoints: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    model = cf_ops.load(checkpoints / "neox-d80", device=device)
    own = model.logits(IDS)
    spoilt = revision(checkpoints, tmp_path)
    data = bytearray((spoilt / "model.safetensors").read_bytes())
    data[-64:] = b"\xff" * 64  # NaN
    (spoilt / "model.safetensors").write_bytes(data)
    cut = tmp_path / "cut"
    shutil.copytree(checkpoints / "neox-d80", cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1000])
    for other, message in (
        (checkpoints / "neox-d64-sequential", "swap: expected (hidden_size|num_heads)"),
        (checkpoints / "neox-gptq-sym", "swap: "),
        (spoilt, "nan|NaN|finite"),
        (cut, "truncated"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            model.swap(other)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError):
        model.swap(tmp_path / "missing")
    with pytest.raises(ValueError, match="revision: expected it with a name of the hub"):
        model.swap(spoilt, revision="step1")
    np.testing.assert_array_equal(model.logits(IDS), own)


def test_layers_stay_left_out(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = revision(checkpoints, tmp_path)
    model = cf_ops.load(checkpoints / "neox-d80", layers=1)
    model.swap(other)
    assert model.weights.layers == 1 and model.weights.layers_left_out == 1
    np.testing.assert_array_equal(model.logits(IDS), cf_ops.load(other, layers=1).logits(IDS))


@gpu
def test_a_swap_waits_for_no_call(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = revision(checkpoints, tmp_path)
    model = cf_ops.load(checkpoints / "neox-d80", device="cuda", slots=2, capacity=64)
    with model.generate(IDS, max_new_tokens=8) as generation:
        next(generation)
        with pytest.raises(ValueError, match="swap: expected no call that runs, got 1 slots in use"):
            model.swap(other)
    model.swap(other)
    np.testing.assert_array_equal(model.logits(IDS), cf_ops.load(other, device="cuda").logits(IDS))
