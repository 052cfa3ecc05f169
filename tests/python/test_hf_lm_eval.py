"""lm-evaluation-harness on models with speed_up: the same numbers, all calls on cf_ops."""

import json
import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")
pytest.importorskip("lm_eval", reason="lm_eval is missing")
pytest.importorskip("accelerate", reason="accelerate is missing")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval.tasks
from lm_eval.models.huggingface import HFLM

import cf_ops.hf
import hf_models  # chooses the number of threads

# A choice among continuations, the likelihood of texts, and generated answers.
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "brier_score"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generated": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["~"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}],
    },
}


@pytest.fixture(scope="module")
def directory(root, tmp_path_factory):
    """A checkpoint with a tokenizer whose tokens are ASCII's characters, and the tasks with their data."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    made = tmp_path_factory.mktemp("lm_eval")
    shutil.copytree(root / "data" / "checkpoints" / "neox-d80", made / "model")
    characters = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token=chr(1)))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=chr(0), pad_token=chr(0), model_max_length=512
    ).save_pretrained(made / "model")
    generator = torch.Generator().manual_seed(5)

    def text(length):
        return "".join(chr(i) for i in torch.randint(97, 123, (length,), generator=generator).tolist())

    docs = [
        {"question": text(5 + 7 * i % 40), "choices": [" " + text(3 + i % 4) for i in range(4)], "answer": i % 4}
        for i in range(24)
    ]
    (made / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(made / "docs.jsonl")}},
            "test_split": "test",
            "num_fewshot": 0,
        }
        (made / f"{name}.yaml").write_text(json.dumps(common | task))  # JSON is YAML
    return made


def evaluate(directory, model):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory / "model")
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=5),
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(directory), include_defaults=False),
        bootstrap_iters=0,
    )
    return numbers(results["results"])


def numbers(results):
    return {
        (task, metric): value
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, (int, float))
    }


def test_numbers_are_hugging_faces(directory):
    model = cf_ops.hf.speed_up(hf_models.load_from(directory / "model", torch.float32))
    expected, got = evaluate(directory, hf_models.load_from(directory / "model", torch.float32)), evaluate(
        directory, model
    )
    assert set(got) == set(expected) and {task for task, _ in got} == set(TASKS)
    for name in expected:
        assert got[name] == pytest.approx(expected[name], rel=5e-5), name
    counted = cf_ops.hf.report(model)
    assert counted.share == 1 and counted.cf_ops["forward prefill"] > 0 and counted.cf_ops["greedy step"] > 0

    with torch.no_grad():
        model.gpt_neox.final_layer_norm.weight.mul_(1.01)
    changed = evaluate(directory, model)
    assert any(changed[name] != pytest.approx(expected[name], rel=5e-5) for name in expected)


def test_the_command_line_knows_the_model(directory, tmp_path):
    command = [
        sys.executable,
        "-m",
        "cf_ops.lm_eval",
        "run",
        "--model",
        "cf_ops",
        "--tasks",
        "choice",
        "--device",
        "cpu",
    ]
    command += ["--model_args", f"pretrained={directory / 'model'},dtype=float32", "--include_path", str(directory)]
    command += ["--output_path", str(tmp_path), "--batch_size", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "100.0% of calls on cf_ops" in done.stderr
    (written,) = tmp_path.rglob("results*.json")
    got = numbers(json.loads(written.read_text())["results"])
    expected = evaluate(directory, hf_models.load_from(directory / "model", torch.float32))
    for name in (("choice", "acc,none"), ("choice", "brier_score,none")):
        assert got[name] == pytest.approx(expected[name], rel=5e-5)
