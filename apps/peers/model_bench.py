"""The measurements of --what model."""

import itertools

import console
import model_config
from peers import model_peers
from peers.layer_bench import Bench
from peers.programs import run_program
from peers.timing import captured, one_line, time_limit

# A small preset of each family, whose weights are made in seconds.
AGREEMENT_PRESETS = ("pythia-160m", "llama-3.2-1b")


def program_model(preset):
    """The options of cf-model for a preset in its own dtype, in which the peers run too."""
    return ["--backend", "cuda", "--preset", preset, "--dtype", model_config.PRESET_DTYPES[preset]]


class ModelBench(Bench):
    """The same of whole models."""

    WHAT = "tokens of whole models on one GPU: this library beside others in one run"
    KINDS = ("model",)
    SIZES = model_peers.SIZES

    def __init__(self, args, about):
        super().__init__(args, about)
        self.agreements = {}  # (agreement preset, impl as asked for, prompt_len) -> fields

    def findings(self):
        return {"results": {"model": model_peers.with_ratios(self.results["model"])}}

    def print(self):
        print("\n".join(model_peers.table(model_peers.with_ratios(self.results["model"]))))

    def loads(self):
        args = self.args
        return [model_peers.Load(*sizes) for sizes in itertools.product(args.slots, args.prompt_len, args.new_tokens)]

    def agreement_preset(self, preset):
        """The preset whose ids stand in a preset's rows, or None."""
        asked, presets = self.args.agreement_preset, model_config.PRESETS
        if asked != "auto":
            return asked
        return next(name for name in AGREEMENT_PRESETS if presets[name].names == presets[preset].names)

    def run(self, preset):
        chosen = self.agreement_preset(preset)
        if chosen and 1 in self.args.slots and not any(chosen == known for known, *_ in self.agreements):
            self.run_agreement(chosen)
        self.run_programs(preset)
        self.run_peers(preset)

    def run_agreement(self, preset):
        """Fills in how far cf-model's ids are hf_generate's, with the same weights and one prompt of each length."""
        args, new_tokens = self.args, max(self.args.new_tokens)
        loads = [model_peers.Load(1, prompt_len, new_tokens) for prompt_len in args.prompt_len]
        vocab_size = model_config.PRESETS[preset].vocab_size
        console.progress(f"agreement: hf_generate, {preset}")
        hf = None
        try:
            with time_limit(self.seconds()):
                hf = model_peers.procedural_model(preset)
                theirs = [model_peers.timed("hf_generate", hf, load, captured, 1, 0)[1] for load in loads]
        except Exception as error:  # the times are measured all the same
            theirs = one_line(error)
        prompts = ";".join(",".join(map(str, load.prompts(vocab_size)[0])) for load in loads)
        model = [*program_model(preset), "--weights-seed", str(model_peers.WEIGHTS_SEED)]
        generate = ["--prompt-ids", prompts, "--max-new-tokens", str(new_tokens), "--slots", "1", "--stop", "none"]
        for impl in args.impl.split(","):
            console.progress(f"agreement: cf-model {impl}, {preset}")
            found = {"preset": preset, "weights": "procedural", "with": "hf_generate"}
            try:
                if isinstance(theirs, str):
                    raise RuntimeError(f"hf_generate: {theirs}")
                command = [args.cf_model, "generate", *model, "--impl", impl, *generate]
                report = run_program(command, self.seconds())
                ours = [sequence["ids"] for sequence in report["sequences"]]
                for load, mine, ids in zip(loads, ours, theirs, strict=True):
                    same = model_peers.margin(hf, load.prompts(vocab_size)[0], mine, ids)
                    self.agreements[preset, impl, load.prompt_len] = found | {"impl": report["impl"]} | same
            except Exception as error:
                for load in loads:
                    self.agreements[preset, impl, load.prompt_len] = found | {"error": one_line(error)}
        hf = None
        self.free()
        console.progress("")

    def run_programs(self, preset):
        args = self.args
        sizes = {option: ",".join(map(str, getattr(args, option))) for option in ("prompt_len", "new_tokens")}
        # One program each: one that refuses its slots is recorded, and the others go on.
        for impl, slots in itertools.product(args.impl.split(","), args.slots):

            def rows(report, preset):
                found = model_peers.program_rows(report, preset)
                for row in found:
                    key = self.agreement_preset(preset), impl, row["prompt_len"]
                    if row["slots"] == 1 and key in self.agreements:
                        row["agreement"] = self.agreements[key]
                return found

            command = [args.cf_model, "bench", *program_model(preset), "--impl", impl]
            command += ["--prompt-len", sizes["prompt_len"], "--new-tokens", sizes["new_tokens"]]
            command += ["--slots", str(slots), "--runs", str(args.runs), "--warmup", str(args.warmup)]
            self.program("model", preset, command, rows, {"slots": slots, "system": f"cf-model {impl}"})

    def run_peers(self, preset):
        args, hf, reference = self.args, None, {}
        vocab_size = model_config.PRESETS[preset].vocab_size
        for peer, load in itertools.product([p for p in model_peers.PEERS if p in args.peers], self.loads()):

            def measured():
                nonlocal hf
                hf = hf or model_peers.random_model(preset)
                row, ids = model_peers.timed(peer, hf, load, captured, args.runs, args.warmup)
                if peer == "hf_generate":
                    reference[load] = ids
                elif load in reference:
                    same = model_peers.margin(hf, load.prompts(vocab_size)[0], ids, reference[load])
                    row["agreement"] = {"preset": preset, "weights": "random", "with": "hf_generate"} | same
                return row

            shape = (preset, *(getattr(load, size) for size in self.SIZES))
            self.measure("model", shape, peer, measured)
