#pragma once
// The ops on a GPU for callers whose tensors are the host's. Holds no CUDA types, as device_timer.hpp.
#include <memory>

#include "core/gptq_tiles.hpp"
#include "core/ops/all.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// Puts tiles in place of a call's quantised weight, in the order of rows that the op's kernel asks for; `tiles` owns
/// them. A call without such a weight stays as it is.
template <class Args>
Status repack(Args& args, OwnedGptqTiles& tiles) {
  if constexpr (requires { args.linear; }) {
    const auto* gptq = std::get_if<GptqWeight>(&args.linear.weight);
    if (!gptq) return {};
    RopePairs pairs;
    if constexpr (std::is_same_v<Args, ops::LnQkv::Args>) pairs = {args.q.shape[2], 2 * args.cos.shape[1]};
    Result<OwnedGptqTiles> packed = repack_gptq(*gptq, pairs);
    if (!packed) return packed.status();
    tiles = std::move(*packed);
    args.linear.weight = tiles.tiles;
  }
  return {};
}

/// Runs one op at a time to its end: every tensor is copied to the device, what the op writes is copied back.
class DeviceOps {
 public:
  /// Refuses as DeviceTimer::create() does.
  static Result<DeviceOps> create(int device = 0);
  DeviceOps(DeviceOps&&) noexcept;
  DeviceOps& operator=(DeviceOps&&) noexcept;
  ~DeviceOps();

#define CF_OP(Op) Status run(const ops::Op::Args&);
#include "core/ops/ops.def"
#undef CF_OP
  /// The layer by the persistent kernel, which writes every site's output. The config's dtype is the weights'. Refuses what
  /// that kernel does not take. Where a block has waited too long, the outputs stay as they were.
  Status run_fused(const ops::DecodeLayer::Args&);

 private:
  struct State;
  explicit DeviceOps(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::apps
