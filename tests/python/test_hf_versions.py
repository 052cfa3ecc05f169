"""What a version of transformers may change, and its generate() with what our loop does not do itself."""

import copy
import dataclasses
import inspect
import logging
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import cf_ops.hf
import newest_transformers
from cf_ops import selfcheck
from cf_ops.hf import _cache, _patch
from hf_models import CACHE, VERSION, check_tokens, load, padded

NAME = "neox-d80"
IDS = padded([9])["input_ids"]
ROW = "generate() of transformers on cf_ops"


def greedy(model, inputs, new=12, **options):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **options)


def hooked(model):
    """A model for which transformers' own loop calls forward."""
    model.register_forward_hook(lambda module, inputs, output: None)
    return model


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_is_taken_by_either_name(root, name):
    model = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    with torch.no_grad():
        first = model(IDS[:, :5], use_cache=True)
        second = model(IDS[:, 5:], **{name: first[CACHE]})
        whole = model(IDS).logits
        assert cf_ops.hf.report(model).share == 1
        again = model(IDS[:, :1], **{name: second[CACHE]}, output_hidden_states=True)
    assert (torch.cat([first.logits, second.logits], 1) - whole).abs().max() <= 1e-5 * whole.abs().max()
    assert again[CACHE].get_seq_length() == 10 and len(again.hidden_states) > 1


@pytest.fixture
def renamed(monkeypatch):
    """A forward that calls the cache `memory`, and takes every other name without reading it."""
    theirs = transformers.GPTNeoXForCausalLM.forward

    def forward(
        self,
        input_ids: torch.Tensor = None,
        attention_mask: torch.Tensor = None,
        position_ids: torch.Tensor = None,
        memory: transformers.Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        past_key_values: None = None,
        cache: None = None,
        **kwargs,
    ):
        options = {} if output_hidden_states is None else {"output_hidden_states": output_hidden_states}
        return theirs(
            self,
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{CACHE: memory},
            **options,
        )

    monkeypatch.setattr(transformers.GPTNeoXForCausalLM, "forward", forward)
    monkeypatch.setattr(_patch, "_methods_for", _patch._methods_for.__wrapped__)  # another forward to look like


def test_the_next_rename_of_the_cache_loses_no_context(root, renamed):
    plain, model = load(root, NAME, torch.float32), cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    with torch.no_grad():
        whole = plain(IDS, use_cache=False).logits
        first = model(IDS[:, :5], use_cache=True)
        second = model(IDS[:, 5:7], past_key_values=first[CACHE], output_hidden_states=True)
        third = model(IDS[:, 7:], memory=second[CACHE])
    parts = torch.cat([first.logits, second.logits, third.logits], 1)
    assert (parts - whole).abs().max() <= 1e-4 * whole.abs().max()
    assert cf_ops.hf.report(model).hugging_face == {"output_hidden_states": 1, "a cache of the caller's": 1}
    generated = greedy(model, padded([9]))
    assert check_tokens(load(root, NAME, torch.float64), torch.float32, padded([9]), generated) > 0.5


def test_the_caches_name_is_read_off_transformers_classes():
    made = dataclasses.make_dataclass("Output", [("logits", "Tensor"), ("memory", "Cache | None"), ("states", "tuple")])
    assert _cache.cache_field(made) == "memory"
    assert _cache.cache_field(transformers.modeling_outputs.CausalLMOutputWithPast) == CACHE
    assert _cache.cache_field(transformers.generation.GenerateDecoderOnlyOutput) == CACHE
    for kind in (transformers.GPTNeoXForCausalLM, transformers.LlamaForCausalLM):
        assert _cache.cache_parameter(kind.forward) == CACHE and CACHE in inspect.signature(kind.forward).parameters


def test_a_caches_tensors_are_named_as_missing(root):
    model = cf_ops.hf.speed_up(load(root, NAME))
    with torch.no_grad():
        cache = model(IDS, use_cache=True)[CACHE]
    assert len(cache) == len(cache.layers) == model.config.num_hidden_layers
    reads = (lambda: cache.layers[0].keys, lambda: cache.layers[-1].values, lambda: cache[0], lambda: list(cache))
    for read in reads:
        with pytest.raises(
            ValueError, match="^a cache of cf_ops holds no keys and values of torch: expected the model"
        ):
            read()


def test_an_older_transformers_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.55.4")
    with pytest.raises(ImportError, match="^cf_ops.hf needs transformers 4.56 or newer, got 4.55.4: pip install --up"):
        cf_ops.hf.speed_up(torch.nn.Linear(2, 2))
    assert selfcheck._check_transformers() == []


@pytest.mark.parametrize("version, lines", [("5.24.3", 0), ("5.25.0.dev0", 1), ("6.0.0", 1)])
def test_a_newer_transformers_is_named_once(root, monkeypatch, caplog, version, lines):
    monkeypatch.setattr(_patch.transformers, "__version__", version)
    _patch._warn_of_newer.cache_clear()
    with caplog.at_level(logging.WARNING, logger="cf_ops.hf"):
        for _ in range(2):
            assert greedy(cf_ops.hf.speed_up(load(root, NAME)), padded([4]), 2).shape == (1, 6)
    messages = [record.message for record in caplog.records if record.name == "cf_ops.hf"]
    start = f"cf_ops: transformers {version} is newer than 5.24, the newest that was tested: `python -m cf_ops` says"
    assert len(messages) == lines and all(message.startswith(start) for message in messages)
    assert all("pip install 'transformers<5.25'" in message for message in messages)


def test_a_newer_release_is_reported_and_fails_nothing():
    tested = newest_transformers.newest_tested()
    assert tested == _patch.NEWEST
    for version in ("4.57.6", "5.24.0", "5.24.9"):
        assert [newest_transformers.verdict(status, version, (5, 24))[0] for status in (0, 1, 5)] == [0, 1, 5]
    for version in ("5.25.0", "6.0.0.dev0"):
        for status, result in ((0, "passes"), (1, "FAILS")):
            line = f"cf: skipped: transformers {version} is newer than the newest tested one, 5.24, and {result}"
            assert newest_transformers.verdict(status, version, (5, 24)) == (newest_transformers.SKIPPED, line)


def test_the_self_check_has_a_row_of_generate():
    (row,) = (row for row in selfcheck.rows() if row.op.startswith(ROW))
    assert row.op == f"{ROW}: 100%" and row.ok and 0 < row.relative_l2 <= row.budget < 1e-4


@pytest.mark.parametrize(
    "method, replaced, name",
    [
        ("_check_model", lambda *args: _raise(_patch._Fallback("cache")), f"{ROW}: 0%"),
        (
            "generate",
            lambda *args: _raise(AttributeError("no such name\nhere")),
            f"{ROW}: AttributeError: no such name",
        ),
    ],
)
def test_the_self_check_finds_what_a_version_breaks(monkeypatch, method, replaced, name):
    monkeypatch.setattr(_patch.Patch, method, replaced)
    (row,) = selfcheck._check_transformers()
    assert row.op == name and not row.ok


def _raise(error):
    raise error


@pytest.fixture(scope="module")
def tokenizer():
    """One whose tokens are ASCII's characters."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is missing")
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(i): i for i in range(128)}, unk_token=chr(1)))
    characters.decoder = tokenizers.decoders.Fuse()
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=chr(0), pad_token=chr(0))


def test_stop_strings(root, tokenizer):
    inputs = padded([6, 3])
    model, theirs = (cf_ops.hf.speed_up(load(root, NAME)) for _ in range(2))
    free = greedy(model, inputs)
    ends = ["".join(map(chr, free[0, -5:-3])), chr(int(free[1, -8]))]
    hooked(theirs)
    for strings in (ends, ends[0]):
        options = {"stop_strings": strings, "tokenizer": tokenizer}
        got = greedy(model, inputs, **options)
        assert torch.equal(got, greedy(theirs, inputs, **options)) and got.shape[1] <= free.shape[1]
    first = greedy(model, {"input_ids": inputs["input_ids"][:1]}, stop_strings=ends[0], tokenizer=tokenizer)
    assert first[0].tolist() == free[0, : first.shape[1]].tolist() and tokenizer.decode(first[0]).endswith(ends[0])
    counted = cf_ops.hf.report(model)
    assert counted.share == 1 and counted.step_by_step == {"a stopping criterion": 3}
    assert cf_ops.hf.report(theirs).share == 1


def test_stop_strings_of_a_config(root, tokenizer):
    inputs, model = padded([6]), cf_ops.hf.speed_up(load(root, NAME))
    free = greedy(model, inputs)
    model.generation_config.stop_strings = [chr(int(free[0, -4]))]
    got = greedy(model, inputs, tokenizer=tokenizer)
    assert got.shape[1] < free.shape[1] and got[0].tolist() == free[0, : got.shape[1]].tolist()
    counted = cf_ops.hf.report(model)
    assert counted.share == 1 and counted.step_by_step == {"stop_strings of a generation config": 1}
    with pytest.raises(ValueError, match="tokenizer"):
        greedy(model, inputs)


def test_generate_batch_is_answered_by_generate(root):
    model = cf_ops.hf.speed_up(load(root, NAME))
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*padded([3, 7, 1, 5, 9, 2, 4, 8, 6, 3]).values())]
    expected = [greedy(model, {"input_ids": torch.tensor([prompt])})[0, len(prompt) :].tolist() for prompt in prompts]
    results = model.generate_batch(prompts, max_new_tokens=12)
    assert list(results) == [f"req_{i}" for i in range(10)]
    assert [result.prompt_ids for result in results.values()] == prompts
    assert [result.generated_tokens for result in results.values()] == expected
    assert all(result.error is None and result.status.name == "FINISHED" for result in results.values())
    end = expected[1][4]
    config = transformers.GenerationConfig(max_new_tokens=12, eos_token_id=end, pad_token_id=0, do_sample=False)
    for result, free in zip(model.generate_batch(prompts, config).values(), expected):
        assert result.generated_tokens == (free[: free.index(end) + 1] if end in free else free)
    config.num_return_sequences, config.do_sample = 2, True
    assert list(model.generate_batch(prompts[:2], config)) == ["req_0__child#0", "req_0", "req_1__child#0", "req_1"]
    assert model.generate_batch([]) == {} and cf_ops.hf.report(model).share == 1
    cf_ops.hf.restore(model)
    assert "generate_batch" not in model.__dict__


@pytest.mark.skipif(VERSION < (5, 0), reason="this transformers takes no cache_implementation='paged'")
def test_pages_are_answered_by_generate_batch(root):
    model = cf_ops.hf.speed_up(load(root, NAME))
    expected = greedy(model, {"input_ids": IDS})
    assert greedy(model, {"input_ids": IDS}, cache_implementation="paged").flatten().tolist() == expected[0].tolist()
    counted = cf_ops.hf.report(model)
    assert counted.cf_ops == {"greedy prefill": 2, "greedy loop": 22} and counted.share == 1


def everyday_calls():
    """Calls of generate() by name: its arguments beside the ids, and whether they run on cf_ops."""
    config = transformers.GenerationConfig
    return {
        "greedy": ({}, True),
        "sampled": ({"do_sample": True, "top_k": 5, "top_p": 0.8, "temperature": 0.7}, True),
        "typical": ({"do_sample": True, "typical_p": 0.9, "renormalize_logits": True}, True),
        "several sequences": ({"do_sample": True, "num_return_sequences": 3}, True),
        "a config": ({"generation_config": config(max_new_tokens=5, do_sample=True)}, True),
        "repetition": ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, True),
        "a least length": ({"min_new_tokens": 4, "eos_token_id": [3, 5, 7]}, True),
        "a length in all": ({"max_new_tokens": None, "max_length": 16}, True),
        "words": ({"bad_words_ids": [[3], [7, 8]], "sequence_bias": {(4,): 9.0}}, True),
        "forced": ({"forced_eos_token_id": 2}, True),
        "guidance": ({"guidance_scale": 1.5}, True),
        "allowed": ({"prefix_allowed_tokens_fn": lambda row, ids: [3, 4, 5, 9]}, True),
        "time": ({"max_time": 60.0}, True),
        "scores": ({"output_scores": True, "output_logits": True, "return_dict_in_generate": True}, True),
        "no cache": ({"use_cache": False}, True),
        "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, False),
        "beams": ({"num_beams": 3}, False),
        "drafts": ({"prompt_lookup_num_tokens": 2}, True),
        "a static cache": ({"cache_implementation": "static"}, False),
        "a cache": ({CACHE: transformers.DynamicCache()}, False),
    }


@pytest.fixture(scope="module")
def tiny():
    """A model, and the same with speed_up, whose float32 logits lie far apart."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    return model, cf_ops.hf.speed_up(copy.deepcopy(model))


@pytest.mark.parametrize("name", everyday_calls())
def test_everyday_calls_give_transformers_output(tiny, name):
    made = []
    _, is_ours = everyday_calls()[name]
    inputs = padded([6]) if name == "drafts" else padded([6, 3])
    cf_ops.hf.speed_up(cf_ops.hf.restore(tiny[1]))
    for model in tiny:
        torch.manual_seed(1)
        given, _ = everyday_calls()[name]  # with a cache that is empty
        if "generation_config" not in given:
            given = {"max_new_tokens": 8, "do_sample": False, **given}
        made.append(model.generate(**inputs, **given))
    if not isinstance(made[0], torch.Tensor):
        assert list(made[0]) == list(made[1])
        for step in ("scores", "logits"):
            pairs = list(zip(made[0].get(step) or (), made[1].get(step) or (), strict=True))
            assert all((a - b).abs().max() <= 1e-4 * a.abs().max() for a, b in pairs)
            assert name != "scores" or len(pairs) > 0
        made = [output.sequences for output in made]
    assert torch.equal(*made) and made[0].dtype == made[1].dtype
    assert cf_ops.hf.report(tiny[1]).share == is_ours, str(cf_ops.hf.report(tiny[1]))


def test_what_the_models_own_config_asks_for(root):
    """transformers merges it into a config that is given; generate() then begins again with transformers' loop."""
    plain, model = load(root, NAME), cf_ops.hf.speed_up(load(root, NAME))
    for one in (plain, model):
        one.generation_config.num_beams = 2
    config = transformers.GenerationConfig(max_new_tokens=6, pad_token_id=0)
    assert torch.equal(*(one.generate(**padded([6]), generation_config=config) for one in (plain, model)))
    counted = cf_ops.hf.report(model)
    assert set(counted.hugging_face) == {"generation mode beam_search"} and counted.cf_ops == {}


def test_a_class_with_a_method_of_its_own(root):
    calls = []

    class Own(transformers.GPTNeoXForCausalLM):
        def _sample(self, *args, **kwargs):
            calls.append(1)
            return super()._sample(*args, **kwargs)

    class Same(transformers.GPTNeoXForCausalLM):
        def helper(self):
            return 1

    expected = greedy(cf_ops.hf.speed_up(load(root, NAME)), padded([6]))
    for kind, reasons in ((Own, {"a method of generate() was replaced": 1}), (Same, {})):
        model = load(root, NAME)
        model.__class__ = kind
        assert torch.equal(greedy(cf_ops.hf.speed_up(model), padded([6])), expected)
        assert cf_ops.hf.report(model).step_by_step == reasons and cf_ops.hf.report(model).share == 1
    assert calls == [1]


def test_a_processor_that_asks_for_gradients_gets_them(root):
    model, gradients = cf_ops.hf.speed_up(load(root, NAME, torch.float32)), []

    def processor(ids, scores):
        with torch.enable_grad():
            model(ids, use_cache=False).logits.sum().backward()
        gradients.append(model.get_output_embeddings().weight.grad.abs().sum())
        return scores

    greedy(model, padded([6]), 3, logits_processor=transformers.LogitsProcessorList([processor]))
    assert len(gradients) == 3 and all(gradient > 0 for gradient in gradients)
    counted = cf_ops.hf.report(model)
    assert counted.cf_ops == {"greedy prefill": 1, "greedy step": 2}
    assert counted.hugging_face == {"grad is enabled and parameters are trainable": 3}


def test_a_cache_that_a_processor_fills(root):
    model, lengths = cf_ops.hf.speed_up(load(root, NAME)), []

    def processor(ids, scores):
        cache = transformers.DynamicCache()
        model(ids, **{CACHE: cache})
        lengths.append(cache.get_seq_length())
        return scores

    greedy(model, padded([6]), 3, logits_processor=transformers.LogitsProcessorList([processor]))
    assert lengths == [6, 7, 8] and cf_ops.hf.report(model).hugging_face == {"a cache of the caller's": 3}


def test_two_caches_are_refused(root):
    model = cf_ops.hf.speed_up(load(root, NAME))
    with torch.no_grad():
        cache = model(IDS, use_cache=True)[CACHE]
        with pytest.raises(ValueError, match="^past_key_values and cache: expected one cache, got 2$"):
            model(IDS[:, :1], past_key_values=cache, cache=cache)


def test_ids_behind_a_cache_alone(root):
    """Transformers takes all ids or the new ones, where the mask has a place for those of the cache too."""
    if VERSION < (5, 17):
        pytest.skip("this transformers may take all ids alone")
    model = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    expected = greedy(model, padded([9]))[:, 9:]
    with torch.no_grad():
        cache = model(IDS[:, :6], use_cache=True)[CACHE]
    inputs = {"input_ids": IDS[:, 6:], "attention_mask": torch.ones(1, 9, dtype=torch.long), CACHE: cache}
    assert torch.equal(greedy(model, inputs)[:, 3:], expected) and cf_ops.hf.report(model).share == 1
