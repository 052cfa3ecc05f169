// The main of GPU tests: it sees the GPUs that CTest has given to it. Without a device it says why and exits with 77,
// which CTest shows as skipped. Listing works anywhere.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "cuda/ops/run.hpp"
#include "tests/cuda/gpus_of_test.hpp"
#include "tests/cuda/part_skipped.hpp"
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

int main(int argc, char** argv) {
  bool listing = false;
  for (int i = 1; i < argc; ++i) listing |= std::string_view(argv[i]).starts_with("--list");
  if (!listing) {
    // Before the first call of CUDA, which reads the variable once.
    const auto gpus = cf::test::gpus_of_test([](const char* name) { return std::getenv(name); });
    if (!gpus || (!gpus->empty() && setenv("CUDA_VISIBLE_DEVICES", gpus->c_str(), 1) != 0)) {
      std::printf("%s\n", gpus ? "CUDA_VISIBLE_DEVICES cannot be set" : gpus.status().message().c_str());
      return 1;
    }
    if (const auto context = cf::cuda::Context::create(); !context) {
      std::printf("SKIPPED: %s\n", context.status().message().c_str());
      return 77;
    }
  }
  const int code = Catch::Session().run(argc, argv);
  return code == 0 && cf::test::part_skipped ? 77 : code;
}
