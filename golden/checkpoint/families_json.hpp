#pragma once
#include <string>

namespace cf::checkpoint {

/// What core/families says, as JSON: a list of families. python/cf_ops/_families.json is this text, for
/// the Python package and the tools of golden/; the target families_json writes it.
std::string families_json();

}  // namespace cf::checkpoint
