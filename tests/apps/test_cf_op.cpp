// What cf-op refuses, and how it ends where there is no GPU.
#include "tests/apps/run_program.hpp"
#include "tests/support/catch.hpp"

using namespace cf::test;

namespace {

/// Runs cf-op without a GPU, on any machine.
ProgramRun cf_op(const std::string& arguments) {
  return run_program("CUDA_VISIBLE_DEVICES= '" CF_OP_PROGRAM "' " + arguments);
}

/// Bad input: exit code 2, nothing on stdout, one line on stderr with these words.
void check_refusal(const std::string& arguments, const std::string& words) {
  const ProgramRun r = cf_op(arguments);
  CAPTURE(arguments, r.out, r.err);
  CHECK(r.exit_code == 2);
  CHECK(r.out.empty());
  CHECK(r.error_lines() == 1);
  CHECK(r.err.starts_with("cf-op: "));
  CHECK(r.err.find(words) != r.err.npos);
}

const std::string tiny = "--preset pythia-14m ";

}  // namespace

TEST_CASE("cf-op names what is wrong before it looks for a GPU") {
  check_refusal(tiny, "op: required, not given");
  check_refusal("linear", "--preset: required, not given");
  check_refusal("gemm " + tiny, "op: expected embedding, layernorm, rmsnorm, layernorm_residual, ");
  check_refusal("linear --preset pythia-3b", "preset 'pythia-3b' is unknown; there are pythia-14m, ");
  check_refusal("linear " + tiny + "--dtype float64", "--dtype: expected float16, bfloat16 or float32, got 'float64'");
  check_refusal("linear " + tiny + "--batch 0", "--batch: expected 1 to 1048576, got '0'");
  check_refusal("linear " + tiny + "--tokens 1,x", "--batch: expected numbers and ranges such as 0-3,7, got '1,x'");
  check_refusal("attention " + tiny + "--kv-len 2049",
                "--kv-len: expected 1 to 2048 (positions of pythia-14m), got '2049'");
  check_refusal("attention " + tiny + "--seq-len 0", "--kv-len: expected 1 to 2048 (positions of pythia-14m), got '0'");
  check_refusal("linear " + tiny + "--layers 1025", "--layers: expected 0 to 1024, got '1025'");
  check_refusal("linear " + tiny + "--layers -1", "--layers: expected 0 to 1024, got '-1'");
  check_refusal("linear " + tiny + "--runs 0", "--runs: expected 1 to 1000000, got '0'");
  check_refusal("linear " + tiny + "--warmup -1", "--warmup: expected 0 to 1000000, got '-1'");
  check_refusal("linear " + tiny + "--quant awq", "--quant: expected gptq or fp8, got 'awq'");
  check_refusal("linear " + tiny + "--group 32", "--group: expected with --quant");
  check_refusal("linear " + tiny + "--quant gptq --group 0", "--group: expected -1 or 1 to 4194304, got '0'");
  for (const std::string quant : {"gptq", "fp8"})
    check_refusal("rope " + tiny + "--quant " + quant,
                  "--quant: expected with linear, ln_qkv, ln_qkv_heads, linear_sum, rms_linear or rms_qkv, got rope");
  check_refusal("linear " + tiny + "--json /nowhere/x.json", "/nowhere");
  check_refusal("linear " + tiny + "--colour", "--colour: unknown option");
}

TEST_CASE("cf-op without a GPU, or without the CUDA backend: one line, exit code 2") {
#ifdef CF_HAVE_CUDA
  const std::string why = "no CUDA device";
#else
  const std::string why = "this build has no CUDA support";
#endif
  check_refusal("linear " + tiny, why);
  check_refusal("attention " + tiny + "--kv-len 1-3 --dtype f16 --json -", why);
}

TEST_CASE("cf-op --help and --version") {
  const ProgramRun help = cf_op("--help"), version = cf_op("--version");
  CHECK(help.exit_code == 0);
  CHECK(help.out.find("layernorm_residual") != help.out.npos);
  CHECK(version.exit_code == 0);
  CHECK(version.out.starts_with("cf-op "));
}
