// The main of GPU tests: without a device it says why and exits with 77, which CTest shows as skipped. Listing works
// anywhere.
#include <cstdio>
#include <string_view>

#include "cuda/ops/run.hpp"
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
  if (!listing)
    if (const auto context = cf::cuda::Context::create(); !context) {
      std::printf("SKIPPED: %s\n", context.status().message().c_str());
      return 77;
    }
  const int code = Catch::Session().run(argc, argv);
  return code == 0 && cf::test::part_skipped ? 77 : code;
}
