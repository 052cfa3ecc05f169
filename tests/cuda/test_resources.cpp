// What the built kernels take of an SM: nothing in local memory, on no architecture. And the scripts that say so. Also
// that no kernel's products on Hopper's tensor cores wait for each other, which ptxas tells and nothing else shows.
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/apps/run_program.hpp"
#include "tests/support/catch.hpp"

using namespace cf::test;
using Json = nlohmann::json;

namespace {

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

std::string text_of(const std::string& path) { return run_program("cat '" + path + "'").out; }

ProgramRun script(const std::string& name, const std::string& arguments) {
  return run_program("'" CF_SCRIPTS_DIR "/" + name + "' " + arguments);
}

// What ptxas says of a kernel that calls a function with a stack of its own, and of one that is clean.
const char* const ptxas_log =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function '_ZN2cf4cuda12_GLOBAL__N_16kernelIfEEvi' for 'sm_90a'\n"
    "ptxas info    : Function properties for _ZN2cf4cuda12_GLOBAL__N_16kernelIfEEvi\n"
    "    48 bytes stack frame, 108 bytes spill stores, 68 bytes spill loads\n"
    "ptxas info    : Function properties for _Z6calleei\n"
    "    16 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads\n"
    "ptxas info    : Used 80 registers, used 1 barriers, 64 bytes cumulative stack size, 8192 bytes smem, 4 bytes "
    "cmem[2]\n"
    "ptxas info    : Compile time = 1.0 ms\n"
    "ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
    "instructions defining input registers of a wgmma in the function '_ZN2cf4cuda12_GLOBAL__N_16kernelIfEEvi'\n"
    "ptxas info    : Compiling entry function '_Z5cleanv' for 'sm_120a'\n"
    "ptxas info    : Function properties for _Z5cleanv\n"
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 8 registers, used 0 barriers\n";

}  // namespace

TEST_CASE("no kernel keeps anything in local memory, and none is serialized") {
  constexpr int most_static_smem_bytes = 48 << 10;
  const Json report = Json::parse(text_of(CF_RESOURCES));
  std::map<std::string, std::set<std::string>> archs_of;
  for (const Json& k : report["kernels"]) {
    archs_of[k["file"]].insert(k["arch"].get<std::string>());
    INFO(k["kernel"].get<std::string>() << " for " << k["arch"].get<std::string>());
    // CUDA's sincos() of a double has an array of 40 bytes in local memory for large angles. One small launch of a
    // stream's step calls it.
    const bool calls_sincos = k["kernel"].get<std::string>().find("stream_rows_kernel") != std::string::npos;
    CHECK(k["stack_bytes"] == (calls_sincos ? 40 : 0));
    CHECK(k["spill_store_bytes"] == 0);
    CHECK(k["spill_load_bytes"] == 0);
    CHECK(k["serialized_wgmma"] == 0);
    CHECK(k["static_smem_bytes"] <= most_static_smem_bytes);
    CHECK(k["registers"] > 0);
  }
  // Every file has kernels, for the same architectures.
  std::istringstream files(CF_CUDA_FILES);
  for (std::string path; std::getline(files, path, ' ');) {
    const std::string file = path.substr(path.rfind('/') + 1);
    INFO(path);
    CHECK(archs_of[file] == archs_of.begin()->second);
    CHECK_FALSE(archs_of[file].empty());
  }
}

TEST_CASE("cuda_resources reads what ptxas says") {
  const TempDir dir;
  write(dir / "a.cu.o.ptxas", ptxas_log);
  const std::string json = dir / "r.json", text = dir / "r.txt";
  const ProgramRun r = script("cuda_resources", json + " " + text + " " + (dir / "a.cu.o"));
  CAPTURE(r.out, r.err);
  REQUIRE(r.exit_code == 0);
  CHECK(r.err.empty());
  const Json expected = Json::parse(R"-([
    {"file": "a.cu", "kernel": "cf::cuda::kernel<float>(int)", "arch": "sm_90a", "registers": 80,
     "static_smem_bytes": 8192, "stack_bytes": 64, "spill_store_bytes": 112, "spill_load_bytes": 70,
     "serialized_wgmma": 1},
    {"file": "a.cu", "kernel": "clean()", "arch": "sm_120a", "registers": 8,
     "static_smem_bytes": 0, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0,
     "serialized_wgmma": 0}])-");
  CHECK(Json::parse(text_of(json))["kernels"] == expected);
  CHECK(text_of(text) ==
        "registers  static smem  stack spill stores spill loads  arch     kernel\n"
        "       80         8192     64          112          70  sm_90a   a.cu: cf::cuda::kernel<float>(int)\n"
        "        8            0      0            0           0  sm_120a  a.cu: clean()\n");
}

TEST_CASE("cuda_resources refuses an object whose kernels it does not know") {
  const TempDir dir;
  const std::string object = dir / "a.cu.o", arguments = (dir / "r.json") + " " + (dir / "r.txt") + " " + object;
  const auto refused = [&](const std::string& why) {
    const ProgramRun r = script("cuda_resources", arguments);
    CHECK(r.exit_code == 2);
    CHECK(r.err == "cuda_resources: " + object + ".ptxas: " + why + "\n");
    CHECK_FALSE(std::filesystem::exists(dir / "r.json"));
  };
  refused("no such file, expected what ptxas -v said of the object");
  write(object + ".ptxas", "ptxas info    : 0 bytes gmem\n");
  refused("no kernel in it, expected what ptxas -v said of one or more");
}

TEST_CASE("ptxas_log keeps what ptxas says, passes on the rest, and ends as the compiler does") {
  const TempDir dir;
  const std::string object = dir / "a.o", compiler = dir / "compiler";
  write(dir / "said", std::string(ptxas_log) + "a.cu(1): warning: odd\n");
  write(compiler, "cat '" + (dir / "said") + "' >&2\nexit $1\n");
  const auto compile = [&](int exit_code) {
    return script("ptxas_log", "sh '" + compiler + "' " + std::to_string(exit_code) + " -o '" + object + "'");
  };
  ProgramRun r = compile(3);
  CHECK(r.exit_code == 3);
  CHECK(r.err == "a.cu(1): warning: odd\n");
  CHECK_FALSE(std::filesystem::exists(object + ".ptxas"));
  r = compile(0);
  CHECK(r.exit_code == 0);
  CHECK(r.err == "a.cu(1): warning: odd\n");
  CHECK(text_of(object + ".ptxas").starts_with(ptxas_log));
  r = script("ptxas_log", "sh '" + compiler + "' 0");
  CHECK(r.exit_code == 2);
  CHECK(r.err == "ptxas_log: expected -o OBJECT among the compiler's arguments\n");
}
