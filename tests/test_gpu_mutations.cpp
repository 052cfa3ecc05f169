// The mutation gate on the GPU: every site of the walk, faulty or not, runs there in float32.
#include "device_check.hpp"
#include "mutations.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// Runs a call whose tensors lie on the host: copies them to the device, and back what the op wrote.
template <class Args>
Status run_from_host(Args args, cuda::Context& context) {
  std::vector<DeviceBytes> device;
  std::vector<std::pair<std::size_t, void*>> written;
  Args::Op::tensors(Args::Op::dims(args), args, [&](Role role, std::string_view, auto& view, auto, bool = false) {
    if (!view) return;
    const std::size_t bytes = std::size_t(view.size()) * size_bytes(view.dtype);
    device.emplace_back(std::span(reinterpret_cast<const std::byte*>(view.data), bytes));
    if constexpr (!std::is_const_v<std::remove_pointer_t<decltype(view.data)>>)
      if (role == Role::output || role == Role::state) written.emplace_back(device.size() - 1, view.data);
    view.data = reinterpret_cast<decltype(view.data)>(device.back().data());
  });
  CF_TRY(cuda::run(args, context));
  for (const auto& [block, host] : written) device[block].fetch(host);
  return {};
}

}  // namespace

TEST_CASE("Every fault on the GPU is caught at one tap at least, in every golden file", "[gpu][mutation]") {
  cuda::Context c = context();
  check_gate([&](const auto& args) { return run_from_host(args, c); });
}
