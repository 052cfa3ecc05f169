// What cf-op refuses, and how it ends where there is no GPU.
#include "catch.hpp"
#include "run_program.hpp"

using namespace cf::test;

namespace {

/// Without a GPU, whatever the machine has.
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
  check_refusal(tiny, "op is required");
  check_refusal("linear", "--preset is required");
  check_refusal("gemm " + tiny, "op 'gemm' is unknown, expected one of embedding, layernorm, ");
  check_refusal("linear --preset pythia-3b", "preset 'pythia-3b' is unknown; there are pythia-14m, ");
  check_refusal("linear " + tiny + "--dtype float64", "--dtype float64: expected float16, bfloat16 or float32");
  check_refusal("linear " + tiny + "--batch 0", "--batch 0: expected 1 to 1048576");
  check_refusal("linear " + tiny + "--tokens 1,x", "--batch '1,x': expected numbers and ranges such as 0-3,7, got 'x'");
  check_refusal("attention " + tiny + "--kv-len 2049", "--kv-len 2049: pythia-14m has sequence lengths 1 to 2048");
  check_refusal("linear " + tiny + "--layers 1025", "--layers 1025: expected 0 to 1024");
  check_refusal("linear " + tiny + "--layers -1", "--layers -1: expected 0 to 1024");
  check_refusal("linear " + tiny + "--runs 0", "--runs 0: expected 1 to 1000000");
  check_refusal("linear " + tiny + "--warmup -1", "--warmup -1: expected 0 to 1000000");
  check_refusal("linear " + tiny + "--quant awq", "--quant");
  check_refusal("linear " + tiny + "--group 32", "--group: expected with --quant");
  check_refusal("linear " + tiny + "--quant gptq --group 0", "--group 0: expected -1 or 1 to 4194304");
  check_refusal("rope " + tiny + "--quant gptq",
                "--quant gptq: expected with one of linear, ln_qkv, ln_qkv_heads, got rope");
  check_refusal("linear " + tiny + "--json /nowhere/x.json", "/nowhere");
  check_refusal("linear " + tiny + "--colour", "--colour");
}

TEST_CASE("cf-op without a GPU: one line, exit code 2") {
  check_refusal("linear " + tiny, "no CUDA device");
  check_refusal("attention " + tiny + "--kv-len 1-3 --json -", "no CUDA device");
}

TEST_CASE("cf-op --help and --version") {
  const ProgramRun help = cf_op("--help"), version = cf_op("--version");
  CHECK(help.exit_code == 0);
  CHECK(help.out.find("layernorm_residual") != help.out.npos);
  CHECK(version.exit_code == 0);
  CHECK(version.out.starts_with("cf-op "));
}
