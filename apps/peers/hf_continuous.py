"""hf_continuous: Hugging Face's continuous batching, which keeps the caches of all prompts in pages of one pool."""

import inspect


def kept_manager(hf):
    """Arguments of generate_batch() with which its manager, pool and graphs are made once for all runs, where
    transformers offers that. A run does not find the pages of the runs before it."""
    if "persistent_manager" not in inspect.signature(hf.generate_batch).parameters:
        return {}
    from transformers.generation import ContinuousBatchingConfig

    return {
        "persistent_manager": True,
        "continuous_batching_config": ContinuousBatchingConfig(allow_block_sharing=False),
    }


def hf_continuous(hf, load, stream):
    """A callable that runs the load once and returns its Stream, which `stream` makes; its `end` frees what it keeps.
    Times begin when the prompts are handed over: the manager, its pool and its graphs are there by then. The host has a
    token of all slots when it has the last slot's."""
    from transformers import GenerationConfig, __version__

    if not hasattr(hf, "generate_batch"):
        raise RuntimeError(f"transformers {__version__} has no generate_batch for {type(hf).__name__}")
    prompts = load.prompts(hf.config.vocab_size)
    # No id ends a sequence.
    config = GenerationConfig(do_sample=False, max_new_tokens=load.new_tokens, eos_token_id=-1)
    kept = kept_manager(hf)

    def run():
        attention = hf.config._attn_implementation
        try:
            results = hf.generate_batch(prompts, generation_config=config, record_timestamps=True, **kept)
        finally:
            hf.set_attn_implementation(attention)  # generate_batch() takes another
        outputs = list(results.values())
        if len(outputs) != load.slots:
            raise RuntimeError(f"expected {load.slots} answers, got {len(outputs)}")
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if len(output.generated_tokens) != load.new_tokens:
                raise RuntimeError(f"expected {load.new_tokens} new tokens, got {len(output.generated_tokens)}")
        begin_s = min(output.created_time for output in outputs)
        made = stream()
        made.ids = [list(ids) for ids in zip(*(output.generated_tokens for output in outputs))]
        made.times_ms = [(max(times) - begin_s) * 1e3 for times in zip(*(output.timestamps for output in outputs))]
        return made

    def end():
        if kept:
            hf.destroy_cached_continuous_batching_manager()

    run.end = end
    return run
