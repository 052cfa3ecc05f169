"""speed_up of models on a GPU, beside the oracle and Hugging Face's own path."""

import copy
import gc

import numpy as np
import pytest
from cuda_models import CHECKPOINTS, Oracle, check_greedy, gpu

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import cf_ops.hf
import hf_gptq
from cf_ops import _core
from hf_models import CACHE, load, padded, sequences
from made_gptq import checkpoint

DEVICE = "cuda"
NEOX = ("neox", "stdlib-4m")
DENSE = [name for name in CHECKPOINTS if "gptq" not in name]
LLAMAS = [name for name in DENSE if not name.startswith(NEOX)]
BATCHES = {1: [7], 3: [5, 1, 9], 8: [3, 12, 1, 7, 7, 2, 10, 5]}

pytestmark = [gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]


def model_of(root, name, dtype="auto"):
    return load(root, name, dtype).to(DEVICE)


def on_device(inputs):
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def greedy(model, inputs, new=24, **options):
    return model.generate(**on_device(inputs), max_new_tokens=new, do_sample=False, **options).cpu()


class Never(transformers.StoppingCriteria):
    """Stops nothing, and has torch choose the ids from the logits of each step."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def by_step():
    return {"stopping_criteria": transformers.StoppingCriteriaList([Never()])}


class Streamer(transformers.generation.streamers.BaseStreamer):
    """Keeps what it is given, and calls `then` with the number of calls."""

    def __init__(self, then=lambda calls: None):
        self.put_so_far, self.has_ended, self._then = [], False, then

    def put(self, value):
        assert value.dtype == torch.long and value.device.type == "cpu" and not self.has_ended
        self.put_so_far.append(value.tolist())
        self._then(len(self.put_so_far))

    def end(self):
        self.has_ended = True


def weights_of(root, name):
    return _core.Weights.open(str(checkpoint(name)))


def dtype_name(model):
    return str(model.dtype).removeprefix("torch.")


def assert_all_ours(model):
    report = cf_ops.hf.report(model)
    assert report.hugging_face == {} and report.share == 1 and sum(report.cf_ops.values()) > 0, str(report)


def check_all(root, name, model, inputs, generated):
    """The share of ids whose margin decides."""
    shares = [
        check_greedy(weights_of(root, name), row[:prompt].tolist(), row[prompt:].tolist(), dtype_name(model))
        for row, prompt in sequences(inputs, generated)
    ]
    return sum(shares) / len(shares)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("batch", BATCHES)
def test_greedy_ids_are_those_of_float64(root, name, batch):
    inputs = padded(BATCHES[batch])
    model = cf_ops.hf.speed_up(model_of(root, name))
    generated = greedy(model, inputs)
    assert generated.shape == (batch, inputs["input_ids"].shape[1] + 24)
    assert check_all(root, name, model, inputs, generated) > 0
    assert_all_ours(model)
    assert set(cf_ops.hf.report(model).cf_ops) == {"greedy prefill", "greedy loop"}
    assert torch.equal(generated, greedy(model, inputs))
    assert torch.equal(generated, greedy(cf_ops.hf.speed_up(model_of(root, name)), inputs))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_loop_gives_the_ids_of_transformers_loop(root, name, batch):
    """As many ids as several launches make ahead, and sequences that end by themselves."""
    inputs, model = padded(BATCHES[batch]), cf_ops.hf.speed_up(model_of(root, name))
    for new in (1, 2, 100):
        streams = Streamer(), Streamer()
        generated = greedy(model, inputs, new, streamer=streams[0])
        assert torch.equal(generated, greedy(model, inputs, new, streamer=streams[1], **by_step()))
        assert streams[0].put_so_far == streams[1].put_so_far and streams[0].has_ended
    ends = [int(generated[0, -91]), int(generated[-1, -60])]
    for end in (ends[0], ends):
        ended = greedy(model, inputs, 100, eos_token_id=end)
        assert torch.equal(ended, greedy(model, inputs, 100, eos_token_id=end, **by_step()))
    counted = cf_ops.hf.report(model)
    assert counted.step_by_step == {"a stopping criterion": 5} and counted.cf_ops["greedy prefill"] == 10
    assert counted.cf_ops["greedy loop"] >= 100
    assert_all_ours(model)


def test_the_loop_runs_launches_of_many_tokens(root):
    """A model that auto takes the persistent kernel for; steps whose logits were asked for come before."""
    model = cf_ops.hf.speed_up(large_model())
    for lengths in ([9], [6, 3]):
        inputs = padded(lengths, vocab=4096)
        expected = greedy(model, inputs, 70, **by_step())
        assert torch.equal(greedy(model, inputs, 70), expected)
        end = int(expected[0, -40])
        ended = greedy(model, inputs, 70, eos_token_id=end)
        assert torch.equal(ended, greedy(model, inputs, 70, eos_token_id=end, **by_step()))
        assert torch.equal(greedy(model, inputs, 70), expected)
        is_persistent = model._cf_ops._loaded.backend._model.impl == "persistent"
        assert is_persistent == (torch.cuda.get_device_capability() >= (9, 0))
    assert_all_ours(model)


def test_a_generation_goes_on_behind_the_loop(root):
    """The cache that the loop leaves has the entries of transformers' loop, those of sequences that have ended too."""
    model, inputs = cf_ops.hf.speed_up(model_of(root, "neox-d80")), padded(BATCHES[3])
    end = int(greedy(model, inputs)[0, -20])
    for options in ({}, {"eos_token_id": end}):
        made = []
        for loop in ({}, by_step()):
            first = model.generate(
                **on_device(inputs), max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **options, **loop
            )
            ids, cache = first.sequences, first[CACHE]
            mask = torch.ones_like(ids)
            mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"].to(DEVICE)
            assert cache.get_seq_length() == ids.shape[1] - 1
            inner = {"attention_mask": mask, CACHE: cache, "max_new_tokens": 6, "do_sample": False}
            made.append((ids.tolist(), [list(row) for row in cache.ids], model.generate(ids, **inner, **loop).shape))
        assert made[0] == made[1]
    assert_all_ours(model)


def test_a_parameter_that_a_streamer_changes_is_seen_by_the_next_step(root):
    made = []
    for options in ({}, by_step()):
        model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))

        def negate(calls):
            if calls == 6:
                with torch.no_grad():
                    model.get_output_embeddings().weight.neg_()

        made.append(greedy(model, padded(BATCHES[3]), streamer=Streamer(negate), **options).tolist())
        counted = cf_ops.hf.report(model)
        assert counted.share == 1 and len(counted.step_by_step) == 1
    assert made[0] == made[1]
    assert made[0] != greedy(cf_ops.hf.speed_up(model_of(root, "neox-d80")), padded(BATCHES[3])).tolist()


def test_an_interrupt_ends_the_loop_and_gives_its_slots_back(root):
    model, inputs = cf_ops.hf.speed_up(model_of(root, "neox-d80")), padded(BATCHES[3])
    expected = greedy(model, inputs)

    def interrupt(calls):
        if calls == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        greedy(model, inputs, 400, streamer=Streamer(interrupt))
    shared = model._cf_ops._loaded.backend._model
    assert shared.free_slots == shared.slots and cf_ops.hf.report(model).cache_bytes == 0
    assert torch.equal(greedy(model, inputs), expected)
    assert_all_ours(model)


@pytest.mark.parametrize("name, dtype", [*((name, "auto") for name in DENSE), ("neox-d80", torch.float32)])
def test_logits_are_within_the_bound(root, name, dtype):
    ids = padded([40])["input_ids"]
    model = cf_ops.hf.speed_up(model_of(root, name, dtype))
    with torch.no_grad():
        logits = model(ids.to(DEVICE)).logits
    assert (
        logits.dtype == model.dtype
        and logits.device == model.device
        and logits.shape == (1, 40, model.config.vocab_size)
    )
    assert_all_ours(model)
    oracle = Oracle(weights_of(root, name), ids[0].tolist(), dtype_name(model))
    oracle.check_rows(logits[0].float().cpu().numpy())
    in_float32, taps = cf_ops.hf.run(model, ids)
    assert taps == {} and in_float32.device == model.device and torch.equal(in_float32.to(logits.dtype), logits)
    again, taps = cf_ops.hf.run(model, ids, ["layers.0.output"])
    assert torch.equal(again, in_float32)
    tap = taps["layers.0.output"]
    assert tap.dtype == torch.float32 and tap.device == model.device
    runner = _core.Runner(weights_of(root, name), capacity=40, activation="float64")
    exact = runner.run(0, 0, ids[0].tolist(), 1, list(taps))[1]["layers.0.output"]
    assert np.linalg.norm(tap[0].cpu().numpy() - exact) <= oracle.bound * np.linalg.norm(exact)


def test_sampling_and_several_sequences_run_on_ours(root):
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        inputs = on_device(padded(BATCHES[3]))
        out = model.generate(**inputs, do_sample=True, num_return_sequences=4, max_new_tokens=8)
        assert out.shape == (12, 17)
        drawn.append(out)
    assert torch.equal(*drawn)
    model.generate(**on_device(padded(BATCHES[8])), do_sample=True, max_new_tokens=8, repetition_penalty=1.2)
    assert_all_ours(model)
    assert set(cf_ops.hf.report(model).cf_ops) == {"sampled prefill", "sampled step"}


def test_ids_may_lie_on_the_host(root):
    model, inputs = cf_ops.hf.speed_up(model_of(root, "neox-d80")), padded(BATCHES[3])
    expected = greedy(model, inputs)
    for options in ({}, by_step()):
        generated = model.generate(**inputs, max_new_tokens=24, do_sample=False, **options)
        assert generated.device.type == "cpu" and torch.equal(generated, expected)
    assert_all_ours(model)


def test_a_calls_bits_do_not_depend_on_the_calls_before(root):
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    ids = padded([9])["input_ids"].to(DEVICE)
    with torch.no_grad():
        first = model(ids, use_cache=True)
        step = model(ids[:, :1], past_key_values=first.past_key_values).logits
        del first
        greedy(model, padded(BATCHES[8]))  # more slots
        greedy(model, padded([3]), new=300)  # more entries
        again = model(ids, use_cache=True)
        assert torch.equal(model(ids[:, :1], past_key_values=again.past_key_values).logits, step)
    assert_all_ours(model)


def test_caches_share_the_device(root):
    """The second cache takes the device's model over; the first makes its entries again and goes on."""
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    texts = [padded([7], seed=1)["input_ids"], padded([5, 5, 5], seed=2)["input_ids"]]
    caches, rows = [None, None], [[], []]
    with torch.no_grad():
        for first, last in ((0, 3), (3, 4), (4, 5)):
            for which, ids in enumerate(texts):
                output = model(ids[:, first:last].to(DEVICE), past_key_values=caches[which], use_cache=True)
                caches[which] = output.past_key_values
                rows[which].append(output.logits.float().cpu())
    assert_all_ours(model)
    assert cf_ops.hf.report(model).cache_bytes > 0
    for ids, parts in zip(texts, rows):
        for row, logits in zip(ids, torch.cat(parts, 1)):
            Oracle(weights_of(root, "neox-d80"), row[:5].tolist(), "float16").check_rows(logits.numpy())
    copied = copy.deepcopy(caches[0])
    with torch.no_grad():
        one, other = (model(texts[0][:, 5:6].to(DEVICE), past_key_values=c).logits for c in (caches[0], copied))
    row = texts[0][0, :6].tolist()
    for logits in (one, other):
        Oracle(weights_of(root, "neox-d80"), row, "float16").check_rows(logits[0].float().cpu().numpy())


def test_a_batch_beyond_the_slots_falls_back(root):
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    generated = greedy(model, padded([3] * 1025), new=2)
    assert generated.shape == (1025, 5)
    assert any("slots must be 1 to 1024, got 1025" in reason for reason in cf_ops.hf.report(model).hugging_face)
    assert check_all(root, "neox-d80", model, padded([3]), greedy(model, padded([3]), new=2)) >= 0


def test_what_falls_back(root):
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    theirs = model_of(root, "neox-d80")
    ids = padded([6])["input_ids"].to(DEVICE)
    with torch.no_grad():
        assert torch.equal(
            model(ids, output_hidden_states=True).hidden_states[1],
            theirs(ids, output_hidden_states=True).hidden_states[1],
        )
        model.generate(ids, num_beams=2, max_new_tokens=3, do_sample=False)
    assert set(cf_ops.hf.report(model).hugging_face) == {"output_hidden_states", "generation mode beam_search"}


def test_rounded_frequencies_fall_back(root):
    """model.half() rounds the buffer of RoPE's frequencies, and Hugging Face computes with what is left."""
    model = cf_ops.hf.speed_up(load(root, "neox-d80", torch.float32).half().to(DEVICE))
    theirs = load(root, "neox-d80", torch.float32).half().to(DEVICE)
    ids = padded([6])["input_ids"].to(DEVICE)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)
    (reason,) = cf_ops.hf.report(model).hugging_face
    assert reason.startswith("RoPE's table is not the config's in float32")


def test_changed_weights_are_seen(root):
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    inputs = padded([6])
    before = greedy(model, inputs)
    norm = model.gpt_neox.final_layer_norm
    with torch.no_grad():
        ids = inputs["input_ids"].to(DEVICE)
        logits = model(ids).logits
        norm.weight.mul_(2)
        norm.bias.mul_(2)
        # A power of two changes no other bit of a logit, unless it is subnormal.
        assert torch.equal(model(ids).logits[logits.abs() > 1e-3], 2 * logits[logits.abs() > 1e-3])
        norm.weight.div_(2)
        norm.bias.div_(2)
    assert torch.equal(greedy(model, inputs), before)
    with torch.no_grad():
        norm.weight[3] = float("nan")
        assert model(ids).logits.isnan().all()
    assert_all_ours(model)
    with pytest.raises(ValueError, match="expected finite values, got 1"):
        cf_ops.hf.speed_up(cf_ops.hf.restore(model))


def test_restore_gives_methods_and_memory_back(root):
    model = model_of(root, "neox-d80")
    methods = dict(model.__dict__)
    ids = padded([6])["input_ids"].to(DEVICE)
    cf_ops.hf.speed_up(model)
    with torch.no_grad():
        cache = model(ids).past_key_values
    report = cf_ops.hf.report(model)
    assert report.cache_bytes == cache.cache_bytes > 0 and report.weight_bytes > 0 and report.in_place
    assert "read in place" in str(report)
    shared = model._cf_ops._loaded.backend._model
    assert shared.free_slots == 0
    cf_ops.hf.restore(model)
    gc.collect()
    assert shared.free_slots == 1 and cache.cache_bytes == 0 and model.__dict__ == methods
    assert shared.weight_bytes == 0
    cf_ops.hf.speed_up(model)
    with torch.no_grad():
        model(ids)
    del shared
    assert_all_ours(model)


def test_a_model_that_moves_is_read_again(root):
    model = cf_ops.hf.speed_up(load(root, "neox-d80"))
    inputs = padded([6, 3])
    on_cpu = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    model.to(DEVICE)
    on_gpu = greedy(model, inputs, new=6)
    check_all(root, "neox-d80", model, inputs, on_gpu)
    model.to("cpu")
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), on_cpu)
    assert_all_ours(model)


def bits_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def addresses(model):
    return [p.data_ptr() for p in model.parameters()]


def bytes_of(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def large(kind, config_kind, **own):
    config = config_kind(
        vocab_size=4096,
        hidden_size=2048,
        num_hidden_layers=6,
        num_attention_heads=16,
        intermediate_size=8192,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        **own,
    )
    with torch.device(DEVICE):
        model = kind(config).eval()
    for parameter in model.parameters():  # half() would round the frequencies of RoPE too
        parameter.data = parameter.data.half()
    return model


def large_model():
    """A model whose weights are many times what else it needs: 0.7 GB of float16."""
    return large(transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig)


def large_llama():
    """The same of another family, whose q, k, v, gate and up are joined: 0.6 GB of float16, 0.4 of them joined."""
    return large(transformers.LlamaForCausalLM, transformers.LlamaConfig, num_key_value_heads=4)


def bytes_outside_torch():
    """What is not free on the GPU and not torch's. Its segments stay as long as one tensor lies in them."""
    taken = taken_bytes()
    return taken - torch.cuda.memory_reserved()


def taken_bytes():
    """What is not free on the GPU once torch has given back what no tensor has."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("name", ["neox-d80", "neox-bf16", "neox-tied"])
def test_parameters_stay_where_they_are(root, name):
    """Hugging Face's path computes the same bits before, with and after speed_up, and so do all that use parameters."""
    model = model_of(root, name)
    ids = padded([7, 3])["input_ids"].to(DEVICE)
    parameters, places, state = list(model.parameters()), addresses(model), bits_of(model)

    def theirs():
        with torch.no_grad():
            return model(ids, output_hidden_states=True).logits

    before = theirs()
    cf_ops.hf.speed_up(model)
    generated = greedy(model, padded([7, 3]))
    assert_all_ours(model)
    assert torch.equal(theirs(), before)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True)) and addresses(model) == places
    assert cf_ops.hf.report(model).copied_bytes == 0 and cf_ops.hf.report(model).weight_bytes == bytes_of(model)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_tied == (name == "neox-tied")
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    cf_ops.hf.restore(model)
    assert addresses(model) == places and torch.equal(theirs(), before)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    model.cpu()
    assert all(torch.equal(tensor, state[key].cpu()) for key, tensor in model.state_dict().items())
    wide = model.to(device=DEVICE, dtype=torch.float32)
    assert all(torch.equal(tensor, state[key].float()) for key, tensor in wide.state_dict().items())
    assert generated.shape == (2, 31)


@pytest.mark.parametrize("make", [large_model, large_llama])
def test_weights_lie_once_on_the_device(root, make):
    inputs = padded([6, 3], vocab=4096)
    batches = [{name: rows[:count] for name, rows in inputs.items()} for count in (1, 2)]
    model = cf_ops.hf.speed_up(make())
    for batch in batches:
        greedy(model, batch, new=4)  # loads the kernels
    del model
    empty = taken_bytes()
    model = make()
    weights, outside, of_torch = bytes_of(model), bytes_outside_torch(), torch.cuda.memory_allocated()
    assert taken_bytes() - empty >= weights
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    # Parameters are joined one matrix after another: the largest one, of gate and up, is there beside its two parts.
    joined = 2 * max((p.nbytes for name, p in model.named_parameters() if "gate_proj" in name), default=0)
    for batch in batches:
        torch.cuda.reset_peak_memory_stats()
        cf_ops.hf.speed_up(model)
        greedy(model, batch, new=4)
        assert_all_ours(model)
        shared = model._cf_ops._loaded.backend._model
        assert shared.weight_bytes == 0
        assert bytes_outside_torch() - outside <= shared.cache_bytes + shared.workspace_bytes + 64e6 < weights / 2
        assert torch.cuda.memory_allocated() <= of_torch + 1e6
        assert torch.cuda.max_memory_allocated() <= of_torch + max(joined, 64e6) + 1e6
        del shared
        cf_ops.hf.restore(model)
        assert bytes_outside_torch() <= outside + 16e6
        assert torch.cuda.memory_allocated() <= of_torch + 1e6
    assert all(torch.equal(tensor.cpu(), state[name]) for name, tensor in model.state_dict().items())
    cf_ops.hf.speed_up(model)
    greedy(model, inputs, new=2)
    del model
    assert taken_bytes() <= empty + 16e6


@pytest.mark.parametrize("name", LLAMAS)
def test_joined_parameters_and_what_restore_gives_back(root, name):
    """Hugging Face's own path gives the same bits before speed_up and behind restore, and within 16 bits with it."""
    model = model_of(root, name)
    ids = padded([7, 7])["input_ids"].to(DEVICE)
    state, taken = bits_of(model), bytes_of(model)

    def theirs():
        with torch.no_grad():
            return model(ids, output_hidden_states=True).logits

    before, ids_before = theirs(), greedy(model, padded([7]))
    cf_ops.hf.speed_up(model)
    generated = greedy(model, padded([7]))
    assert_all_ours(model)
    # Views of joined matrices may take another kernel of cuBLAS.
    unit = torch.finfo(model.dtype).eps
    assert (theirs() - before).abs().max() <= 64 * unit * before.abs().max()
    storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}
    assert sum(storages.values()) == taken and cf_ops.hf.report(model).weight_bytes == taken
    assert cf_ops.hf.report(model).copied_bytes == (2 * 2 * 96 if "biases" in name else 0)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    with torch.no_grad():
        gpt2 = model.config.model_type == "gpt2"
        layer = model.transformer.h[0] if gpt2 else model.model.layers[0]
        modules = (layer.mlp.c_fc, layer.attn.c_attn) if gpt2 else (layer.mlp.up_proj, layer.self_attn.v_proj)
        parameters = [module.weight for module in modules]
        kept = [p.clone() for p in parameters]
        for parameter in parameters:
            parameter.mul_(2)
        changed = model(ids).logits
        for parameter, values in zip(parameters, kept):
            parameter.copy_(values)
        assert not torch.equal(model(ids).logits, changed)
    assert torch.equal(greedy(model, padded([7])), generated)
    cf_ops.hf.restore(model)
    assert all(p.is_contiguous() and p.nbytes == p.untyped_storage().nbytes() for p in model.parameters())
    assert torch.equal(theirs(), before) and torch.equal(greedy(model, padded([7])), ids_before)


def gptq_model_of(name):
    return hf_gptq.load_gptq(name).to(DEVICE)


@pytest.mark.parametrize("name", hf_gptq.CHECKPOINTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_greedy_ids_of_quantised_models_are_those_of_float64(root, name, batch):
    inputs = padded(BATCHES[batch])
    model = cf_ops.hf.speed_up(gptq_model_of(name))
    generated = greedy(model, inputs)
    assert check_all(root, name, model, inputs, generated) > 0
    assert_all_ours(model)
    assert torch.equal(generated, greedy(model, inputs))
    assert torch.equal(generated, greedy(model, inputs, **by_step()))
    logits = cf_ops.hf.run(model, inputs["input_ids"][-1:].to(DEVICE))[0]
    ids = inputs["input_ids"][-1].tolist()
    Oracle(weights_of(root, name), ids, "float16").check_rows(logits[0].cpu().numpy())


@pytest.mark.parametrize("name", hf_gptq.CHECKPOINTS)
def test_quantised_models_keep_their_tensors_and_are_packed_once(name):
    model = gptq_model_of(name)
    state, ids = bits_of(model), padded([7, 7])["input_ids"].to(DEVICE)
    places = {key: b.data_ptr() for key, b in model.named_buffers() if key.rpartition(".")[2] in hf_gptq.PARTS}

    def theirs():
        with torch.no_grad():
            return model(ids, output_hidden_states=True).logits

    before = theirs()
    of_torch = torch.cuda.memory_allocated()
    cf_ops.hf.speed_up(model)
    backend = model._cf_ops._loaded.backend
    report = cf_ops.hf.report(model)
    # The packed form, and biases that alternate: torch rounds each up to 512 bytes.
    assert 0 < report.copied_bytes and not report.in_place
    assert torch.cuda.memory_allocated() - of_torch >= report.copied_bytes - 512
    generated = [greedy(model, padded(lengths)) for lengths in BATCHES.values()]
    assert_all_ours(model)
    assert model._cf_ops._loaded.backend is backend and backend._model.weight_bytes == 0
    assert torch.equal(theirs(), before)
    assert {key: b.data_ptr() for key, b in model.named_buffers() if key in places} == places
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    with torch.no_grad():
        last = "dense_4h_to_h.scales", "down_proj.scales", "mlp.c_proj.scales"
        scales = next(buffer for key, buffer in model.named_buffers() if key.endswith(last))
        before_change = cf_ops.hf.run(model, ids)[0]
        scales.mul_(2)
        assert not torch.equal(cf_ops.hf.run(model, ids)[0], before_change)
        scales.div_(2)
        assert torch.equal(cf_ops.hf.run(model, ids)[0], before_change)
    del backend
    cf_ops.hf.restore(model)
    gc.collect()
    assert torch.cuda.memory_allocated() <= of_torch + 512 * len(state) and torch.equal(theirs(), before)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    cf_ops.hf.speed_up(model)
    assert all(torch.equal(greedy(model, padded(n)), ids) for n, ids in zip(BATCHES.values(), generated))


def test_another_scaling_of_rope_falls_back(root):
    """The library's own table is llama3's of the config; a module with other frequencies is Hugging Face's."""
    model = cf_ops.hf.speed_up(model_of(root, "llama-gqa3-scaled"))
    theirs = model_of(root, "llama-gqa3-scaled")
    ids = padded([6])["input_ids"].to(DEVICE)
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 6, 128) and cf_ops.hf.report(model).share == 1
        for one in (model, theirs):
            one.model.rotary_emb.inv_freq = one.model.rotary_emb.inv_freq * 1.25
        ours = model(ids).logits
        assert (ours - theirs(ids).logits).abs().max() <= 64 * torch.finfo(ours.dtype).eps * ours.abs().max()
    (reason,) = cf_ops.hf.report(model).hugging_face
    assert reason.startswith("RoPE's table is not the config's in float32")


def test_two_models_at_once(root):
    names = ("neox-d80", "neox-d128")
    inputs = padded(BATCHES[3])
    expected = [greedy(cf_ops.hf.speed_up(model_of(root, name)), inputs).tolist() for name in names]
    first, second = (cf_ops.hf.speed_up(model_of(root, name)) for name in names)
    inner = []

    def generate_in_between(ids, scores, **_):
        inner.append(greedy(second, inputs).tolist())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    criteria = transformers.StoppingCriteriaList([generate_in_between])
    assert greedy(first, inputs, stopping_criteria=criteria).tolist() == expected[0]
    assert len(inner) == 24 and all(ids == expected[1] for ids in inner)
    for model in (first, second):
        assert_all_ours(model)
    cf_ops.hf.restore(first)
    del first
    gc.collect()
    assert greedy(second, inputs).tolist() == expected[1]


def test_processors_see_logits_of_the_gpu(root):
    """Processors, criteria and streamers get what the model's own forward gives for the same ids."""
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    inputs = padded([6])
    seen, stopped, streamed = [], [], []

    def processor(ids, scores):
        seen.append((ids.clone(), scores.clone()))
        return scores

    def criterion(ids, scores, **_):
        stopped.append(ids.shape[1])
        return torch.full((len(ids),), ids.shape[1] == 14, device=ids.device)

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            streamed.append(None)

    out = greedy(
        model,
        inputs,
        logits_processor=transformers.LogitsProcessorList([processor]),
        stopping_criteria=transformers.StoppingCriteriaList([criterion]),
        streamer=Streamer(),
    )
    assert out.shape == (1, 14) and stopped == list(range(7, 15)) and streamed == [*out[0].tolist(), None]
    for step, (ids, scores) in enumerate(seen):
        assert scores.is_cuda and scores.shape == (1, model.config.vocab_size)
        assert out[0, 6 + step] == scores.argmax()
        Oracle(weights_of(root, "neox-d80"), ids[0].tolist(), "float16").check_rows(scores.float().cpu().numpy())
    assert_all_ours(model)


def test_no_logits_pass_through_the_host(root, monkeypatch):
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    inputs = on_device(padded(BATCHES[3]))
    ids = padded([9, 9])["input_ids"].to(DEVICE)
    copies = []
    to = torch.Tensor.to

    def watched(self, *args, **kwargs):
        if self.shape[-1:] == (model.config.vocab_size,) and not self.is_cuda:
            copies.append(self.shape)
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    with torch.no_grad():
        for out in (model(ids).logits, model(ids, use_cache=False).logits, cf_ops.hf.run(model, ids)[0]):
            assert out.is_cuda and out.shape == (2, 9, model.config.vocab_size)
    model.generate(**inputs, max_new_tokens=4, do_sample=True)
    assert copies == []
    assert_all_ours(model)


def test_calls_are_in_order_with_torchs_stream(root):
    """On a stream that is late, a call reads what the stream writes before it and not what it writes behind it."""
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"))
    ids = padded([9])["input_ids"].to(DEVICE)
    row = ids[0].tolist()  # on the host, so that a call does not wait for it
    norm = model.gpt_neox.final_layer_norm
    kept = [p.detach().clone() for p in (norm.weight, norm.bias)]
    with torch.no_grad():
        expected = model(ids).logits
        torch.cuda.synchronize()
        for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
            with torch.cuda.stream(stream):
                made = []
                for factor in (0, 1):
                    torch.cuda._sleep(50_000_000)
                    for parameter, values in zip((norm.weight, norm.bias), kept):
                        parameter.copy_(values * factor)
                    made.append(cf_ops.hf.run(model, row)[0])
                    for parameter in (norm.weight, norm.bias):
                        parameter.fill_(float("nan"))
                for parameter, values in zip((norm.weight, norm.bias), kept):
                    parameter.copy_(values)
            stream.synchronize()
            assert made[0].abs().max() == 0
            assert torch.equal(made[1].to(expected.dtype), expected[0])
        assert torch.equal(model(ids).logits, expected)
    assert_all_ours(model)


def test_a_parameter_amid_a_block_is_copied(root):
    model = model_of(root, "neox-d80")
    inputs = padded(BATCHES[3])
    expected = greedy(cf_ops.hf.speed_up(model), inputs)
    cf_ops.hf.restore(model)
    linear = model.gpt_neox.layers[0].mlp.dense_h_to_4h
    block = torch.empty(linear.weight.numel() + 1, dtype=linear.weight.dtype, device=DEVICE)
    block[1:] = linear.weight.detach().flatten()
    linear.weight.data = block[1:].view_as(linear.weight)
    cf_ops.hf.speed_up(model)
    assert torch.equal(greedy(model, inputs), expected)
    report = cf_ops.hf.report(model)
    assert report.copied_bytes == linear.weight.numel() * linear.weight.element_size() and not report.in_place
    with torch.no_grad():
        before = model(inputs["input_ids"].to(DEVICE)).logits
        linear.weight.zero_()
        assert not torch.equal(model(inputs["input_ids"].to(DEVICE)).logits, before)
    assert_all_ours(model)


def test_a_stream_goes_on_behind_its_window(root):
    stream = {"window": 60, "sinks": 4}
    with cf_ops.load(root / "data" / "checkpoints" / "neox-d80", device="cuda", **stream) as own:
        prompt = [5, 9, 11, 64, 3]
        expected = list(own.stream(prompt, max_new_tokens=300))
    model = cf_ops.hf.speed_up(model_of(root, "neox-d80"), **stream)
    ids = torch.tensor([prompt], device=DEVICE)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=300, do_sample=False)
    assert made[0, len(prompt) :].tolist() == expected
    assert_all_ours(model)
