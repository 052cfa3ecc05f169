"""Checkpoints as users have met them, tests/checkpoint/cases, in Python; cf-model's tests read them all."""

import pathlib

import numpy as np
import pytest

import cf_ops

CASES = pathlib.Path(__file__).resolve().parents[1] / "checkpoint" / "cases"
NLL = {  # what expected.py beside the cases prints
    "base-model-names": 6.144497,
    "fp8-block": 27.214913,
    "fp8-channel": 6.666298,
    "gptq-file-name": 6.390460,
    "mixed-dtypes": 6.681919,
    "tied-beside-another-head": 6.224552,
    "window-beyond-the-text": 6.679856,
}


@pytest.mark.parametrize("name", NLL)
def test_a_case_scores_as_hugging_faces_model_does(name: str) -> None:
    model = cf_ops.load(CASES / name, activation="float64")
    assert model.perplexity(np.load(CASES / "ids.npy").reshape(-1)).nll == pytest.approx(NLL[name], abs=6e-7, rel=0)
    noted = {"mixed-dtypes": "is F32, cast to bfloat16", "tied-beside-another-head": "the head counts"}
    assert len(model.notes) == (name in noted) and noted.get(name, "") in "".join(model.notes)


def test_fp8_weights_generate_as_hugging_faces_model_does() -> None:
    model = cf_ops.load(CASES / "fp8-channel")
    assert list(model.generate([5, 7, 11], max_new_tokens=6)) == [28, 21, 21, 21, 21, 21]


def test_a_generation_config_of_a_server_is_no_reason_to_refuse() -> None:
    model = cf_ops.load(CASES / "generation-config-top-k")
    assert list(model.generate([5, 7, 11], max_new_tokens=6)) == [1, 9, 13, 24, 5, 19]


def test_a_sequence_grows_beyond_the_window() -> None:
    model = cf_ops.load(CASES / "window-beyond-the-text")
    assert model.config["sliding_window"] == 64
    prompt = [3 + i % 29 for i in range(60)]
    (result,) = model.generate_batch([prompt], max_new_tokens=12, stop=[])
    assert result.finish == "length" and len(result.ids) == 12
    # A token does not see the first ones once they are as far back as the window; before that it does.
    text, other = prompt + result.ids, [7, *prompt[1:], *result.ids]
    logits, others = model.logits(text), model.logits(other)
    # The one layer makes of a token what the tokens that it sees say.
    assert np.array_equal(logits[64:], others[64:])
    assert (logits[:64] != others[:64]).any(axis=1).all()
