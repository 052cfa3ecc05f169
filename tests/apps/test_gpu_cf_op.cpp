// cf-op on a GPU: every op of the list is timed, and what the JSON says hangs together.
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/ops/all.hpp"
#include "tests/apps/run_program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/op_test_case.hpp"

using namespace cf;
using namespace cf::test;
using Json = nlohmann::json;

namespace {

Json cf_op(const std::string& arguments, const std::string& preset = "pythia-14m") {
  const ProgramRun r =
      run_program("'" CF_OP_PROGRAM "' --preset " + preset + " --runs 3 --warmup 1 --json - " + arguments);
  CAPTURE(arguments, r.out, r.err);
  REQUIRE(r.exit_code == 0);
  REQUIRE(r.err.empty());
  return Json::parse(r.out);
}

void check_result(const Json& run, const Json& r) {
  CAPTURE(r.dump());
  const double median = r["median_us"], bytes = r["bytes"], floor = r["floor_us"];
  CHECK(median > 0);
  CHECK(r["p10_us"] <= r["median_us"]);
  CHECK(r["median_us"] <= r["p99_us"]);
  CHECK(std::abs(double(r["gb_per_s"]) * median * 1e3 / bytes - 1) < 1e-6);
  const std::string limit = r["limit"];
  const double rate = run[limit + "_best_gb_per_s"];
  CHECK(std::abs(floor * rate * 1e3 / bytes - 1) < 1e-6);
  CHECK(std::abs(double(r["percent_of_limit"]) / (100 * floor / median) - 1) < 1e-9);
  // A note says the cause of each share above 100 %, and no other share has one.
  const std::string note = r["limit_note"];
  CHECK((r["percent_of_limit"] > 100) == !note.empty());
  CHECK(note.find("doubt") == note.npos);
}

}  // namespace

OP_TEST_CASE("cf-op times every op", "[gpu]", DeviceOps) {
  const std::string op(TestType::name);
  const Json run = cf_op(op + " --layers 2 --batch 1,3 --kv-len 5");
  CHECK(run["program"] == "cf-op");
  CHECK(run["op"] == op);
  CHECK(run["model"] == "pythia-14m");
  CHECK(run["runs"] == 3);
  CHECK(run["complete"] == true);
  for (const char* name : {"gpu", "cuda_driver", "cuda_runtime", "version", "commit", "command"})
    CHECK_FALSE(run[name].get<std::string>().empty());
  for (const char* name : {"read_best_gb_per_s", "read_median_gb_per_s", "copy_best_gb_per_s", "copy_median_gb_per_s"})
    CHECK(run[name] > 0);
  REQUIRE(run["results"].size() == (op == "linear" ? 10 : 2));
  for (const Json& r : run["results"]) {
    check_result(run, r);
    CHECK(r["layers"] == 2);
    CHECK(r["kv_len"] == 5);
  }
  CHECK(run["results"].front()["batch"] == 1);
  CHECK(run["results"].back()["batch"] == 3);
}

TEST_CASE("cf-op: the linears' sum, the limits, and tensors enough to be cold", "[gpu]") {
  const Json linear = cf_op("linear --overlap");
  const Json& r = linear["results"];
  CHECK(linear["overlap"] == true);
  REQUIRE(r.size() == 5);
  CHECK(r[0]["site"] == "attention.query_key_value");
  CHECK(r[4]["site"] == "layer");
  std::int64_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes += r[std::size_t(i)]["bytes"].get<std::int64_t>();
  CHECK(r[4]["bytes"] == bytes);
  CHECK(r[4]["limit"] == "read");
  CHECK(r[4]["cold"] == true);
  const Json norm = cf_op("layernorm_residual --tokens 4096 --dtype float32");
  CHECK(norm["results"][0]["limit"] == "copy");
  CHECK(norm["results"][0]["cold"] == true);
  // No kernel moves cold data faster than a copy by SMs does. But the L2 may keep a quarter of this op's data, which is
  // not cold then.
  check_result(norm, norm["results"][0]);
  CHECK(norm["results"][0]["percent_of_limit"] < 134);
}

TEST_CASE("cf-op times ops with GPTQ weights", "[gpu][gptq]") {
  for (const char* op : {"linear", "ln_qkv", "ln_qkv_heads"}) {
    const Json run = cf_op(std::string(op) + " --layers 2 --batch 1 --quant gptq --group 32"),
               dense = cf_op(std::string(op) + " --layers 2");
    CHECK(run["weights"] == "procedural, GPTQ of 4 bits, group 32");
    CHECK(dense["weights"] == "procedural");
    REQUIRE(run["results"].size() == dense["results"].size());
    for (const Json& r : run["results"]) check_result(run, r);
    CHECK(run["results"].back()["bytes"] < dense["results"].back()["bytes"]);
  }
}

OP_TEST_CASE("cf-op times every fused op where it has a kernel, and else says why it has none", "[gpu][gptq]",
             ops::Fused) {
  const std::string op(TestType::name), preset = op == "linear_sum" ? "pythia-410m" : "llama-3.2-1b";
  const Json run = cf_op(op + " --layers 2 --quant gptq", preset);
  REQUIRE(run["results"].size() == 1);
  check_result(run, run["results"][0]);
  CHECK(run["results"][0]["site"] == op);
  const ProgramRun dense = run_program("'" CF_OP_PROGRAM "' --preset " + preset + " --layers 2 " + op);
  CHECK(dense.exit_code == 2);
  CHECK(dense.error_lines() == 1);
  CHECK(dense.err.find("packed GPTQ weights, got another weight") != dense.err.npos);
}

TEST_CASE("cf-op: what fits the L2 says so", "[gpu]") {
  const Json run = cf_op("rope --layers 1 --tokens 512 --dtype f16");
  check_result(run, run["results"][0]);
  if (run["results"][0]["percent_of_limit"] > 100) CHECK(run["results"][0]["limit_note"] == "fits the L2");
}

TEST_CASE("cf-op: an error in the middle of a sweep keeps what was measured before it", "[gpu][bad]") {
  const TempDir dir;
  const std::string path = dir / "r.json";
  // The second workload's tensors do not fit any GPU's memory.
  const ProgramRun r = run_program("'" CF_OP_PROGRAM
                                   "' attention --preset pythia-12b --runs 1 --layers 2 --batch 1,1048576 "
                                   "--kv-len 2048 --json '" +
                                   path + "'");
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 2);
  CHECK(r.error_lines() == 1);
  CHECK(r.out.find("| attention ") != r.out.npos);
  std::ifstream file(path);
  const Json j = Json::parse(file);
  CHECK(j["complete"] == false);
  REQUIRE(j["results"].size() == 1);
  CHECK(j["results"][0]["batch"] == 1);
}
