#include "core/model/taps.hpp"

#include <algorithm>
#include <cmath>

namespace cf {

Status append_taps(const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors,
                   const std::function<TapMemory*(const std::string& name)>& find,
                   const std::function<Status(const ModelRunner::SiteTensor&, void* to)>& fetch) {
  const auto is_output = [](const ModelRunner::SiteTensor& t) { return t.role == Role::output; };
  const auto outputs = std::size_t(std::ranges::count_if(tensors, is_output));
  for (const ModelRunner::SiteTensor& t : tensors) {
    if (!is_output(t)) continue;
    const std::string name = output_tap(site.tap(), t.name, outputs);
    TapMemory* const tap = find(name);
    if (!tap) continue;
    Shape room = tap->shape;
    if (!room.empty()) room[0] -= tap->made_rows;
    const bool fits = t.dtype == tap->dtype && t.shape.size() == room.size() && !room.empty() &&
                      t.shape[0] <= room[0] && std::equal(t.shape.begin() + 1, t.shape.end(), room.begin() + 1);
    if (!fits)
      return Status::error(Code::invalid_argument, "tap '" + name + "': expected at most " + to_string(room) + " of " +
                                                       std::string(to_string(tap->dtype)) + ", got " +
                                                       to_string(t.shape) + " of " + std::string(to_string(t.dtype)));
    const std::int64_t row_bytes = t.shape[0] == 0 ? 0 : t.bytes() / t.shape[0];
    CF_TRY(fetch(t, tap->to + tap->made_rows * row_bytes));
    tap->made_rows += t.shape[0];
  }
  return {};
}

Status append_taps(ModelRunner& runner, const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors,
                   std::map<std::string, TapRows>& taps) {
  TapRows* found = nullptr;
  TapMemory memory{};
  const auto keep = [&] {
    if (found) found->made_rows = memory.made_rows;
  };
  const auto find = [&](const std::string& name) -> TapMemory* {
    keep();
    const auto at = taps.find(name);
    found = at == taps.end() ? nullptr : &at->second;
    if (!found) return nullptr;
    Tensor& rows = found->rows;
    memory = {static_cast<std::byte*>(rows.data()), rows.dtype(), rows.shape(), found->made_rows};
    return &memory;
  };
  const Status status =
      append_taps(site, tensors, find, [&](const ModelRunner::SiteTensor& t, void* to) { return runner.fetch(t, to); });
  keep();
  return status;
}

bool has_nan(const ModelRunner::SiteTensor& tensor) {
  for (std::int64_t i = 0, size = tensor.size(); i < size; ++i)
    if (std::isnan(load_element(tensor.data, tensor.dtype, i))) return true;
  return false;
}

}  // namespace cf
