"""lm-evaluation-harness on cf_ops.Model: the answers of Hugging Face's HFLM, request by request, without torch."""

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

import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file

import cf_ops
import cf_ops.lm_eval
import hf_models
from cf_ops import _core
from cuda_models import Oracle, gpu
from test_hf_lm_eval import directory, numbers  # directory is a fixture

Native = cf_ops.lm_eval.register_native()
CHARACTERS = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture(scope="module")
def models(directory):
    """Hugging Face's, in float64, and ours."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory / "model")
    exact = hf_models.load_from(directory / "model", torch.float64)
    # Contexts of 40 ids at most, so that some requests are cut.
    return HFLM(pretrained=exact, tokenizer=tokenizer, batch_size=3, max_length=40), Native(
        str(directory / "model"), batch_size=3, max_length=40
    )


def text(generator, length):
    return "".join(CHARACTERS[i] for i in torch.randint(0, 27, (length,), generator=generator).tolist())


def requests(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def allowed(theirs, texts):
    """How far the log-probability of an id of float32 arithmetic may be from float64's."""
    furthest = 0.0
    for one in texts:
        ids = torch.tensor(theirs.tok_encode(one)[:39] or [0])
        with torch.no_grad():
            largest = float(theirs.model(ids[None]).logits.abs().max())
        furthest = max(furthest, 2 * hf_models.ErrorBound(theirs.model, ids).relative * largest)
    return furthest


def test_loglikelihoods_are_hflms(models):
    theirs, ours = models
    generator = torch.Generator().manual_seed(1)
    arguments = [("", text(generator, 5)), ("ab ", "c d"), (text(generator, 60), text(generator, 9))]
    for length in (1, 7, 30):
        context = text(generator, length).strip() or "x"
        arguments += [(context, " " + text(generator, n)) for n in (1, 1, 4)]
    greedy = ours.model.generate([ord(c) for c in "the"], max_new_tokens=6, stop=())
    arguments.append(("the", "".join(map(chr, greedy))))  # the tokenizer's ids are those of characters
    bound = allowed(theirs, [a + b for a, b in arguments[2:5]])
    wanted = theirs.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
    made = ours.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)
    for (context, continuation), (exact, is_greedy), (got, greedy_too) in zip(arguments, wanted, made):
        assert got == pytest.approx(exact, abs=bound * (len(continuation) + 1)), (context, continuation)
        assert greedy_too == is_greedy
    assert wanted[-1][1]


def test_rolling_loglikelihoods_are_hflms(models):
    theirs, ours = models
    generator = torch.Generator().manual_seed(2)
    arguments = [(text(generator, length),) for length in (1, 20, 39, 40, 41, 100)]
    bound = allowed(theirs, [a[0] for a in arguments[-1:]])
    wanted = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", arguments), disable_tqdm=True)
    made = ours.loglikelihood_rolling(requests("loglikelihood_rolling", arguments), disable_tqdm=True)
    for (one,), exact, got in zip(arguments, wanted, made):
        assert got == pytest.approx(exact, abs=bound * len(one))


def test_answers_are_hflms(models):
    theirs, ours = models
    generator = torch.Generator().manual_seed(3)
    contexts = [text(generator, length) for length in (3, 12, 60, 25, 1)]
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    arguments = [(context, settings) for context in contexts]
    free = theirs.generate_until(requests("generate_until", arguments), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", arguments), disable_tqdm=True) == free
    assert all(len(answer) > 4 for answer in free)
    ends = [(context, settings | {"until": [answer[3:5], "~~"]}) for context, answer in zip(contexts, free)]
    wanted = theirs.generate_until(requests("generate_until", ends), disable_tqdm=True)
    made = ours.generate_until(requests("generate_until", ends), disable_tqdm=True)
    assert made == wanted and all(len(answer) <= 3 for answer in made)


def test_a_sweep_runs_tasks_on_the_model_itself(directory, tmp_path):
    steps = [str(tmp_path / f"model-step{step}") for step in (1, 2)]
    for place, step in enumerate(steps):
        shutil.copytree(directory / "model", step)
        tensors = load_file(f"{step}/model.safetensors")
        tensors["gpt_neox.final_layer_norm.weight"] *= 1 + 0.05 * place
        save_file(tensors, f"{step}/model.safetensors", {"format": "pt"})
    (tmp_path / "both.yaml").write_text(json.dumps({"group": "both", "task": ["choice", "rolling"]}))
    manager = lm_eval.tasks.TaskManager(include_path=[str(directory), str(tmp_path)], include_defaults=False)
    options = {"task_manager": manager, "bootstrap_iters": 10}
    seen = []

    def watched(model):
        seen.append(model)
        return cf_ops.lm_eval.task("choice", **options)(model)

    made = cf_ops.sweep(steps, {"choice": watched, "both": cf_ops.lm_eval.task("both", limit=7, **options)})
    assert [r.error for r in made.revisions] == [None, None] and seen[0] is seen[1]
    for step, row in zip(steps, made.revisions):
        for name, limit in (("choice", None), ("both", 7)):
            found = lm_eval.simple_evaluate(Native(step), tasks=[name], limit=limit, **options)["results"]
            expected = {
                f"{name}.{'' if task == name else task + '.'}{key.replace('_stderr', '').partition(',')[0]}"
                + (".error" if "_stderr," in key else ""): value
                for (task, key), value in numbers(found).items()
                if "," in key
            }
            assert {n: v for n, v in row.metrics.items() if n.startswith(f"{name}.")} == expected and expected
    assert {
        "choice.acc",
        "choice.acc.error",
        "choice.brier_score",
        "both.choice.acc",
        "both.rolling.bits_per_byte",
    } <= set(made.metrics)
    assert (
        made.revisions[0].metrics["both.rolling.bits_per_byte"]
        != made.revisions[1].metrics["both.rolling.bits_per_byte"]
    )


def test_a_task_that_nobody_knows_is_refused(directory):
    manager = lm_eval.tasks.TaskManager(include_path=str(directory), include_defaults=False)
    with pytest.raises(ValueError, match="task: expected a task or a group of lm_eval .*, got 'none'"):
        cf_ops.lm_eval.task("none", task_manager=manager)


def test_an_open_model_stays_open_and_takes_no_options(directory):
    with cf_ops.load(directory / "model") as model:
        ours = Native(model, max_length=40)
        assert ours.model is model and ours.slots == model.slots_for(16) and ours.max_length == 40
        for options, name in (({"device": "cpu"}, "device"), ({"activation": "float64"}, "activation")):
            with pytest.raises(ValueError, match=f"pretrained: expected no {name} beside an open model"):
                Native(model, **options)


@gpu
def test_likelihoods_on_a_gpu_are_the_cpus_within_the_bound(models, directory):
    _, ours = models
    on_gpu = Native(str(directory / "model"), device="cuda", batch_size=3, max_length=40)
    assert on_gpu.model.device == "cuda:0" and on_gpu.model.slots == 3
    weights = _core.Weights.open(str(directory / "model"))
    generator = torch.Generator().manual_seed(4)

    def allowed(string):
        ids = on_gpu.tok_encode(string)
        return 2 * max(Oracle(weights, ids[i : i + 40], "float16").allowed for i in range(0, len(ids), 40)) * len(ids)

    arguments = [(text(generator, n).strip() or "x", " " + text(generator, 4)) for n in (1, 7, 30, 7, 20)]
    pairs = (model.loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True) for model in (ours, on_gpu))
    for (context, continuation), (exact, _), (got, _) in zip(arguments, *pairs):
        assert got == pytest.approx(exact, abs=allowed(context + continuation))
    texts = [(text(generator, n),) for n in (1, 40, 100)]
    sums = (
        model.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)
        for model in (ours, on_gpu)
    )
    for (one,), exact, got in zip(texts, *sums):
        assert got == pytest.approx(exact, abs=allowed(one))


def test_chats_are_rendered_by_the_checkpoints_template(directory, tmp_path):
    shutil.copytree(directory / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}>")
    ours = Native(str(tmp_path / "model"))
    assert ours.apply_chat_template([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == "a|b|>"
    with pytest.raises(ValueError, match="gen_prefix: expected none with a chat template"):
        ours.apply_chat_template([{"role": "assistant", "content": "a"}], add_generation_prompt=False)


def test_bad_requests_are_refused(models, directory):
    _, ours = models
    for settings, message in (
        ({"until": [], "max_gen_toks": 40}, "max_gen_toks: expected at most 39, below max_length, got 40"),
        (
            {"until": [], "max_gen_toks": 4, "num_beams": 4},
            "generation_kwargs: expected settings of cf_ops, got 'num_beams'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ours.generate_until(requests("generate_until", [("ab", settings)]), disable_tqdm=True)
    with pytest.raises(ValueError, match="continuation: expected 1 to 40 ids, got 50"):
        ours.loglikelihood(requests("loglikelihood", [("ab", "c" * 50)]), disable_tqdm=True)
    with pytest.raises(ValueError, match="batch_size: expected"):
        Native(str(directory / "model"), batch_size=0)


WITHOUT_TORCH = """
import importlib.util, runpy, sys
find_spec = importlib.util.find_spec
def is_missing(name):
    return name.partition(".")[0] in ("torch", "transformers", "accelerate")
class Missing:
    def find_spec(self, name, path=None, target=None):
        if is_missing(name):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
importlib.util.find_spec = lambda name, package=None: None if is_missing(name) else find_spec(name, package)
runpy.run_module("cf_ops.lm_eval", run_name="__main__")
"""


def test_the_command_line_needs_no_torch(directory, tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH, "run", "--model", "cf_ops_native", "--batch_size", "4"]
    command += ["--tasks", "choice,rolling,generated", "--include_path", str(directory)]
    command += ["--model_args", f"pretrained={directory / 'model'}", "--output_path", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = tmp_path.rglob("results*.json")
    got = numbers(json.loads(written.read_text())["results"])
    assert {task for task, _ in got} == {"choice", "rolling", "generated"}
    assert got["choice", "brier_score,none"] > 0 and got["rolling", "byte_perplexity,none"] > 1
