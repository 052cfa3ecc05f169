"""The measurements of --what int4: a layer's four products with int4 weights, of one token and of many."""

import itertools

import console
import model_config
from peers import int4_products
from peers.layer_bench import Bench
from peers.timing import spread


class Int4Bench(Bench):
    """Each product of each system: its time, and how far its outputs are from float64."""

    WHAT = "products with int4 weights on one GPU, weights cold: this library beside others in one run"
    KINDS = ("int4",)
    SIZES = ("tokens", "product")

    def findings(self):
        return {"results": {"int4": int4_products.with_ratios(self.results["int4"])}}

    def print(self):
        print("\n".join(int4_products.table(int4_products.with_ratios(self.results["int4"]))))

    def run(self, preset):
        args = self.args
        products = int4_products.products_of(model_config.PRESETS[preset])
        tokens = ",".join(map(str, args.tokens))
        command = [args.cf_op, "linear", "--preset", preset, "--batch", tokens, "--quant", "gptq"]
        command += ["--group", str(int4_products.GROUP), "--runs", str(args.runs), "--warmup", str(args.warmup)]
        rows = lambda report, preset: int4_products.program_rows(report, preset, products)
        self.program("int4", preset, command, rows)
        for product, peer in itertools.product(products, args.peers):
            made = None
            for count in args.tokens:

                def measured():
                    nonlocal made
                    made = made or int4_products.PEERS[peer](product)
                    x = made.activations(count)
                    found = {} if made.is_ours else spread(self.timer.graph(lambda: made.run(x)), made.sets)
                    return found | made.errors(x)

                # Of cf_ops the outputs alone are looked at: cf-op has the time of the same kernels.
                self.measure("int4", (preset, count, product.name), peer, measured)
            made = None
            self.free()
