#include "cuda/ops/sample/sample.hpp"

#include "cuda/ops/sample/choose.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

using namespace choice;

constexpr std::string_view kName = "sample";

template <class T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ SampleArgs a) {
  let_successor_start();
  wait_for_predecessors();
  __shared__ Shared shared;
  const long slot = blockIdx.x;
  const SlotSampling& settings = a.settings[slot];
  if (settings.chooses == 0) return;
  const std::int32_t chosen = choose(shared, row_of<T>(a, slot), settings, a.positions[slot]);
  // A barrier lies between every thread's last score and the choice.
  if (threadIdx.x == 0) tell(a, slot, chosen);
}

/// An array of the call, as checks see it.
template <class T, std::size_t Rank>
View<const std::int32_t, int(Rank)> words(const T* data, std::array<std::int64_t, Rank> shape) {
  return {reinterpret_cast<const std::int32_t*>(data), shape};
}

/// Lists the call's tensors. The settings and the bits are words of four bytes.
template <class F>
void tensors(const SampleArgs& a, F&& f) {
  const auto [slots, vocab] = a.logits.shape;
  const auto each = extents(slots);
  const auto seen = extents(slots, seen_words(vocab));
  f(TensorSpec{Role::input, "logits"}, a.logits, extents(slots, vocab));
  f(TensorSpec{Role::position, "settings"}, words(a.settings, each), each);
  f(TensorSpec{Role::position, "positions"}, words(a.positions, each), each);
  f(TensorSpec{Role::token_id, "seen"}, words(a.seen, seen), seen);
  f(TensorSpec{Role::token_id, "chosen"}, words(a.chosen, each), each);
}

}  // namespace

Status check(const SampleArgs& a, const LaunchList& launches) {
  TensorCheck check(kName);
  tensors(a, check);
  CF_TRY(check.status());
  if (const std::int64_t vocab = a.logits.shape[1]; vocab > sampling::kMostTokens)
    return bad_argument(
        kName, "vocab must be 1 to " + std::to_string(sampling::kMostTokens) + ", got " + std::to_string(vocab));
  // Only the settings need another alignment than that of their elements.
  DeviceCheck elements(kName, launches.device(), 1), structs(kName, launches.device(), alignof(SlotSampling));
  tensors(a, [&](const TensorSpec& t, const auto& view, const auto& shape) {
    (t.name == "settings" ? structs : elements)(t, view, shape);
  });
  CF_TRY(elements.status());
  return structs.status();
}

Status prepare(const SampleArgs& a, LaunchList& launches) {
  CF_TRY(check(a, launches));
  return with_activation(kName, a.logits.dtype, [&](auto zero) {
    return launch(kName, launches, {.grid = unsigned(a.logits.shape[0]), .block = kThreads},
                  sample_kernel<decltype(zero)>, a);
  });
}

}  // namespace cf::cuda
