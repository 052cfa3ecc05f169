"""What generate() takes: log-probabilities, stop texts, echo, samples, changes of the logits, chats, async, ends."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import pathlib
import pickle
import shutil
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import cf_ops

pytest.importorskip("tokenizers", reason="prompts are texts")

PROMPT = "def __len__(self):\n    return "
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 3}


@pytest.fixture(scope="module")
def model(checkpoints: pathlib.Path) -> cf_ops.Model:
    return cf_ops.load(checkpoints / "stdlib-4m")


def log_softmax(logits: Any) -> Any:
    logits = np.asarray(logits, np.float64)
    most = logits.max(axis=-1, keepdims=True)
    return logits - most - np.log(np.exp(logits - most).sum(axis=-1, keepdims=True))


def forced(ids: list[int], prompt: int) -> Any:
    """A logits processor that makes these ids behind so many of the prompt."""

    def process(row: Any, seen: Any) -> Any:
        row[:] = -np.inf
        row[ids[len(seen) - prompt]] = 0
        return row

    return process


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, DRAWN, {"logit_bias": {5: 3.0}, **DRAWN}])
def test_logprobs_are_those_of_the_raw_logits(model: cf_ops.Model, settings: dict[str, Any]) -> None:
    generation = model.generate(PROMPT, max_new_tokens=12, ignore_eos=True, logprobs=4, **settings)
    pieces = list(generation)
    result = generation.result
    assert "".join(pieces) == result.text and result.logprobs is not None and result.top_logprobs is not None
    if "logit_bias" not in settings:
        assert result.ids == list(model.generate(result.prompt, max_new_tokens=12, ignore_eos=True, **settings))
    expected = log_softmax(model.logits(result.prompt + result.ids[:-1])[len(result.prompt) - 1 :])
    assert len(result.logprobs) == len(result.top_logprobs) == 12
    for row, id, logprob, top in zip(expected, result.ids, result.logprobs, result.top_logprobs):
        assert abs(logprob - row[id]) < 1e-4  # a prompt's sums are taken in another order than a step's
        assert list(top) == np.argsort(-row, kind="stable")[:4].tolist()
        assert max(abs(value - row[other]) for other, value in top.items()) < 1e-4
    batch = model.generate_batch([PROMPT, "import "], max_new_tokens=12, ignore_eos=True, logprobs=0, **settings)
    assert (batch[0].ids, batch[0].logprobs) == (result.ids, pytest.approx(result.logprobs, abs=1e-5))
    assert batch[0].top_logprobs == [{}] * 12
    assert model.generate_batch([PROMPT], max_new_tokens=2)[0].logprobs is None


def test_logprobs_are_those_of_hugging_face_in_float64(checkpoints: pathlib.Path) -> None:
    torch = pytest.importorskip("torch", reason="Hugging Face needs it")
    transformers = pytest.importorskip("transformers", reason="it is what is compared with")
    oracle = cf_ops.load(checkpoints / "stdlib-4m", activation="float64")
    (result,) = oracle.generate_batch([PROMPT], max_new_tokens=16, ignore_eos=True, logprobs=5, **DRAWN)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / "stdlib-4m", torch_dtype=torch.float64)
    with torch.no_grad():
        logits = theirs(torch.tensor([result.prompt + result.ids])).logits[0, len(result.prompt) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1).numpy()
    assert result.logprobs is not None and result.top_logprobs is not None
    # Both compute RoPE's angles in float32, and round them apart.
    assert np.abs(expected[np.arange(16), result.ids] - result.logprobs).max() < 1e-6
    for row, top in zip(expected, result.top_logprobs):
        assert list(top) == np.argsort(-row, kind="stable")[:5].tolist()
        assert np.abs(row[list(top)] - list(top.values())).max() < 1e-6
    # Of the same logits the log-probabilities are the same.
    ours = torch.tensor(oracle.logits(result.prompt + result.ids)[len(result.prompt) - 1 : -1])
    assert np.abs(torch.log_softmax(ours, dim=-1).numpy()[np.arange(16), result.ids] - result.logprobs).max() < 1e-11


# --- changes of the logits --------------------------------------------------------------------------------------------


def test_changes_that_change_nothing_leave_the_ids(model: cf_ops.Model) -> None:
    prompts = [PROMPT, "import os", "class A:"]
    for settings in ({}, DRAWN):
        expected = [r.ids for r in model.generate_batch(prompts, max_new_tokens=12, stop=(), **settings)]
        for change in ({"logit_bias": {7: 0.0}}, {"logits_processor": lambda row, ids: row}, {"min_new_tokens": 12}):
            results = model.generate_batch(prompts, max_new_tokens=12, stop=(), **settings, **change)
            assert [r.ids for r in results] == expected


def test_biases_penalties_and_least_lengths(model: cf_ops.Model) -> None:
    prompt = model.encode(PROMPT)
    greedy = list(model.generate(prompt, max_new_tokens=16, stop=()))
    assert list(model.generate(prompt, max_new_tokens=3, stop=(), logit_bias={9: 100})) == [9] * 3
    without = list(model.generate(prompt, max_new_tokens=16, stop=(), logit_bias={greedy[2]: -math.inf}))
    assert without[:2] == greedy[:2] and greedy[2] not in without
    assert list(model.generate(prompt, max_new_tokens=9, stop=[greedy[1]]))[-1] == greedy[1]
    longer = model.generate_batch([prompt], max_new_tokens=9, min_new_tokens=7, stop=[greedy[1]])[0]
    assert len(longer.ids) >= 7 and greedy[1] not in longer.ids[:7]

    def penalised(row: Any, ids: Any) -> Any:
        counts = np.bincount(ids[len(prompt) :], minlength=row.size)
        return row - 1.5 * counts - 0.5 * (counts > 0)

    settings: dict[str, Any] = {"max_new_tokens": 24, "stop": ()}
    by_options = list(model.generate(prompt, frequency_penalty=1.5, presence_penalty=0.5, **settings))
    assert by_options == list(model.generate(prompt, logits_processor=penalised, **settings))
    assert len(set(by_options)) > len(set(model.generate(prompt, **settings)))


def test_ignore_eos_leaves_out_the_checkpoints_ids_alone(model: cf_ops.Model) -> None:
    (eos,) = model.eos_token_ids
    ids = [5, eos, 6, 7, 8]
    process = forced(ids, 3)
    options: dict[str, Any] = {"max_new_tokens": 5, "logits_processor": process}
    assert list(model.generate([1, 2, 3], **options)) == ids[:2]
    assert list(model.generate([1, 2, 3], ignore_eos=True, **options)) == ids
    assert list(model.generate([1, 2, 3], ignore_eos=True, stop=[7], **options)) == ids[:4]


def test_a_logits_processor_sees_the_logits_and_the_ids(model: cf_ops.Model) -> None:
    prompt = model.encode(PROMPT)
    seen: list[list[int]] = []
    rows = []

    def process(row: Any, ids: Any) -> Any:
        assert row.dtype == np.float32 and row.shape == (model.config["vocab_size"],) and ids.dtype == np.int32
        seen.append(ids.tolist())
        rows.append(row.copy())
        return row.tolist()  # whatever numpy takes

    ids = list(model.generate(prompt, max_new_tokens=4, stop=(), logits_processor=process))
    assert seen == [prompt + ids[:n] for n in range(4)]
    assert np.allclose(rows, model.logits(prompt + ids[:-1])[len(prompt) - 1 :], atol=1e-4)


def test_what_a_logits_processor_raises_is_raised(model: cf_ops.Model) -> None:
    class Mine(Exception):
        pass

    def after(error: type[BaseException], ids: int) -> Any:
        def process(row: Any, seen: Any) -> Any:
            if len(seen) > ids:
                raise error("mine")
            return row

        return process

    generation = model.generate([1, 2, 3], max_new_tokens=9, stop=(), logits_processor=after(Mine, 4))
    with pytest.raises(Mine, match="mine"):
        list(generation)
    assert len(generation.ids) == 2 and generation.finish == "failed"
    with pytest.raises(cf_ops.GenerationInterrupted) as interrupted:
        model.generate_batch([[1], [2]], max_new_tokens=9, stop=(), logits_processor=after(KeyboardInterrupt, 2))
    assert [r.finish for r in interrupted.value.results] == ["interrupted"] * 2
    for made, error, message in (
        (lambda row, ids: None, TypeError, "logits_processor: expected the row of logits in return, got NoneType"),
        (lambda row, ids: row[:5], ValueError, "expected a row of the shape (2048,) in return, got (5,)"),
        (lambda row: row, TypeError, "takes 1 positional argument"),
    ):
        with pytest.raises(error) as raised:
            list(model.generate([1, 2, 3], logits_processor=made))
        assert message in str(raised.value)
    failed = model.generate_batch([[1, 2]], logits_processor=lambda row, ids: row * np.float32("nan"))[0]
    assert failed.finish == "failed" and "logits[0] is NaN" in str(failed.error)


def test_a_generation_that_its_processor_knows_is_freed_when_it_is_left(model: cf_ops.Model) -> None:
    def left() -> Any:
        known: list[Any] = []
        generation = model.generate([1], logits_processor=lambda row, ids: row if known else None)
        known.append(generation)
        next(generation)
        return weakref.ref(generation._session)

    session = left()
    gc.collect()
    assert session() is None


# --- stop texts, echo, samples ----------------------------------------------------------------------------------------


def test_stop_texts_meet_the_borders_of_tokens_and_of_characters(model: cf_ops.Model) -> None:
    """No token of the tokenizer is "漢": its bytes come one by one."""
    tokenizer = model.tokenizer
    assert len(model.encode("漢")) == 3
    text = "return a漢b + 漢字, end"
    ids = model.encode(text)
    options: dict[str, Any] = {"max_new_tokens": len(ids), "logits_processor": forced(ids, len(model.encode(PROMPT)))}
    for stop in ("漢字", "n a漢b", "字", "rn", "d", "zz"):
        end = text.find(stop) if stop in text else len(text)
        generation = model.generate(PROMPT, stop=stop, ignore_eos=True, **options)
        shown = ""
        for piece in generation:
            shown += piece
            assert text[:end].startswith(shown)
            # No more is held back than what a stop text may begin with, or an open character.
            whole = tokenizer.decode(generation.ids).rstrip("\ufffd")
            held = whole[len(shown) :]
            assert held == "" or stop.startswith(held) or generation.finish == "stop"
        assert shown == generation.text == text[:end] and "\ufffd" not in shown
        assert generation.finish == ("length" if end == len(text) else "stop")
        (batch,) = model.generate_batch([PROMPT], stop=[stop, "never"], ignore_eos=True, **options)
        assert batch.text == text[:end] and batch.ids == generation.ids
        # It ends with the first id whose text has the stop text.
        assert batch.finish == "length" or stop not in tokenizer.decode(batch.ids[:-1])


def test_an_echo_has_the_prompts_logprobs(model: cf_ops.Model) -> None:
    prompts = [model.encode(PROMPT), [5], model.encode("import os")]
    made = model.generate_batch(prompts, n=2, max_new_tokens=2, echo=True, logprobs=2)
    for prompt, one, other in zip(prompts, made[::2], made[1::2]):
        assert one.prompt_logprobs is not None and one.prompt_top_logprobs is not None
        assert len(one.prompt_logprobs) == len(one.prompt_top_logprobs) == len(prompt)
        assert one.prompt_logprobs[0] is None and one.prompt_top_logprobs[0] is None
        assert (one.prompt_logprobs, one.prompt_top_logprobs) == (other.prompt_logprobs, other.prompt_top_logprobs)
        if len(prompt) > 1:
            (scored,) = model.score([prompt], top=2)
            assert one.prompt_logprobs[1:] == scored.log_probs.tolist()
            assert [list(top) for top in one.prompt_top_logprobs[1:] if top] == scored.top_ids.tolist()
    generation = model.generate(PROMPT, max_new_tokens=1, echo=True, logprobs=0)
    assert list(generation)[0] == PROMPT and generation.result.prompt_logprobs == made[0].prompt_logprobs
    assert model.generate_batch([PROMPT], max_new_tokens=1, echo=True)[0].prompt_logprobs is None
    assert model.generate_batch([PROMPT], max_new_tokens=1, logprobs=1)[0].prompt_logprobs is None


def test_echo_gives_the_prompt_first(model: cf_ops.Model, checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    plain = model.generate_batch([PROMPT], max_new_tokens=8)[0]
    generation = model.generate(PROMPT, max_new_tokens=8, echo=True)
    pieces = list(generation)
    assert pieces[0] == PROMPT and "".join(pieces) == generation.text == f"{PROMPT}{plain.text}"
    assert generation.ids == plain.ids
    ids = model.encode(PROMPT)
    assert list(model.generate(ids, max_new_tokens=8, echo=True)) == ids + plain.ids
    # A stop text in the prompt ends nothing.
    assert model.generate_batch(["a.b"], max_new_tokens=1, echo=True, stop=["."])[0].ids != []
    # Where a text's first word has no space, the first word behind a prompt has one.
    from tokenizers import Tokenizer, decoders, models

    shutil.copytree(checkpoints / "stdlib-4m", tmp_path / "words")
    words = Tokenizer(models.WordLevel({"▁the": 0, "▁fox": 1, "▁runs": 2, "<unk>": 3}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    other = cf_ops.load(tmp_path / "words")
    options: dict[str, Any] = {"max_new_tokens": 2, "ignore_eos": True, "logits_processor": forced([1, 2], 1)}
    assert "".join(other.generate("▁the", echo=True, **options)) == "▁the fox runs"
    assert other.generate_batch(["▁the"], echo=True, stop="run", **options)[0].text == "▁the fox "
    assert other.generate_batch(["▁the"], **options)[0].text == "fox runs"


def test_samples_of_a_prompt_differ_and_the_first_is_what_it_is_given_alone(model: cf_ops.Model) -> None:
    prompts = [PROMPT, "import "]
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12, "stop": ()}
    alone = model.generate_batch(prompts, **drawn)
    three = model.generate_batch(prompts, n=3, **drawn)
    assert [r.prompt for r in three] == [alone[0].prompt] * 3 + [alone[1].prompt] * 3
    assert [three[0].ids, three[3].ids] == [r.ids for r in alone]
    assert len({tuple(r.ids) for r in three}) == 6
    assert [r.ids for r in model.generate_batch(prompts, n=3, slots=2, **drawn)] == [r.ids for r in three]
    assert all(r.text == model.tokenizer.decode(r.ids) for r in three)
    greedy = model.generate_batch([PROMPT], n=2, max_new_tokens=4, stop=())
    assert greedy[0].ids == greedy[1].ids


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temprature": 1}, TypeError, "expected options among max_new_tokens, min_new_tokens, temperature"),
    ({"min_new_tokens": 33}, ValueError, "min_new_tokens: expected at most max_new_tokens, 32, got 33"),
    ({"min_new_tokens": -1}, ValueError, "min_new_tokens: expected 0 to"),
    ({"logprobs": -1}, ValueError, "logprobs: expected 0 to"),
    ({"logprobs": True}, TypeError, "logprobs: expected an integer, got True"),
    ({"logprobs": 2049}, ValueError, "logprobs: expected 0 to 2048 alternatives, got 2049"),
    ({"logit_bias": [1]}, TypeError, "logit_bias: expected biases by id, got list"),
    ({"logit_bias": {2048: 1}}, ValueError, "logit_bias: expected ids of 0 to 2047, got 2048"),
    ({"logit_bias": {"a": 1}}, TypeError, "logit_bias: expected an integer, got 'a'"),
    ({"logit_bias": {1: math.inf}}, ValueError, "logit_bias[1]: expected a float32 below infinity, got inf"),
    ({"logit_bias": {1: math.nan}}, ValueError, "logit_bias[1]: expected a float32 below infinity, got nan"),
    ({"logit_bias": {1: 1e39}}, ValueError, "logit_bias[1]: expected a float32 below infinity"),
    ({"frequency_penalty": 3}, ValueError, "frequency_penalty: expected -2 to 2"),
    ({"presence_penalty": "1"}, TypeError, "presence_penalty: expected a number, got '1'"),
    ({"logits_processor": 3}, TypeError, "logits_processor: expected a function of the logits and the ids, got int"),
    ({"ignore_eos": 1}, TypeError, "ignore_eos: expected True or False, got 1"),
    ({"echo": None}, TypeError, "echo: expected True or False, got None"),
]


@pytest.mark.parametrize("options, error, message", REFUSED)
def test_options_without_meaning_are_refused(
    model: cf_ops.Model, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    for call in (model.generate, model.agenerate, lambda p, **o: model.generate_batch([p], **o)):
        with pytest.raises(error) as refused:
            call([1, 2], **options)  # type: ignore[operator]
        assert message in str(refused.value) and "\n" not in str(refused.value)


def test_batches_refuse_what_they_cannot_sample(model: cf_ops.Model) -> None:
    for options, message in (({"n": 0}, "n: expected 1 to 1024, got 0"), ({"progress": 1}, "progress: expected True")):
        with pytest.raises((ValueError, TypeError), match=message):
            model.generate_batch([[1]], **options)  # type: ignore[arg-type]


# --- chats ------------------------------------------------------------------------------------------------------------

TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('roles are three') }}{% endif %}
<{{ m['role'] }}>{% generation %}{{ m['content'] | trim }}{% endgeneration %}{{ eos_token }}
{% if loop.last and add_generation_prompt %}<assistant>{% endif %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""
MESSAGES = [{"role": "system", "content": "short  "}, {"role": "user", "content": "Is 漢 a word?"}]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory, checkpoints: pathlib.Path) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("chat") / "stdlib"
    shutil.copytree(checkpoints / "stdlib-4m", directory)
    token = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    config = {"bos_token": token, "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_chat_is_encoded_by_the_checkpoints_template(chatty: pathlib.Path) -> None:
    pytest.importorskip("jinja2", reason="templates are its")
    model = cf_ops.load(chatty)
    end = "<|endoftext|>"
    text = f"{end}<system>short{end}\n<user>Is 漢 a word?{end}\n<assistant>"
    ids = model.encode_chat(MESSAGES)
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert model.tokenizer.decode(
        model.encode_chat(MESSAGES, add_generation_prompt=False, tools=[{"é": 1}]), skip_special_tokens=False
    ) == text.replace("<assistant>", '[{"é": 1}]')
    generation = model.chat(MESSAGES, max_new_tokens=6, ignore_eos=True)
    expected = model.generate_batch([ids], max_new_tokens=6, ignore_eos=True)[0].ids
    assert "".join(generation) == generation.text == model.tokenizer.decode(expected)
    transformers = pytest.importorskip("transformers", reason="it is what is compared with")
    theirs = transformers.AutoTokenizer.from_pretrained(chatty)
    for prompted in (False, True):
        rendered = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompted)
        assert model.encode_chat(MESSAGES, add_generation_prompt=prompted) == theirs.encode(
            rendered, add_special_tokens=False
        )


def test_chats_that_cannot_be_are_refused(
    model: cf_ops.Model, chatty: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2", reason="templates are its")
    with pytest.raises(
        FileNotFoundError, match="tokenizer_config.json: no chat template, expected chat_template.jinja"
    ):
        model.chat(MESSAGES)
    good = cf_ops.load(chatty)
    for messages, error, message in (
        ("hello", TypeError, "messages: expected a list of messages, got str"),
        ([{"content": "a"}], TypeError, r"messages\[0\]: expected a dict with 'role' and 'content', got dict"),
        ([{"role": "tool", "content": "a"}], ValueError, "the chat template: roles are three"),
    ):
        with pytest.raises(error, match=message) as refused:
            good.encode_chat(messages)  # type: ignore[arg-type]
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="echo: expected False for a chat"):
        good.chat(MESSAGES, echo=True)
    shutil.copytree(chatty, tmp_path / "own")
    path = tmp_path / "own" / "chat_template.jinja"
    for source, message in (
        ("{% if %}", "the chat template: "),
        ("{{ ''.__class__.mro() }}", "chat template: .*unsafe"),
    ):
        path.write_text(source)
        with pytest.raises(ValueError, match=message):
            cf_ops.load(tmp_path / "own").encode_chat(MESSAGES)
    path.write_text("{{ messages[1].content }}")  # it counts before the config's
    assert cf_ops.load(tmp_path / "own").encode_chat(MESSAGES) == good.encode("Is 漢 a word?")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match="a chat needs the package jinja2, which is missing: pip install jinja2"):
        cf_ops.load(chatty).chat(MESSAGES)


# --- async, blocks, notebooks, other processes ------------------------------------------------------------------------


def test_async_pieces_are_those_of_generate(model: cf_ops.Model) -> None:
    async def texts(prompt: str) -> list[str]:
        return [piece async for piece in model.agenerate(prompt, max_new_tokens=8, stop=())]

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(texts(PROMPT), texts("import ")))

    expected = [list(model.generate(prompt, max_new_tokens=8, stop=())) for prompt in (PROMPT, "import ")]
    assert asyncio.run(both()) == expected

    async def failed() -> None:
        async for _ in model.agenerate([1], logits_processor=lambda row, ids: row * np.float32("nan")):
            pass

    with pytest.raises(cf_ops.CfError, match="is NaN"):
        asyncio.run(failed())


def test_a_cancelled_task_ends_its_sequence_with_the_step_under_way(model: cf_ops.Model) -> None:
    async def cancelled() -> cf_ops.AsyncGeneration[int]:
        generation = model.agenerate([1, 2, 3], max_new_tokens=2000, stop=())

        async def consume() -> None:
            async for _ in generation:
                pass

        task = asyncio.create_task(consume())
        while not generation.generation.ids:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return generation

    generation = asyncio.run(cancelled())
    assert generation.result.finish == "interrupted" and 0 < len(generation.result.ids) < 2000

    async def left() -> str:
        async with model.agenerate([1, 2, 3], max_new_tokens=50, stop=()) as generation:
            async for _ in generation:
                break
        return generation.result.finish

    assert asyncio.run(left()) == "interrupted"


def test_blocks_notebooks_and_pickles(checkpoints: pathlib.Path) -> None:
    with cf_ops.load(checkpoints / "stdlib-4m") as model:
        with model.generate([1, 2, 3], max_new_tokens=9, stop=()) as generation:
            next(generation)
        assert (generation.finish, len(generation.ids)) == ("interrupted", 1)
        assert repr(generation) == "cf_ops.Generation(1 new ids, finish='interrupted')"
    assert repr(model.agenerate([1])) == "cf_ops.AsyncGeneration(0 new ids, finish='running')"
    page = model._repr_html_()
    assert page.startswith("<table>") and "stdlib-4m" in page and "gpt_neox" in page and len(page) < 1000
    decoder = model.decoder(1, 8)
    for value, message in (
        (model, "a Model cannot be pickled: call cf_ops.load"),
        (generation, "a Generation cannot be pickled"),
        (model.agenerate([1]), "a Generation cannot be pickled"),
        (decoder, "cannot pickle 'cf_ops._core.Decoder' object|cannot pickle 'Decoder' object"),
    ):
        with pytest.raises(TypeError, match=message):
            pickle.dumps(value)
    result = pickle.loads(pickle.dumps(generation.result))
    assert result == generation.result


# --- the command ------------------------------------------------------------------------------------------------------


def generate(*arguments: str) -> tuple[str, str, int]:
    """What the command prints, and how it exits."""
    done = subprocess.run(
        [sys.executable, "-m", "cf_ops", "generate", *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout, done.stderr, done.returncode


def test_the_command_takes_the_options(
    model: cf_ops.Model, chatty: pathlib.Path, checkpoints: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    report = tmp_path / "report.json"
    directory = str(checkpoints / "stdlib-4m")
    settings = ["--model", directory, "--prompt", "import ", "--max-new-tokens", "6", "--json", str(report)]
    settings += ["--n", "2", "--temperature", "1", "--seed", "4", "--ignore-eos", "--logprobs", "2", "--echo"]
    settings += ["--logit-bias", "11:-inf,5:1.5", "--min-new-tokens", "3", "--presence-penalty", "0.5"]
    out, err, code = generate(*settings)
    assert code == 0, err
    results = model.generate_batch(
        ["import "],
        n=2,
        max_new_tokens=6,
        min_new_tokens=3,
        temperature=1,
        seed=4,
        ignore_eos=True,
        logprobs=2,
        echo=True,
        logit_bias={11: -math.inf, 5: 1.5},
        presence_penalty=0.5,
    )
    assert out == "".join(f"0.{i}: {r.text}\n" for i, r in enumerate(results))
    made = json.loads(report.read_text())["sequences"]
    assert [s["ids"] for s in made] == [r.ids for r in results]
    assert made[0]["logprobs"] == pytest.approx(results[0].logprobs) and len(made[0]["top_logprobs"][0]) == 2
    pytest.importorskip("jinja2", reason="templates are its")
    chat = ["--max-new-tokens", "4", "--ignore-eos", "--chat", "Is 漢 a word?"]
    out, err, code = generate("--model", str(chatty), *chat)
    answered = "".join(cf_ops.load(chatty).chat([MESSAGES[1]], max_new_tokens=4, ignore_eos=True))
    assert (out, code) == (f"{answered}\n", 0), err
    for arguments, message in (
        ([directory, *chat], "no chat template"),
        ([str(chatty), *chat, "--echo"], "--echo: expected it with --prompt"),
        (
            [directory, "--prompt", "a", "--logit-bias", "1=2"],
            "expected biases by id, such as 11:2.5,12:-inf, got '1=2'",
        ),
    ):
        out, err, code = generate("--model", *arguments)
        assert code == 2 and message in err and len(err.strip().splitlines()) == 1 and out == ""
