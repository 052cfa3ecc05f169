// Checkpoints that golden/tools/make_checkpoints.py writes of a preset, through this library's reader: the tensors are
// those that its own generator makes.
#include "core/procedural.hpp"
#include "golden/checkpoint/checkpoint.hpp"
#include "tests/apps/run_program.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::test;

TEST_CASE("a preset's checkpoint holds the weights of procedural_model()") {
  struct Case {
    const char* options;
    std::int64_t layers;
    DType dtype;
    std::uint64_t seed;
    WeightFormat linears;
  };
  for (const Case& c : {Case{"--shard-size 5MB", 6, DType::f16, 0, {}},
                        Case{"--layers 2 --dtype bfloat16 --seed 7", 2, DType::bf16, 7, {}},
                        Case{"--layers 1 --dtype float32 --seed 18446744073709551615", 1, DType::f32, ~0ull, {}},
                        Case{"--layers 2 --gptq 4 --group-size 64 --shard-size 1MB", 2, DType::f16, 0, {4, 64}},
                        Case{"--layers 1 --gptq 8 --group-size -1 --dtype bfloat16", 1, DType::bf16, 0, {8, -1}}}) {
    const TempDir dir;
    const std::string out = dir / "made";
    const ProgramRun made =
        run_program(CF_PYTHON " -B " CF_MAKE_CHECKPOINTS " --preset pythia-14m --out " + out + " " + c.options);
    CAPTURE(c.options, made.out, made.err);
    REQUIRE(made.exit_code == 0);
    const auto checkpoint = checkpoint::Checkpoint::open(out);
    CAPTURE(checkpoint.status().message());
    REQUIRE(checkpoint);
    CHECK(checkpoint->config().num_hidden_layers == c.layers);
    CHECK(checkpoint->config().dtype == c.dtype);
    CHECK(checkpoint->check_names().message() == "");
    const auto model = checkpoint->model();
    CAPTURE(model.status().message());
    REQUIRE(model);
    CHECK(model->notes.empty());
    CHECK(model->dtype == c.dtype);
    CHECK(format_of(model->weights.layers.back().dense.weight).bits == c.linears.bits);
    ModelConfig preset = *find_preset("pythia-14m");
    preset.num_hidden_layers = c.layers;
    CHECK(ModelSpec(checkpoint->config()) == ModelSpec(preset));
    const OwnedModelWeights expected = procedural_model(preset, c.dtype, c.seed, c.linears);
    const std::uint64_t sum = weights_checksum(preset, expected.weights);
    CHECK(weights_checksum(preset, model->weights) == sum);
    CHECK(read_file(out + "/provenance.json").find(std::to_string(sum)) != std::string::npos);
  }
}

TEST_CASE("cf-layer times and checks a preset's checkpoint") {
  const TempDir dir;
  for (const char* options : {"", " --gptq 4 --group-size 128"}) {
    const std::string out = (dir / "made") + (*options ? "-gptq" : "");
    CAPTURE(options);
    REQUIRE(run_program(CF_PYTHON " -B " CF_MAKE_CHECKPOINTS " --preset pythia-14m --layers 2 --out " + out + options)
                .exit_code == 0);
    const ProgramRun run = run_program(CF_LAYER_PROGRAM " --model " + out + " --layer 1 --kv-len 5 --check");
    CAPTURE(run.err);
    CHECK(run.exit_code == 0);
    CHECK(run.out.find(": ok") != std::string::npos);
  }
}
