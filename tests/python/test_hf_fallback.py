"""What cf_ops cannot do exactly runs on Hugging Face's path, with Hugging Face's output, and is named."""

import contextlib
import copy
import inspect
import logging

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import cf_ops.hf
from hf_models import CACHE, ErrorBound, check_tokens, load, padded

NAME = "neox-d80"
PARAMETERS = inspect.signature(transformers.GPTNeoXForCausalLM.forward).parameters
IDS = padded([6, 6])["input_ids"]


def needs(name):
    return pytest.mark.skipif(name not in PARAMETERS, reason=f"this transformers has no argument {name}")


def reasons(model):
    return set(cf_ops.hf.report(model).hugging_face)


def pair(root, **options):
    return load(root, NAME, **options), cf_ops.hf.speed_up(load(root, NAME, **options))


def assert_equal(a, b):
    """The same tensors, bit for bit, in whatever a call returns."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal(x, y)


def assert_falls_back(theirs, ours, reason, call):
    """`call` runs on both models; ours runs on Hugging Face's path alone, for this reason."""
    with torch.no_grad():
        expected, got = call(theirs), call(ours)
    assert reasons(ours) == {reason} and cf_ops.hf.report(ours).cf_ops == {}
    assert_equal(expected, got)


@pytest.mark.parametrize(
    "reason, arguments",
    [
        ("output_attentions", {"output_attentions": True}),
        ("output_hidden_states", {"output_hidden_states": True}),
        ("labels", {"labels": IDS}),
        pytest.param("head_mask", {"head_mask": torch.ones(2, 2)}, marks=needs("head_mask")),
        ("attention_mask is not left padding", {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])}),
        ("attention_mask is not left padding", {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1], [1] * 6])}),
        (
            "attention_mask does not have a place for each token",
            {"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool).tril().half().log()},
        ),
        ("position_ids are missing beside padding", {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}),
        ("position_ids do not count each sequence from 0", {"position_ids": torch.tensor([[0, 0, 1, 2, 3, 4]])}),
        (
            "logits of padding",
            {
                "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6]),
                "position_ids": torch.tensor([[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]),
            },
        ),
        pytest.param(
            "logits_to_keep is not a number", {"logits_to_keep": torch.tensor([0, 3])}, marks=needs("logits_to_keep")
        ),
    ],
)
def test_arguments(root, reason, arguments):
    options = {"attn_implementation": "eager"} if "attentions" in reason else {}
    assert_falls_back(*pair(root, **options), reason, lambda m: m(IDS, **arguments))


def test_inputs_embeds(root):
    assert_falls_back(
        *pair(root), "inputs_embeds", lambda m: m(inputs_embeds=m.get_input_embeddings()(IDS), use_cache=False)
    )


def test_config_asks_for_hidden_states(root):
    theirs, ours = pair(root)
    for model in (theirs, ours):
        model.config.output_hidden_states = True
    assert_falls_back(theirs, ours, "output_hidden_states", lambda m: m(IDS))
    with torch.no_grad():
        assert len(ours(IDS).hidden_states) == ours.config.num_hidden_layers + 1


def test_training_and_gradients(root):
    theirs, ours = pair(root, dtype=torch.float32)
    for model in (theirs, ours):
        model(IDS, labels=IDS).loss.backward()
    a, b = (m.gpt_neox.layers[0].attention.dense.weight.grad for m in (theirs, ours))
    assert torch.equal(a, b) and reasons(ours) == {"grad is enabled and parameters are trainable"}
    with torch.no_grad():
        assert_equal(theirs.train()(IDS), ours.train()(IDS))
        assert reasons(ours) == {"grad is enabled and parameters are trainable", "training"}
        assert ours.eval()(IDS) and sum(cf_ops.hf.report(ours).cf_ops.values()) == 1
    ours.requires_grad_(False)
    assert ours(IDS) and sum(cf_ops.hf.report(ours).cf_ops.values()) == 2


def test_autocast(root):
    def call(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(IDS)

    assert_falls_back(*pair(root, dtype=torch.float32), "autocast", call)


def test_hooks_are_run(root):
    theirs, ours = pair(root)
    seen = []

    def call(model):
        hook = model.gpt_neox.layers[1].mlp.register_forward_hook(
            lambda m, i, output: seen.append(output) or 2 * output
        )
        try:
            return model(IDS)
        finally:
            hook.remove()

    assert_falls_back(theirs, ours, "a hook on a module", call)
    assert len(seen) == 2 and torch.equal(*seen)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        with torch.no_grad():
            assert_equal(theirs(IDS), ours(IDS))
    finally:
        hook.remove()
    assert reasons(ours) == {"a hook on a module", "a global hook"}


def test_a_hook_on_the_whole_model_needs_no_fallback(root):
    _, ours = pair(root)
    seen = []
    ours.register_forward_hook(lambda module, inputs, output: seen.append(output.logits))
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, seen[0])
    assert reasons(ours) == set()


def test_a_module_of_another_type(root):
    class Lora(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 0.1 * x

    theirs, ours = pair(root)
    for model in (theirs, ours):
        attention = model.gpt_neox.layers[0].attention
        lora = Lora(160, 160)
        lora.load_state_dict(attention.dense.state_dict())
        attention.dense = lora.to(model.dtype).eval()
    reason = "module 'gpt_neox.layers.0.attention.dense': expected one that transformers builds, got "
    assert_falls_back(theirs, ours, reason + f"{Lora.__module__}.{Lora.__qualname__}", lambda m: m(IDS))


def test_lora_by_peft(root, caplog):
    """An adapter runs on Hugging Face's path until it is merged; then the same object is on ours again."""
    peft = pytest.importorskip("peft", reason="peft is missing")
    theirs, ours = pair(root, dtype=torch.float32)
    inputs = padded([6, 6])
    plain = load(root, NAME, torch.float64)

    def adapted(model):
        torch.manual_seed(1)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["query_key_value"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config).eval()

    wrapped = [adapted(model) for model in (theirs, ours)]
    with caplog.at_level(logging.WARNING, logger="cf_ops.hf"), torch.no_grad():
        for _ in range(2):
            expected, got = (model(**inputs).logits for model in wrapped)
            assert torch.equal(expected, got)
        expected, got = (model.generate(**inputs, max_new_tokens=5, do_sample=False) for model in wrapped)
        assert torch.equal(expected, got)
    (reason,) = reasons(ours)
    first = "module 'gpt_neox.layers.0.attention.query_key_value': expected one that transformers builds, got peft."
    assert reason.startswith(first) and cf_ops.hf.report(ours).cf_ops == {}
    assert [record.getMessage() for record in caplog.records if record.name == "cf_ops.hf"] == [
        f"cf_ops: a call runs on Hugging Face's path: {reason} "
        "(merge adapters into the model, such as with merge_and_unload())"
    ]

    merged = wrapped[1].merge_and_unload()
    assert merged is ours
    reference = load(root, NAME, torch.float64)
    reference.load_state_dict({name: tensor.double() for name, tensor in merged.state_dict().items()})
    with torch.no_grad():
        got, exact, before = (model(**inputs).logits for model in (merged, reference, plain))
    bound = max(ErrorBound(reference, ids).relative for ids in inputs["input_ids"]) * exact.abs().max()
    assert (got - exact).abs().max() <= bound < (before - exact).abs().max()
    out = merged.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert check_tokens(reference, torch.float32, inputs, out) > 0
    counted = cf_ops.hf.report(ours)
    assert set(counted.hugging_face) == {reason}
    assert counted.cf_ops == {"forward prefill": 1, "greedy prefill": 1, "greedy loop": 11}


def test_a_method_that_others_have_put_in_place_stays(root):
    """peft's prompts leave a method in the model; what it prepares is looked at call by call."""
    theirs, ours = (load(root, NAME) for _ in range(2))
    method = ours.prepare_inputs_for_generation
    ours.prepare_inputs_for_generation = method
    cf_ops.hf.speed_up(ours)
    assert ours.__dict__["prepare_inputs_for_generation"] is method
    inputs = padded([6, 3, 9])
    got, expected = (
        model.generate(**inputs, max_new_tokens=8, do_sample=False) for model in (ours, cf_ops.hf.speed_up(theirs))
    )
    assert torch.equal(got, expected) and cf_ops.hf.report(ours).share == 1
    assert cf_ops.hf.report(ours).step_by_step == {"a method of generate() was replaced": 1}
    cf_ops.hf.restore(ours)
    assert ours.__dict__["prepare_inputs_for_generation"] is method and "forward" not in ours.__dict__


def test_a_module_with_another_forward(root):
    theirs, ours = pair(root)
    for model in (theirs, ours):
        mlp = model.gpt_neox.layers[0].mlp
        mlp.forward = lambda x, forward=mlp.forward: 2 * forward(x)
    assert_falls_back(theirs, ours, "a module's forward was replaced", lambda m: m(IDS))


def test_a_dtype_that_no_runner_takes(root):
    theirs, ours = load(root, NAME).double(), cf_ops.hf.speed_up(load(root, NAME)).double()
    reason = "tensors: config: model: dtype must be float16, bfloat16 or float32, got float64"
    assert_falls_back(theirs, ours, reason, lambda m: m(IDS))


def halve_in_place(model):
    model.gpt_neox.layers[0].mlp.dense_4h_to_h.weight.mul_(0.5)


def set_data(model):
    weight = model.gpt_neox.layers[1].attention.dense.weight
    weight.data = 3 * weight.data


def set_parameter(model):
    mlp = model.gpt_neox.layers[1].mlp
    mlp.dense_4h_to_h.weight = torch.nn.Parameter(0.25 * mlp.dense_4h_to_h.weight)


def set_module(model):
    old = model.get_output_embeddings()
    new = torch.nn.Linear(old.in_features, old.out_features, bias=False, dtype=old.weight.dtype).eval()
    new.weight.copy_(2 * old.weight)
    model.set_output_embeddings(new)


@pytest.mark.parametrize("change", [halve_in_place, set_data, set_parameter, set_module])
def test_changed_parameters_are_read_again(root, change):
    ours, reference = cf_ops.hf.speed_up(load(root, NAME, torch.float32)), load(root, NAME, torch.float64)
    with torch.no_grad():
        before = ours(IDS).logits
        for model in (ours, reference):
            change(model)
        after, exact = ours(IDS).logits, reference(IDS).logits
    bound = max(ErrorBound(reference, ids).relative for ids in IDS)
    assert (after - exact).abs().max() <= bound * exact.abs().max() < (before - exact).abs().max()
    assert reasons(ours) == set()


def test_rounded_frequencies_of_a_halved_model_are_kept(root):
    """model.half() rounds the buffer of inverse frequencies, and so changes what Hugging Face computes."""
    ours = cf_ops.hf.speed_up(load(root, NAME, torch.float32).half())
    ids = padded([60])["input_ids"]
    rounded = load(root, NAME, torch.float32).half().double()
    with torch.no_grad():
        exact, other = rounded(ids).logits, load(root, NAME, torch.float64)(ids).logits
        error = (cf_ops.hf.run(ours, ids)[0] - exact).abs().max()
    assert error < 1e-4 * exact.abs().max() and (other - exact).abs().max() > 10 * error


def test_the_callers_cache_is_filled(root):
    theirs, ours = pair(root)

    def call(model):
        cache = transformers.DynamicCache()
        model(IDS, past_key_values=cache)
        assert cache.get_seq_length() == 6
        return model(IDS[:, :1], past_key_values=cache).logits

    assert_falls_back(theirs, ours, "a cache of the caller's", call)


GENERATE = {
    "generation mode beam_search": {"num_beams": 3},
    "generation mode beam_sample": {"num_beams": 2, "do_sample": True},
    "a cache of the caller's": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("reason", GENERATE)
def test_generation_modes(root, reason):
    arguments = {"do_sample": False, **GENERATE[reason]}

    def call(model):
        torch.manual_seed(0)
        return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, **arguments)

    assert_falls_back(*pair(root), reason, call)


def test_assisted_generation(root):
    """Here the assistant runs on cf_ops: its cache is cropped again and again. The ids are the large model's."""
    inputs = padded([6])
    theirs, ours = pair(root, dtype=torch.float32)
    assistant = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    out = ours.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=assistant)
    assert out.tolist() == theirs.generate(**inputs, max_new_tokens=16, do_sample=False).tolist()
    assert reasons(ours) == {"generation mode assisted_generation"}
    assert cf_ops.hf.report(assistant).share == 1 and cf_ops.hf.report(assistant).cf_ops


def test_a_custom_loop(root):
    def loop(model, input_ids, **options):
        cache, ids = options[CACHE], input_ids
        for _ in range(4):
            logits = model(ids[:, cache.get_seq_length() :], **{CACHE: cache}).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return ids

    theirs, ours = pair(root)
    assert_falls_back(theirs, ours, "generation mode custom_generate", lambda m: m.generate(IDS, custom_generate=loop))


def test_ids_outside_the_vocabulary_raise_hugging_faces_error(root):
    theirs, ours = pair(root)
    for model in (theirs, ours):
        with torch.no_grad(), pytest.raises(IndexError):
            model(torch.tensor([[5, 128]]))
    assert len(reasons(ours)) == 1 and "128" in reasons(ours).pop()


def test_a_runner_that_fails_hands_over(root, monkeypatch):
    """A failure in the midst of a generation: the sequences go on at Hugging Face's, from the same ids."""
    from cf_ops.hf import _runner

    inputs = padded([6, 3, 9])
    ours = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    steps = []
    step = _runner._CpuRunner.step

    def failing(self, tokens):
        steps.append(tokens)
        if len(steps) >= 5:
            raise MemoryError("no memory is left")
        return step(self, tokens)

    monkeypatch.setattr(_runner._CpuRunner, "step", failing)
    out = ours.generate(**inputs, max_new_tokens=20, do_sample=False)
    counted = cf_ops.hf.report(ours)
    assert counted.cf_ops == {"greedy prefill": 1, "greedy loop": 4}
    assert counted.step_by_step == {"no memory is left": 1} and "no memory is left" in str(counted)
    assert counted.hugging_face["no memory is left"] == 1 and sum(counted.hugging_face.values()) == 15
    assert counted.cache_bytes == 0
    assert check_tokens(load(root, NAME, torch.float64), torch.float32, inputs, out) > 0.5


def test_a_hook_in_the_midst_of_a_generation(root):
    inputs = padded([6, 3, 9])
    ours = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    seen = []

    class Hooking(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 9 + 5:
                ours.gpt_neox.layers[0].register_forward_hook(lambda module, i, output: seen.append(1) and None)
            return torch.zeros(3, dtype=torch.bool)

    criteria = transformers.StoppingCriteriaList([Hooking()])
    out = ours.generate(**inputs, max_new_tokens=12, do_sample=False, stopping_criteria=criteria)
    assert cf_ops.hf.report(ours).cf_ops == {"greedy prefill": 1, "greedy step": 4} and len(seen) >= 7
    assert check_tokens(load(root, NAME, torch.float64), torch.float32, inputs, out) > 0.5


def changed_in_the_midst(model, change, place):
    """Greedy ids of a generation in which a criterion changes the model once there are so many places."""
    seen = []

    def criterion(input_ids, scores, **kwargs):
        seen.append(input_ids.shape[1])
        if len(seen) == place:
            with torch.no_grad():
                change(model)
        return torch.zeros(3, dtype=torch.bool)

    criteria = transformers.StoppingCriteriaList([criterion])
    return model.generate(**padded([6, 3, 9]), max_new_tokens=12, do_sample=False, stopping_criteria=criteria)


def hook(model):
    model.gpt_neox.layers[0].register_forward_hook(lambda module, inputs, output: None)


@pytest.mark.parametrize("change", [halve_in_place, set_data, set_parameter, set_module, hook])
def test_a_change_in_the_midst_of_the_loop(root, change):
    """A streamer changes the model: the steps behind are those of transformers' own loop, with the same ids."""

    class Changing(transformers.generation.streamers.BaseStreamer):
        def __init__(self, model):
            self.model, self.calls = model, 0

        def put(self, value):
            self.calls += 1
            if self.calls == 6:
                with torch.no_grad():
                    change(self.model)

        def end(self):
            self.model = None

    never = transformers.StoppingCriteriaList([lambda ids, scores, **_: torch.zeros(3, dtype=torch.bool)])
    made, counted = [], []
    for options in ({}, {"stopping_criteria": never}):
        ours = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
        inputs = padded([6, 3, 9])
        made.append(ours.generate(**inputs, max_new_tokens=12, do_sample=False, streamer=Changing(ours), **options))
        counted.append(cf_ops.hf.report(ours))
    assert torch.equal(*made)
    assert counted[0].cf_ops["greedy loop"] == 4 and len(counted[0].step_by_step) == 1
    assert counted[0].hugging_face == counted[1].hugging_face
    assert sum(counted[0].cf_ops.values()) == sum(counted[1].cf_ops.values())


@pytest.mark.parametrize("change", [lambda model: None, halve_in_place, set_data, set_parameter, set_module])
def test_a_step_that_follows_is_what_it_is_by_itself(root, monkeypatch, change):
    """The loop's steps are launched before the model is checked. A model that has changed since is read again."""
    from cf_ops.hf import _patch

    looked_at = []
    left_padding = _patch._left_padding
    monkeypatch.setattr(_patch, "_left_padding", lambda *args: looked_at.append(1) or left_padding(*args))
    got = changed_in_the_midst(ours := cf_ops.hf.speed_up(load(root, NAME)), change, 5)
    follows, counted = len(looked_at), cf_ops.hf.report(ours)
    monkeypatch.setattr(_patch._Steps, "_may_go_on", lambda steps: False)
    looked_at.clear()
    slow = cf_ops.hf.speed_up(load(root, NAME))
    assert torch.equal(got, changed_in_the_midst(slow, change, 5))
    assert counted == cf_ops.hf.report(slow) and counted.cf_ops == {"greedy prefill": 1, "greedy step": 11}
    assert len(looked_at) == 12 and follows <= 2


def test_a_cache_that_was_cut_is_looked_at(root):
    """A criterion cuts the cache of a generation: its next step is none that follows."""
    ours = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    caches = []

    def criterion(input_ids, scores, **kwargs):
        if input_ids.shape[1] == 9 + 4:
            (cache,) = ours._cf_ops._caches
            cache.crop(-2)
            caches.append(cache)
        return torch.zeros(3, dtype=torch.bool)

    criteria = transformers.StoppingCriteriaList([criterion])
    with contextlib.suppress(RuntimeError, ValueError, IndexError):  # for such a mask
        ours.generate(**padded([6, 3, 9]), max_new_tokens=12, do_sample=False, stopping_criteria=criteria)
    assert len(caches) == 1 and cf_ops.hf.report(ours).cf_ops == {"greedy prefill": 1, "greedy step": 3}
    assert "attention_mask does not have a place for each token" in reasons(ours)


def test_a_cache_goes_on_after_a_call_on_hugging_faces_path(root):
    """The caller's loop passes on what each call returns, or keeps the first cache: both are the same sequence."""
    ids = padded([12])["input_ids"]
    for keeps in (False, True):
        ours = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
        with torch.no_grad():
            whole = load(root, NAME, torch.float64)(ids).logits
            first = ours(ids[:, :5])
            second = ours(ids[:, 5:8], past_key_values=first.past_key_values, output_hidden_states=True)
            cache = first.past_key_values if keeps else second.past_key_values
            third = ours(ids[:, 8:], past_key_values=cache)
        parts = torch.cat([first.logits, second.logits, third.logits], 1)
        assert (parts - whole).abs().max() < 1e-4 * whole.abs().max()
        assert first.past_key_values.get_seq_length() == 12


def test_each_reason_is_logged_once(root, caplog):
    ours = cf_ops.hf.speed_up(load(root, NAME))
    with caplog.at_level(logging.WARNING, logger="cf_ops.hf"), torch.no_grad():
        for _ in range(3):
            ours(IDS, output_hidden_states=True)
            ours(IDS, labels=IDS)
    messages = [r.message for r in caplog.records if r.name == "cf_ops.hf"]
    assert sorted(messages) == [
        "cf_ops: a call runs on Hugging Face's path: labels (make the loss of the logits)",
        "cf_ops: a call runs on Hugging Face's path: output_hidden_states (read hidden states with cf_ops.hf.run())",
    ]
    assert cf_ops.hf.report(ours).hugging_face == {"labels": 3, "output_hidden_states": 3}
    assert "labels" in str(cf_ops.hf.report(ours))


def test_compiled_models_are_hugging_faces(root):
    logging.getLogger("torch").setLevel(logging.WARNING)
    theirs, ours = pair(root, dtype=torch.float32)
    with torch.no_grad():
        compiled = torch.compile(ours, backend="eager", fullgraph=True)(IDS, use_cache=False).logits
        expected = theirs(IDS).logits
    # Both are float32, within the bound of float64.
    bound = ErrorBound(load(root, NAME, torch.float64), IDS[0]).relative * expected[0].abs().max()
    assert (compiled - expected)[0].abs().max() <= 2 * bound
    assert cf_ops.hf.report(ours).cf_ops == {}


REFUSED = {
    r"expected a GPTNeoXForCausalLM, .* or \w+, got torch.nn": (TypeError, lambda m: torch.nn.Linear(2, 2)),
    "expected a contiguous tensor": (ValueError, lambda m: transposed(m)),
    "expected one that transformers builds": (NotImplementedError, lambda m: quantised(m)),
    "expected parameters on a CPU": (NotImplementedError, lambda m: m.to("meta")),
    "expected the method of its class": (ValueError, lambda m: replaced(m)),
    "rotary_emb": (NotImplementedError, lambda m: scaled(m)),
    "is NaN|not finite|nan": (ValueError, lambda m: spoiled(m)),
}


def transposed(model):
    weight = model.gpt_neox.layers[0].attention.dense.weight
    weight.data = weight.data.t().contiguous().t()
    return model


def quantised(model):
    class QuantLinear(torch.nn.Module):
        pass

    model.gpt_neox.layers[1].mlp.dense_4h_to_h = QuantLinear()
    return model


def replaced(model):
    model.forward = copy.copy(model.forward)
    return model


def scaled(model):
    rotary = getattr(model.gpt_neox, "rotary_emb", None) or model.gpt_neox.layers[0].attention.rotary_emb
    rotary.attention_scaling, rotary.rope_type = 0.5, "yarn"
    return model


def spoiled(model):
    with torch.no_grad():
        model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight[3, 4] = float("nan")
    return model


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_are_refused(root, message):
    error, change = REFUSED[message]
    model = change(load(root, NAME))
    before = dict(model.__dict__)
    with pytest.raises(error, match=message):
        cf_ops.hf.speed_up(model)
    assert model.__dict__ == before
    for function in (cf_ops.hf.restore, cf_ops.hf.report):
        with pytest.raises(ValueError, match="expected one with speed_up"):
            function(model)
