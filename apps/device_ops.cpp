#include "apps/device_ops.hpp"

#include <optional>
#include <utility>
#include <vector>

#include "cuda/cuda.hpp"
#include "cuda/decode_stack.hpp"
#include "cuda/memory.hpp"

namespace cf::apps {
namespace {

/// A tensor's copy on the device; `host` is where it goes back to, null where nothing is written.
struct Mirror {
  cuda::DeviceMemory memory;
  void* host;
};

/// `launch` puts the op onto the context's stream, given the arguments that lie on the device.
template <class Args, class Launch>
Status run_on_device(const Args& host, const cuda::Context& context, Launch&& launch) {
  using Op = typename Args::Op;
  CF_TRY(Op::check(host));
  Args device = host;
  OwnedGptqTiles tiles;
  CF_TRY(repack(device, tiles));
  std::vector<Mirror> mirrors;
  const auto mirror = [&]<class V>(Role role, std::string_view name, V& view) -> Status {
    const std::size_t bytes = std::size_t(view.size()) * size_bytes(view.dtype);
    Result<cuda::DeviceMemory> memory = cuda::DeviceMemory::create(context, bytes, name);
    if (!memory) return memory.status();
    CF_TRY(cuda::copy_to_device(context, memory->data(), view.data, bytes));
    void* written = nullptr;
    if constexpr (!std::is_const_v<typename V::element>)
      if (role == Role::output || role == Role::state) written = view.data;
    view.data = reinterpret_cast<typename V::element*>(memory->data());
    mirrors.push_back({std::move(*memory), written});
    return {};
  };
  Status status;
  Op::tensors(Op::dims(device), device, [&](Role role, std::string_view name, auto& view, const auto&, bool = false) {
    if (status && view.data) status = mirror(role, name, view);
  });
  CF_TRY(status);
  CF_TRY(launch(device));
  for (const Mirror& m : mirrors)
    if (m.host) CF_TRY(cuda::copy_to_host(context, m.host, m.memory.data(), m.memory.bytes()));
  return {};
}

}  // namespace

struct DeviceOps::State {
  cuda::Context context;
};

DeviceOps::DeviceOps(std::unique_ptr<State> state) : state_(std::move(state)) {}
DeviceOps::DeviceOps(DeviceOps&&) noexcept = default;
DeviceOps& DeviceOps::operator=(DeviceOps&&) noexcept = default;
DeviceOps::~DeviceOps() = default;

Result<DeviceOps> DeviceOps::create(int device) {
  const Result<cuda::Context> context = cuda::Context::create(device);
  if (!context) return context.status();
  return DeviceOps(std::make_unique<State>(State{*context}));
}

#define CF_OP(Op)                                                                                        \
  Status DeviceOps::run(const ops::Op::Args& args) {                                                     \
    cuda::Context& context = state_->context;                                                            \
    return run_on_device(args, context, [&](const auto& device) { return cuda::run(device, context); }); \
  }
#include "core/ops/ops.def"
#undef CF_OP

Status DeviceOps::run_fused(const ops::DecodeLayer::Args& args) {
  const cuda::Context& context = state_->context;
  std::optional<cuda::DecodeStack> kernel;  // until its work is done
  return run_on_device(args, context, [&](const ops::DecodeLayer::Args& device) -> Status {
    const LayerTensors& t = device.t;
    Result<cuda::DecodeStack> created =
        cuda::DecodeStack::create(context, *device.config, 1, {device.weights, t, /*stride_bytes=*/0});
    if (!created) return created.status();
    kernel = std::move(*created);
    CF_TRY(kernel->set_probe({.taps = true}));
    return kernel->enqueue(context.stream(), 0, 1, t.hidden, t.output);
  });
}

}  // namespace cf::apps
