#include "core/model/taps.hpp"

#include <algorithm>
#include <cmath>

namespace cf {

Status append_taps(ModelRunner& runner, const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors,
                   std::map<std::string, TapRows>& taps) {
  const auto is_output = [](const ModelRunner::SiteTensor& t) { return t.role == Role::output; };
  const auto outputs = std::size_t(std::ranges::count_if(tensors, is_output));
  for (const ModelRunner::SiteTensor& t : tensors) {
    if (!is_output(t)) continue;
    const auto found = taps.find(output_tap(site.tap(), t.name, outputs));
    if (found == taps.end()) continue;
    auto& [name, tap] = *found;
    Shape room = tap.rows.shape();
    if (!room.empty()) room[0] -= tap.made_rows;
    const bool fits = t.dtype == tap.rows.dtype() && t.shape.size() == room.size() && !room.empty() &&
                      t.shape[0] <= room[0] && std::equal(t.shape.begin() + 1, t.shape.end(), room.begin() + 1);
    if (!fits)
      return Status::error(Code::invalid_argument, "tap '" + name + "': expected at most " + to_string(room) + " of " +
                                                       std::string(to_string(tap.rows.dtype())) + ", got " +
                                                       to_string(t.shape) + " of " + std::string(to_string(t.dtype)));
    const std::int64_t row_bytes = tap.rows.shape()[0] == 0 ? 0 : tap.rows.size_bytes() / tap.rows.shape()[0];
    CF_TRY(runner.fetch(t, static_cast<char*>(tap.rows.data()) + tap.made_rows * row_bytes));
    tap.made_rows += t.shape[0];
  }
  return {};
}

bool has_nan(const ModelRunner::SiteTensor& tensor) {
  for (std::int64_t i = 0, size = tensor.size(); i < size; ++i)
    if (std::isnan(load_element(tensor.data, tensor.dtype, i))) return true;
  return false;
}

}  // namespace cf
