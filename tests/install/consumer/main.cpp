// Uses each installed component once: the readers read a config, the CPU backend computes a LayerNorm, and the CUDA
// backend, where it was built, looks for a device.
#include <cf/core/model/config.hpp>
#include <cf/cpu_ref/cpu_ref.hpp>
#include <cf/golden/checkpoint/hf_config.hpp>
#if __has_include(<cf/cuda/cuda.hpp>)
#include <cf/cuda/cuda.hpp>
#endif
#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  const auto model =
      cf::checkpoint::parse_hf_config(cf::checkpoint::to_hf_json(*cf::find_preset("pythia-2.8b")), "pythia-2.8b");
  if (!model || model->head_dim() != 80) return 1;

#if __has_include(<cf/cuda/cuda.hpp>)
  const auto context = cf::cuda::Context::create();
  std::printf("cuda: %s\n",
              context ? cf::cuda::to_string(context->arch()).c_str() : context.status().message().c_str());
#endif

  const std::vector<float> x{1, 2, 3, 4, 5, 6, 7, 8}, gamma(8, 1), beta(8, 0);
  std::vector<float> y(8);
  const cf::Status status =
      cf::cpu_ref::run(cf::ops::LayerNorm::Args{.x = cf::View<const float, 2>{x.data(), {1, 8}},
                                                .norm = {.gamma = cf::View<const float, 1>{gamma.data(), {8}},
                                                         .beta = cf::View<const float, 1>{beta.data(), {8}}},
                                                .y = cf::View<float, 2>{y.data(), {1, 8}}});
  if (!status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  // The mean is 4.5 and the variance 5.25.
  const double expected = (8 - 4.5) / std::sqrt(5.25 + 1e-5);
  std::printf("layernorm: got %.7f, expected %.7f\n", y[7], expected);
  return std::abs(y[7] - expected) < 1e-6 ? 0 : 1;
}
