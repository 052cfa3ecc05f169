"""Checkpoints as users have met them, tests/checkpoint/cases, in Python; cf-model's tests read them all."""

import pathlib

import numpy as np
import pytest

import cf_ops

CASES = pathlib.Path(__file__).resolve().parents[1] / "checkpoint" / "cases"
NLL = {  # what expected.py beside the cases prints
    "base-model-names": 6.144497,
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


def test_a_generation_config_of_a_server_is_no_reason_to_refuse() -> None:
    model = cf_ops.load(CASES / "generation-config-top-k")
    assert list(model.generate([5, 7, 11], max_new_tokens=6)) == [1, 9, 13, 24, 5, 19]


def test_the_token_that_would_leave_the_window_is_refused() -> None:
    model = cf_ops.load(CASES / "window-beyond-the-text")
    assert model.config["sliding_window"] == 64
    prompt = [3 + i % 29 for i in range(60)]
    assert len(list(model.generate(prompt, max_new_tokens=5, stop=[]))) == 5
    reached = "the config's sliding_window of 64 entries is reached after 5 new tokens"
    with pytest.raises(cf_ops.CfError, match=reached):
        list(model.generate(prompt, max_new_tokens=6, stop=[]))
    (result,) = model.generate_batch([prompt], max_new_tokens=6, stop=[])
    assert result.finish == "failed" and len(result.ids) == 5 and reached in str(result.error)
    with pytest.raises(ValueError, match="prompt: expected at most 64 ids, the config's sliding_window, got 65"):
        model.generate(prompt + [3] * 5)
    with pytest.raises(ValueError, match="expected at most 64 entries, the config's sliding_window, got 65"):
        model.logits(prompt + [3] * 5)
