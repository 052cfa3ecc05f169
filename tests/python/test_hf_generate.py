"""generate() of models with speed_up, beside Hugging Face's own in float64."""

import dataclasses
import os
import signal

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import cf_ops.hf
from cf_ops.hf import _generation, _patch, _runner
from hf_models import (
    CACHE,
    CHECKPOINTS,
    JOINED,
    ErrorBound,
    check_tokens,
    load,
    padded,
    sequences,
    unit_roundoff,
)

BATCHES = {1: [7], 3: [5, 1, 9], 8: [3, 12, 1, 7, 7, 2, 10, 5]}


def greedy(model, inputs, new=24, **options):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **options)


def assert_all_ours(model):
    report = cf_ops.hf.report(model)
    assert report.hugging_face == {} and report.share == 1 and sum(report.cf_ops.values()) > 0, str(report)


class Never(transformers.StoppingCriteria):
    """Stops nothing, and has torch choose the ids from the logits of each step."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def by_step():
    return {"stopping_criteria": transformers.StoppingCriteriaList([Never()])}


class Streamer(transformers.generation.streamers.BaseStreamer):
    """Keeps what it is given, and calls `then` with the number of calls."""

    def __init__(self, then=lambda calls: None):
        self.given, self._then = [], then

    def put(self, value):
        self.given.append((value.dtype, value.device, value.tolist()))
        self._then(len(self.given))

    def end(self):
        self.given.append("end")


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_greedy_ids_are_those_of_float64(root, name, batch):
    inputs = padded(BATCHES[batch])
    model = cf_ops.hf.speed_up(load(root, name))
    reference = load(root, name, torch.float64)
    generated = greedy(model, inputs)
    assert generated.shape == (batch, inputs["input_ids"].shape[1] + 24)
    share = check_tokens(reference, model.dtype, inputs, generated)
    assert share > 0.5, f"only {share:.0%} of float64's margins exceed the bound"
    assert_all_ours(model)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_ids_are_hugging_faces_until_a_margin_is_small(root, name):
    inputs = padded(BATCHES[3])
    reference = load(root, name, torch.float64)
    ours = greedy(cf_ops.hf.speed_up(load(root, name)), inputs)
    theirs = greedy(reference, inputs)
    dtype = load(root, name).dtype
    for (mine, prompt), (row, _) in zip(sequences(inputs, ours), sequences(inputs, theirs)):
        with torch.no_grad():
            logits = reference(row[None]).logits[0, prompt - 1 : -1]
        top = logits.topk(2).values
        bound = ErrorBound(reference, row).relative + unit_roundoff(dtype)
        small = (top[:, 0] - top[:, 1] <= 2 * bound * logits.abs().max(-1).values).tolist()
        until = prompt + (small.index(True) if True in small else len(small))
        assert mine[:until].tolist() == row[:until].tolist()


def test_a_wrong_rope_table_is_caught(root, monkeypatch):
    make = _runner._CpuBackend.__init__

    def wrong(self, source):
        make(self, dataclasses.replace(source, rope_table=lambda rows: tuple(t * 0.9 for t in source.rope_table(rows))))

    monkeypatch.setattr(_runner._CpuBackend, "__init__", wrong)
    inputs = padded(BATCHES[8])
    generated = greedy(cf_ops.hf.speed_up(load(root, "neox-d80")), inputs)
    with pytest.raises(AssertionError, match="another id than float64's"):
        check_tokens(load(root, "neox-d80", torch.float64), torch.float16, inputs, generated)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_as_near_to_float64_as_derived(root, name):
    ids = padded([40])["input_ids"]
    model, reference = load(root, name), load(root, name, torch.float64)
    with torch.no_grad():
        exact = reference(ids).logits
        theirs = model(ids).logits
        ours = cf_ops.hf.speed_up(model)(ids).logits
        in_float32 = cf_ops.hf.run(model, ids)[0]
    assert ours.dtype == theirs.dtype == model.dtype and ours.shape == theirs.shape
    assert_all_ours(model)
    largest = exact.abs().max()
    bound = ErrorBound(reference, ids[0]).relative
    assert (in_float32 - exact).abs().max() <= bound * largest
    assert (ours - exact).abs().max() <= (bound + unit_roundoff(ours.dtype)) * largest
    if model.dtype != torch.float32:
        assert (ours - exact).norm() <= (theirs - exact).norm()


@pytest.mark.parametrize("name", ["neox-d80", "neox-bf16"])
def test_steps_and_chunks_make_the_logits_of_one_pass(root, name):
    ids = padded([30])["input_ids"]
    model, reference = cf_ops.hf.speed_up(load(root, name, torch.float32)), load(root, name, torch.float64)
    with torch.no_grad():
        exact = reference(ids).logits
        cache, parts, first = None, [], 0
        for count in (7, 1, 1, 12, 1, 8):
            output = model(ids[:, first : first + count], past_key_values=cache, use_cache=True)
            cache, first = output.past_key_values, first + count
            parts.append(output.logits)
            assert cache.get_seq_length() == first
    assert_all_ours(model)
    bound = ErrorBound(reference, ids[0]).relative
    assert (torch.cat(parts, 1) - exact).abs().max() <= bound * exact.abs().max()


def test_a_cache_grows_beyond_its_room(root):
    inputs = padded([3, 5])
    model = cf_ops.hf.speed_up(load(root, "neox-d80", torch.float32))
    with torch.no_grad():
        output = model(**inputs, position_ids=positions(inputs["attention_mask"]), logits_to_keep=1)
        mask, sizes = inputs["attention_mask"], set()
        rows = [inputs["input_ids"]]
        for _ in range(150):
            new = output.logits[:, -1:].argmax(-1)
            rows.append(new)
            mask = torch.cat([mask, torch.ones_like(new)], 1)
            output = model(
                new, attention_mask=mask, position_ids=positions(mask)[:, -1:], past_key_values=output.past_key_values
            )
            sizes.add(cf_ops.hf.report(model).cache_bytes)
    assert len(sizes) > 1
    assert_all_ours(model)
    reference = load(root, "neox-d80", torch.float64)
    assert check_tokens(reference, torch.float32, inputs, torch.cat(rows, 1)) > 0.5


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def test_num_return_sequences_and_padded_batches_sample_on_ours(root):
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))
    torch.manual_seed(0)
    out = model.generate(**padded(BATCHES[3]), do_sample=True, num_return_sequences=4, max_new_tokens=8)
    assert out.shape == (12, 17)
    model.generate(**padded(BATCHES[8]), do_sample=True, max_new_tokens=8, top_p=0.9, repetition_penalty=1.2)
    assert_all_ours(model)
    assert set(cf_ops.hf.report(model).cf_ops) == {"sampled prefill", "sampled step"}


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 10, "temperature": 0.7}, {"top_p": 0.8, "top_k": 0}])
def test_equal_seeds_draw_hugging_faces_ids(root, options):
    """Ours and Hugging Face's logits differ by rounding errors of float32; the same random numbers then draw the same
    ids, but where a number falls between the two, which these seeds do not."""
    inputs = padded(BATCHES[3])
    theirs, ours = load(root, "neox-tanh"), cf_ops.hf.speed_up(load(root, "neox-tanh"))
    for seed in range(5):
        drawn = []
        for model in (theirs, ours):
            torch.manual_seed(seed)
            drawn.append(model.generate(**inputs, do_sample=True, max_new_tokens=10, repetition_penalty=1.3, **options))
        assert drawn[0].tolist() == drawn[1].tolist()
    assert_all_ours(ours)


def test_sampled_ids_have_float64s_distribution(root):
    """The second new id, so that a prefill and a step have part in it: chi-square of 4000 draws after top_k."""
    prompt, kept, draws = padded([6])["input_ids"], 8, 4000
    model, reference = cf_ops.hf.speed_up(load(root, "neox-d80")), load(root, "neox-d80", torch.float64)
    torch.manual_seed(3)
    counts = {}
    for _ in range(draws // 500):
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_k=kept,
            temperature=1.5,
            num_return_sequences=500,
            max_new_tokens=2,
        )
        for pair in out[:, -2:].tolist():
            counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
    assert_all_ours(model)

    def probabilities(ids):
        with torch.no_grad():
            top = reference(torch.tensor([ids])).logits[0, -1].topk(kept)
        return dict(zip(top.indices.tolist(), torch.softmax(top.values / 1.5, 0).tolist()))

    start, expected = prompt[0].tolist(), {}
    for first, p in probabilities(start).items():
        for second, q in probabilities([*start, first]).items():
            expected[first, second] = draws * p * q
    assert set(counts) <= set(expected)
    # Pairs with fewer than 5 expected draws are one class. A logit's rounding to float16 moves a probability by less
    # than 1 %, and chi-square by less than 4000 * 0.01^2.
    rare = [pair for pair in expected if expected[pair] < 5]
    classes = [(counts.get(pair, 0), e) for pair, e in expected.items() if e >= 5]
    classes.append((sum(counts.get(pair, 0) for pair in rare), sum(expected[pair] for pair in rare)))
    chi_square = sum((n - e) ** 2 / e for n, e in classes if e > 0)
    freedom = len(classes) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 0.4


def test_stopping_criteria_streamers_and_processors_are_called(root):
    inputs = padded([6])
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))
    seen = {"criteria": 0, "streamed": [], "processed": 0}

    class Criteria(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen["criteria"] += 1
            return torch.tensor([input_ids.shape[1] >= 10])

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            seen["streamed"] += value.reshape(-1).tolist()

        def end(self):
            seen["ended"] = True

    class OnlyOdd(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen["processed"] += 1
            scores = scores.clone()
            scores[:, ::2] = -float("inf")
            return scores

    out = greedy(
        model,
        inputs,
        stopping_criteria=transformers.StoppingCriteriaList([Criteria()]),
        streamer=Streamer(),
        logits_processor=transformers.LogitsProcessorList([OnlyOdd()]),
    )
    assert out.shape == (1, 10) and seen["criteria"] == seen["processed"] == 4 and seen["ended"]
    assert seen["streamed"] == out[0].tolist() and all(i % 2 for i in out[0, 6:].tolist())
    assert_all_ours(model)


def test_an_end_id_ends_each_sequence_alone(root):
    inputs = padded(BATCHES[8])
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))
    free = greedy(model, inputs)
    end = int(free[0, -12])
    ended = greedy(model, inputs, eos_token_id=end)
    places = inputs["input_ids"].shape[1]
    for row, expected in zip(ended[:, places:].tolist(), free[:, places:].tolist()):
        until = expected.index(end) + 1 if end in expected else len(row)
        assert row[:until] == expected[: len(row[:until])] and not any(row[until:])
    assert_all_ours(model)


# --- the loop of greedy ids ---


@pytest.mark.parametrize("new", [1, 2, 24])
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_loop_gives_the_ids_of_transformers_loop(root, name, batch, new):
    inputs = padded(BATCHES[batch])
    ours, slow = (cf_ops.hf.speed_up(load(root, name)) for _ in range(2))
    hooked(slow)  # so that transformers' own loop calls forward
    streams = Streamer(), Streamer()
    got = greedy(ours, inputs, new, streamer=streams[0])
    expected = greedy(slow, inputs, new, streamer=streams[1])
    assert torch.equal(got, expected) and got.dtype == expected.dtype and got.device == expected.device
    assert streams[0].given == streams[1].given and len(streams[0].given) == new + 2
    counted = cf_ops.hf.report(ours)
    assert counted.cf_ops == {"greedy prefill": 1} | ({"greedy loop": new - 1} if new > 1 else {})
    assert counted.step_by_step == {} and counted.cache_bytes == 0
    assert cf_ops.hf.report(slow).step_by_step == {"a hook on the model": 1}
    assert_all_ours(slow)
    assert_all_ours(ours)


def test_streams_and_output_are_as_transformers_gives_them(root):
    """Without speed_up, in float64's ids: the order of calls, and each value's form."""
    inputs = padded(BATCHES[3])
    streams = Streamer(), Streamer()
    theirs, ours = load(root, "neox-d80", torch.float32), cf_ops.hf.speed_up(load(root, "neox-d80", torch.float32))
    rows = [greedy(model, inputs, 12, streamer=stream) for model, stream in zip((theirs, ours), streams)]
    assert rows[0].shape == rows[1].shape and rows[0].dtype == rows[1].dtype
    prompt, *made, end = streams[1].given
    assert (prompt, end) == (streams[0].given[0], "end") and len(made) == 12
    assert [given[:2] for given in made] == [given[:2] for given in streams[0].given[1:-1]]
    assert torch.equal(torch.tensor([ids for _, _, ids in made]).T, rows[1][:, 9:])
    assert check_tokens(load(root, "neox-d80", torch.float64), torch.float32, inputs, rows[1]) > 0.5
    narrow = {"input_ids": inputs["input_ids"].int(), "attention_mask": inputs["attention_mask"]}
    assert torch.equal(greedy(ours, narrow, 12), rows[1]) and greedy(ours, narrow, 12).dtype == rows[1].dtype
    assert set(cf_ops.hf.report(ours).cf_ops) == {"greedy prefill", "greedy loop"}


@pytest.mark.parametrize("batch", BATCHES)
def test_the_loop_ends_each_sequence_as_transformers_loop_does(root, batch):
    inputs = padded(BATCHES[batch])
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))
    places, free = inputs["input_ids"].shape[1], greedy(model, inputs)
    ends = [int(free[0, places + 5]), int(free[-1, places + 9])]
    for end in (*ends, ends):
        for pad in (0, 77):
            streams = Streamer(), Streamer()
            options = {"eos_token_id": end, "pad_token_id": pad}
            got = greedy(model, inputs, streamer=streams[0], **options)
            assert torch.equal(got, greedy(model, inputs, streamer=streams[1], **options, **by_step()))
            assert streams[0].given == streams[1].given and got.shape[1] < free.shape[1] + (batch > 1)
    assert cf_ops.hf.report(model).step_by_step == {"a stopping criterion": 6}
    assert_all_ours(model)


def hooked(model):
    model.register_forward_hook(lambda module, inputs, output: None)


def given_another_method(name):
    def change(model):
        model.__dict__[name] = getattr(type(model), name).__get__(model)

    return change


class Same(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


BY_STEP = {
    "sampling": {"do_sample": True},
    "use_cache=False": {"use_cache": False},
    "a logits processor": {"repetition_penalty": 1.2},
    "a logits processor of the caller's": {"logits_processor": transformers.LogitsProcessorList([Same()])},
    "a logits processor for a least length": {"min_new_tokens": 3, "eos_token_id": 5},
    "a stopping criterion": {"max_time": 60.0},
    "a stopping criterion of the caller's": by_step(),
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "synced_gpus": {"synced_gpus": True},
    "max_length beyond max_position_embeddings": {"max_new_tokens": 520, "eos_token_id": list(range(128))},
    "no id of the vocabulary to pad with": {"eos_token_id": 127, "pad_token_id": 128},
    "a hook on the model": {"change": hooked},
    "a method of generate() was replaced": {"change": given_another_method("_sample")},
    "a method of generate() was replaced, which makes inputs": {
        "change": given_another_method("prepare_inputs_for_generation")
    },
    "a method of generate() was replaced, which makes processors": {
        "change": given_another_method("_get_logits_processor")
    },
}


@pytest.mark.parametrize("reason", BY_STEP)
def test_what_runs_step_by_step(root, reason, monkeypatch):
    options = {"max_new_tokens": 6, "do_sample": False, **BY_STEP[reason]}
    change = options.pop("change", lambda model: None)
    if "synced_gpus" in options:  # one process alone
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    made = []
    for has_loop in (False, True):
        model = cf_ops.hf.speed_up(load(root, "neox-d80"))
        change(model)
        torch.manual_seed(0)
        with monkeypatch.context() as patched:
            if not has_loop:
                patched.setattr(_patch.Patch, "_check_generation", refuse)
            output = model.generate(**padded([6]), **options)
        made.append(output if isinstance(output, torch.Tensor) else output.sequences)
    assert torch.equal(*made)
    counted = cf_ops.hf.report(model)
    assert len(counted.step_by_step) == 1 and reason.startswith(next(iter(counted.step_by_step)))
    assert "greedy loop" not in counted.cf_ops and "by step" in str(counted)
    assert_all_ours(model)


def refuse(*args):
    raise _generation.StepByStep("the test")


def test_other_modes_are_not_counted_step_by_step(root):
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))
    model.generate(**padded([6]), max_new_tokens=4, do_sample=False, num_beams=2)
    with torch.no_grad():
        model(**padded([6]))
    assert cf_ops.hf.report(model).step_by_step == {}


def test_the_loop_leaves_the_cache_of_transformers_loop(root):
    """With sequences that have ended too: a generation goes on from it with the same ids."""
    inputs = padded(BATCHES[3])
    model = cf_ops.hf.speed_up(load(root, "neox-d80", torch.float32))
    end = int(greedy(model, inputs)[0, -20])
    for options in ({}, {"eos_token_id": end}):
        made = []
        for loop in ({}, by_step()):
            first = greedy(model, inputs, 12, return_dict_in_generate=True, **options, **loop)
            cache = first[CACHE]
            assert type(first) is transformers.generation.GenerateDecoderOnlyOutput
            assert set(first) == {"sequences", CACHE}
            assert cache.get_seq_length() == first.sequences.shape[1] - 1
            mask = torch.ones_like(first.sequences)
            mask[:, :9] = inputs["attention_mask"]
            second = {"input_ids": first.sequences, "attention_mask": mask, CACHE: cache}
            made.append((first.sequences.tolist(), greedy(model, second, 6, **loop).tolist(), cache.get_seq_length()))
        assert made[0] == made[1]
    assert_all_ours(model)


def test_a_generation_in_the_midst_of_a_loop(root):
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))
    inputs, others = padded(BATCHES[3]), padded([4, 2], seed=2)
    expected, inner = greedy(model, inputs).tolist(), []
    streamer = Streamer(lambda calls: inner.append(greedy(model, others, 5).tolist()))
    assert greedy(model, inputs, streamer=streamer).tolist() == expected
    assert inner == [greedy(model, others, 5).tolist()] * 25
    assert set(cf_ops.hf.report(model).cf_ops) == {"greedy prefill", "greedy loop"}


@pytest.mark.parametrize("in_streamer", [True, False])
def test_ctrl_c_ends_the_loop(root, in_streamer, monkeypatch):
    model, inputs = cf_ops.hf.speed_up(load(root, "neox-d80")), padded(BATCHES[3])
    expected = greedy(model, inputs)
    choose, calls = _runner._CpuRunner.choose, []

    def interrupted(self, tokens, left, stop):
        calls.append(left)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return choose(self, tokens, left, stop)

    def interrupt(count):
        if count == 6:
            raise KeyboardInterrupt

    if not in_streamer:
        monkeypatch.setattr(_runner._CpuRunner, "choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, inputs, 400, streamer=Streamer(interrupt) if in_streamer else None)
    assert cf_ops.hf.report(model).cache_bytes == 0 and cf_ops.hf.report(model).cf_ops["greedy loop"] < 40
    monkeypatch.undo()
    assert torch.equal(greedy(model, inputs), expected)
    assert_all_ours(model)


def test_a_streamers_error_is_the_callers(root):
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))

    def fail(calls):
        if calls == 4:
            raise ValueError("the reader has gone")

    with pytest.raises(ValueError, match="the reader has gone"):
        greedy(model, padded([6]), streamer=Streamer(fail))
    assert cf_ops.hf.report(model).cache_bytes == 0 and cf_ops.hf.report(model).step_by_step == {}


# ---


def test_generation_goes_on_from_our_cache(root):
    inputs = padded([9])
    model = cf_ops.hf.speed_up(load(root, "neox-d80", torch.float32))
    whole = greedy(model, inputs, new=20)
    first = greedy(model, inputs, new=8, return_dict_in_generate=True)
    second = model.generate(
        first.sequences,
        attention_mask=torch.ones_like(first.sequences),
        max_new_tokens=12,
        do_sample=False,
        **{CACHE: first[CACHE]},
    )
    assert second.tolist() == whole.tolist()
    assert_all_ours(model)


def test_output_is_as_hugging_faces(root):
    ids = padded([9])["input_ids"]
    theirs, ours = load(root, "neox-d80"), cf_ops.hf.speed_up(load(root, "neox-d80"))
    with torch.no_grad():
        for options in ({}, {"use_cache": False}, {"return_dict": False}, {"return_dict": False, "use_cache": False}):
            a, b = theirs(ids, **options), ours(ids, **options)
            assert type(a) is type(b) and len(a) == len(b)
            assert a[0].shape == b[0].shape and a[0].dtype == b[0].dtype
        for rows in (0, 1, 4, 100):
            assert theirs(ids, logits_to_keep=rows).logits.shape == ours(ids, logits_to_keep=rows).logits.shape
    assert_all_ours(ours)


@pytest.mark.parametrize("name", ["neox-d80", "neox-d64-sequential", "neox-tanh", *JOINED])
def test_taps_are_float64s_hidden_states(root, name):
    ids = padded([12])["input_ids"]
    model, reference = cf_ops.hf.speed_up(load(root, name)), load(root, name, torch.float64)
    layers = model.config.num_hidden_layers
    norm = "final_layer_norm" if name.startswith("neox") else "norm"
    names = [f"layers.{i}.output" for i in range(layers)] + [norm]
    logits, taps = cf_ops.hf.run(model, ids, taps=names)
    with torch.no_grad():
        exact = reference(ids, output_hidden_states=True)
    bound = ErrorBound(reference, ids[0]).relative
    assert (logits - exact.logits).abs().max() <= bound * exact.logits.abs().max()
    # Hugging Face gives the embedding, each layer but the last, and the final norm.
    for name, theirs in zip([*names[: layers - 1], norm], exact.hidden_states[1:]):
        assert taps[name].shape == theirs.shape and taps[name].dtype == torch.float32
        assert (taps[name] - theirs).abs().max() <= bound * theirs.abs().max()
    last = taps[f"layers.{layers - 1}.output"].double()
    with torch.no_grad():
        lens = reference.get_output_embeddings()(getattr(reference.base_model, norm)(last))
    assert (lens - exact.logits).abs().max() <= bound * exact.logits.abs().max()
    one, tap = cf_ops.hf.run(model, ids[0].tolist(), taps=["layers.0.output"])
    assert torch.equal(one, logits[0]) and torch.equal(tap["layers.0.output"], taps["layers.0.output"][0])
    with pytest.raises(ValueError, match="tap 'layers.0.outptu' is unknown"):
        cf_ops.hf.run(model, ids, taps=["layers.0.outptu"])
    with pytest.raises(ValueError, match="expected integers"):
        cf_ops.hf.run(model, [])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_prompt_lookup_gives_the_greedy_ids_in_fewer_steps(root, name):
    model = cf_ops.hf.speed_up(load(root, name))
    inputs = padded([9])
    inputs["input_ids"][0] = inputs["input_ids"][0, :3].repeat(3)
    plain = greedy(model, inputs)
    steps = cf_ops.hf.report(model).cf_ops
    cf_ops.hf.speed_up(cf_ops.hf.restore(model))
    for options in (
        {"prompt_lookup_num_tokens": 5},
        {"prompt_lookup_num_tokens": 20, "max_matching_ngram_size": 1},
        {"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True},
    ):
        streamer = Streamer()
        made = greedy(model, inputs, streamer=streamer, **options)
        assert torch.equal(getattr(made, "sequences", made), plain)
        given = [value for _, _, values in streamer.given[1:-1] for value in values]
        assert given == plain[0, inputs["input_ids"].shape[1] :].tolist() and streamer.given[-1] == "end"
    drawn = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        torch.manual_seed(1)
        drawn.append(model.generate(**inputs, max_new_tokens=24, do_sample=True, top_k=5, **options))
    assert torch.equal(*drawn)
    for place in (1, 5, 11):
        end = int(plain[0, inputs["input_ids"].shape[1] + place])
        options = {"eos_token_id": end, "pad_token_id": 0}
        assert torch.equal(
            greedy(model, inputs, prompt_lookup_num_tokens=6, **options),
            greedy(model, inputs, **options),
        )
    assert_all_ours(model)
    assert "greedy loop" in steps and cf_ops.hf.report(model).cf_ops.get("greedy draft", 0) > 0


def test_prompt_lookup_of_several_sequences_is_transformers_own_error(root):
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))
    with pytest.raises(ValueError, match="batch_size"):
        greedy(model, padded([5, 3]), prompt_lookup_num_tokens=3)
