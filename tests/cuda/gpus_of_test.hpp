#pragma once

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"

namespace cf::test {

/// The GPUs that CTest has given to a test by its RESOURCE_GROUPS, as a value of CUDA_VISIBLE_DEVICES; "" where it gave
/// none, as without --resource-spec-file. CTest's ids count the GPUs that CUDA_VISIBLE_DEVICES lists already, or all.
///
/// @param variable  a variable's value by its name, or nullptr, as std::getenv.
/// @return or the variable that is not as CTest's documentation says, "id:0,slots:1;id:3,slots:8".
template <class Variable>
Result<std::string> gpus_of_test(Variable variable) {
  const auto value = [&](const std::string& name) {
    const char* found = variable(name.c_str());
    return std::string_view(found ? found : "");
  };
  const auto split = [](std::string_view text, char by) {
    std::vector<std::string_view> parts;
    for (std::size_t end = 0; !text.empty(); text.remove_prefix(std::min(end + 1, text.size()))) {
      end = std::min(text.find(by), text.size());
      parts.push_back(text.substr(0, end));
    }
    return parts;
  };
  const auto number = [](std::string_view text, std::size_t& n) {
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), n);
    return fault == std::errc{} && end == text.data() + text.size();
  };
  const auto refused = [](const std::string& name, std::string_view expected, std::string_view got) {
    return Status::error(Code::invalid_argument,
                         name + ": expected " + std::string(expected) + ", got '" + std::string(got) + "'");
  };

  const std::string_view count_text = value("CTEST_RESOURCE_GROUP_COUNT");
  std::size_t count = 0;
  if (count_text.empty()) return std::string();
  if (!number(count_text, count)) return refused("CTEST_RESOURCE_GROUP_COUNT", "a number", count_text);
  const std::vector<std::string_view> listed = split(value("CUDA_VISIBLE_DEVICES"), ',');
  std::vector<std::size_t> ids;
  for (std::size_t group = 0; group < count; ++group) {
    const std::string name = "CTEST_RESOURCE_GROUP_" + std::to_string(group) + "_GPUS";
    for (const std::string_view given : split(value(name), ';')) {
      const std::string_view id = given.substr(0, given.find(','));
      std::size_t n = 0;
      if (!id.starts_with("id:") || !number(id.substr(3), n)) return refused(name, "id:N,slots:M", given);
      if (!listed.empty() && n >= listed.size())
        return refused(name, "one of the " + std::to_string(listed.size()) + " GPUs of CUDA_VISIBLE_DEVICES", given);
      ids.push_back(n);
    }
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  std::string gpus;
  for (const std::size_t n : ids) {
    if (!gpus.empty()) gpus += ',';
    gpus += listed.empty() ? std::to_string(n) : std::string(listed[n]);
  }
  return gpus;
}

}  // namespace cf::test
