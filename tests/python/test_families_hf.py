"""Every family against transformers' own model in float64, with random weights: taps of a whole model, and its logits.

A family is here once core/families has it. The tensors are written as save_pretrained writes them.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")
pytest.importorskip("safetensors", reason="safetensors is missing")

import cf_ops.hf
import hf_model  # in golden/tools, as the others are
from cf_ops import _core
from families import FAMILIES
from hf_models import ErrorBound, load_from, padded
from make_checkpoints import Spec, write
from model_config import Model

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
IDS = padded([23])["input_ids"][0].numpy()


def model_of(model_type):
    """A small model: fields that change what is computed have other values than the family's defaults."""
    read = {field["key"] for field in FAMILIES[model_type]["fields"] if field["use"].startswith("read")}
    other = {
        "attention_bias": not Model(**SIZES, model_type=model_type).attention_bias,
        "rotary_fraction": 0.5,
        "rope_theta": 500.0,
        "layer_norm_eps": 1e-3,
        "tie_word_embeddings": not Model(**SIZES, model_type=model_type).tie_word_embeddings,
    }
    return Model(**SIZES, model_type=model_type, **{key: value for key, value in other.items() if key in read})


def relative_l2(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_is_hugging_faces_in_float64(model_type, tmp_path):
    model = model_of(model_type)
    directory = write(Spec(model_type, "float32", model), str(tmp_path), "test")
    weights, _, stored = hf_model.Checkpoint(directory).whole()
    implementation = hf_model.attention_implementations()[-1]
    reference = hf_model.build_causal(model, weights, stored, "float64", implementation, "cpu")
    taps, tables = hf_model.run_model(hf_model.widen_norms(reference), model, IDS)
    logits = taps.pop("logits")

    runner = _core.Runner(_core.Weights.open(directory), capacity=len(IDS), chunk=7, activation="float64")
    if tables:
        runner.set_rope_table(*(tables[name].astype(np.float32) for name in ("cos", "sin")))
    ours, ours_taps = runner.run(0, 0, IDS, len(IDS), list(taps))
    assert len(taps) == model.num_hidden_layers + 2
    for name, tap in taps.items():
        assert relative_l2(ours_taps[name], tap) <= 1e-11, name
    assert relative_l2(ours, logits) <= 1e-10

    # The same through speed_up, in float32.
    fast = cf_ops.hf.speed_up(load_from(directory, torch.float32))
    rows, _ = cf_ops.hf.run(fast, torch.from_numpy(IDS)[None])
    bound = ErrorBound(reference, torch.from_numpy(IDS)).relative
    assert np.abs(rows[0].numpy() - logits).max() <= bound * np.abs(logits).max()
    assert cf_ops.hf.report(fast).hugging_face == {}
