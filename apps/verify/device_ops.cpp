#include "apps/verify/device_ops.hpp"

#include <optional>
#include <utility>
#include <vector>

#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/runtime/memory.hpp"

namespace cf::apps {
namespace {

/// A tensor's copy on the device. `host` is where the op's result goes; null for a tensor that the op only reads.
struct Mirror {
  cuda::DeviceMemory memory;
  void* host;
};

/// Copies the tensors to the device, calls `launch` with arguments that point to the copies, and copies back what the
/// op writes. `launch` puts the op onto the context's stream.
template <class Args, class Launch>
Status run_on_device(const Args& host, const cuda::Context& context, Launch&& launch) {
  using Op = typename Args::Op;
  CF_TRY(Op::check(host));
  Args device = host;
  cuda::Packed packed;
  CF_TRY(cuda::pack_call(device, packed));
  std::vector<Mirror> mirrors;
  const auto mirror = [&]<class V>(const TensorSpec& t, V& view) -> Status {
    const std::size_t bytes = std::size_t(view.size()) * size_bytes(view.dtype);
    CF_TRY_ASSIGN(cuda::DeviceMemory memory, cuda::DeviceMemory::create(context, bytes, t.name));
    CF_TRY(cuda::copy_to_device(context, memory.data(), view.data, bytes));
    void* written = nullptr;
    if constexpr (!std::is_const_v<typename V::element>)
      if (is_written(t.role)) written = view.data;
    view.data = reinterpret_cast<typename V::element*>(memory.data());
    mirrors.push_back({std::move(memory), written});
    return {};
  };
  Status status;
  Op::tensors(Op::dims(device), device, [&](const TensorSpec& t, auto& view, const auto&) {
    if (status && view.data) status = mirror(t, view);
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
  CF_TRY_ASSIGN(const cuda::Context context, cuda::Context::create(device));
  return DeviceOps(std::make_unique<State>(State{context}));
}

#define CF_OP(Op)                                                                                        \
  Status DeviceOps::run(const ops::Op::Args& args) {                                                     \
    cuda::Context& context = state_->context;                                                            \
    return run_on_device(args, context, [&](const auto& device) { return cuda::run(device, context); }); \
  }
#include "core/ops/ops.def"
#undef CF_OP

Status DeviceOps::run_layer(const ops::DecodeLayer::Args& args) {
  const cuda::Context& context = state_->context;
  std::optional<cuda::PersistentKernel> kernel;  // lives until run_on_device() has copied the outputs back
  return run_on_device(args, context, [&](const ops::DecodeLayer::Args& device) -> Status {
    const LayerTensors& t = device.t;
    const cuda::PersistentLayer layer{device.weights, {t.k_cache, t.v_cache}};
    CF_TRY_ASSIGN(cuda::PersistentKernel created,
                  cuda::PersistentKernel::create(
                      context, cuda::persistent_model(device.model, device.weights.input_layernorm.gamma.dtype),
                      {&layer, 1}, {t.positions, t.kv_len}, {t.cos, t.sin}));
    kernel = std::move(created);
    CF_TRY(kernel->set_probe({.taps = t}));
    return kernel->enqueue(context.stream(), 0, 1, t.hidden, t.output);
  });
}

}  // namespace cf::apps
