#include "golden/checkpoint/revisions.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <set>
#include <unordered_map>
#include <utility>

#include "golden/checkpoint/json.hpp"

namespace cf::checkpoint {
namespace {

constexpr double kAside = 1.5;   // how much farther from both neighbours than these are from each other
constexpr double kMargin = 1.1;  // by how much another revision must be nearer than a neighbour
constexpr std::array<std::string_view, 5> kNotCompared = {"dtype", "torch_dtype", "transformers_version",
                                                          "_name_or_path", "name_or_path"};

using Read = std::vector<const Revision*>;
using Faults = std::vector<RevisionFault>;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The number that text begins with.
std::optional<std::int64_t> number_at(std::string_view text) {
  std::int64_t number = 0;
  if (text.empty() || !is_digit(text.front())) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

/// Whether a tensor's name has a layer's number: ".3.".
bool is_in_layer(std::string_view name) {
  for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
    std::size_t end = dot + 1;
    while (end < name.size() && is_digit(name[end])) ++end;
    if (end > dot + 1 && end < name.size() && name[end] == '.') return true;
  }
  return false;
}

/// Whether a tensor is one that no two revisions share by chance: neither a vector, which begins as ones or zeros, nor
/// a mask.
bool is_matrix(std::string_view described) {
  const std::string_view dtype = described.substr(0, described.find('['));
  return (dtype == "F16" || dtype == "BF16" || dtype == "F32" || dtype == "F64" || dtype == "I32") &&
         described.find(',') != described.npos;
}

void add_other_configs(const Read& read, Faults& faults) {
  std::optional<Json> first;
  const std::string* first_name = nullptr;
  for (const Revision* r : read) {
    Result<Json> own = parse_json_object(r->identity.config, r->name);
    if (!own) continue;
    if (!first) {
      first = std::move(*own);
      first_name = &r->name;
      continue;
    }
    std::set<std::string> keys;
    for (const Json* config : {&*first, &*own})
      for (const auto& [key, value] : config->items()) keys.insert(key);
    for (std::string_view key : kNotCompared) keys.erase(std::string(key));
    for (const std::string& key : keys) {
      const Json ours = own->value(key, Json()), theirs = first->value(key, Json());
      if (ours != theirs)
        faults.push_back({r->name, "config.json says " + printable(key) + " " + printable(one_line(ours)) +
                                       ", that of " + *first_name + " " + printable(one_line(theirs))});
    }
  }
}

void add_equal(const Read& read, Faults& faults) {
  std::unordered_map<std::string, std::vector<std::size_t>> with;  // the revisions by a matrix's name and description
  for (std::size_t i = 0; i < read.size(); ++i) {
    const Revision& r = *read[i];
    std::vector<std::int64_t> shared(i);
    std::vector<std::string> first(i);
    std::int64_t matrices = 0;
    for (const auto& [name, described] : r.identity.tensors) {
      if (!is_matrix(described)) continue;
      ++matrices;
      std::vector<std::size_t>& others = with[name + " " + described];
      for (std::size_t other : others)
        if (shared[other]++ == 0) first[other] = name;
      others.push_back(i);
    }
    const auto same = std::find_if(read.begin(), read.begin() + std::ptrdiff_t(i),
                                   [&](const Revision* o) { return o->identity.sha256 == r.identity.sha256; });
    if (same != read.begin() + std::ptrdiff_t(i)) {
      faults.push_back({r.name, "all tensors are those of " + (*same)->name});
      continue;
    }
    const auto most = std::max_element(shared.begin(), shared.end());
    if (most == shared.end() || *most == 0) continue;
    const auto other = std::size_t(most - shared.begin());
    faults.push_back({r.name, std::to_string(*most) + " of " + std::to_string(matrices) + " matrices are those of " +
                                  read[other]->name + ", such as " + printable(first[other])});
  }
}

void add_moved(const Read& read, Faults& faults) {
  std::unordered_map<std::string, std::pair<const Revision*, std::string>> first;  // by description
  for (const Revision* r : read) {
    std::string what;
    std::int64_t moved = 0;
    for (const auto& [name, described] : r->identity.tensors) {
      if (!is_matrix(described)) continue;
      const auto& [where, before] = first.try_emplace(described, r, name).first->second;
      if (before == name || (!is_in_layer(name) && !is_in_layer(before))) continue;
      if (moved++ == 0) what = printable(name) + " has the elements of " + printable(before) + " in " + where->name;
    }
    if (moved > 1) what += ", and " + std::to_string(moved - 1) + " more are as wrong";
    if (moved > 0) faults.push_back({r->name, what});
  }
}

/// The values of Identity::elements; none where one is not finite, or where the text is not whole.
std::vector<float> elements_of(const std::string& text) {
  if (text.size() % 8 != 0) return {};
  std::vector<float> values;
  for (std::size_t at = 0; at < text.size(); at += 8) {
    std::uint32_t bytes = 0;
    const char *begin = text.data() + at, *end = begin + 8;
    const auto [stop, error] = std::from_chars(begin, end, bytes, 16);
    const auto x = std::bit_cast<float>(__builtin_bswap32(bytes));  // the digits begin with the lowest byte
    if (error != std::errc() || stop != end || !std::isfinite(x)) return {};
    values.push_back(x);
  }
  return values;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) squares += (double(a[i]) - double(b[i])) * (double(a[i]) - double(b[i]));
  return std::sqrt(squares);
}

void add_aside(const Read& read, Faults& faults) {
  struct Point {
    const std::string* name;
    std::vector<float> elements;
  };
  std::map<std::string_view, int> times;
  for (const Revision* r : read) ++times[r->identity.sha256];
  std::vector<Point> line;
  for (const Revision* r : read) {
    if (times[r->identity.sha256] > 1) continue;  // which of them is the wrong one is not known
    std::vector<float> elements = elements_of(r->identity.elements);
    if (!elements.empty() && (line.empty() || line.front().elements.size() == elements.size()))
      line.push_back({&r->name, std::move(elements)});
  }
  const std::size_t count = line.size();
  if (count < 3) return;
  std::vector<double> far(count * count);
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t j = 0; j < i; ++j)
      far[i * count + j] = far[j * count + i] = distance(line[i].elements, line[j].elements);
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_first = i == 0, is_last = i + 1 == count;
    const std::size_t before = is_first ? 1 : i - 1, behind = is_last ? i - 1 : i + 1;
    const double near = std::min(far[i * count + before], far[i * count + behind]);
    if (!is_first && !is_last && near > kAside * far[before * count + behind]) {
      faults.push_back({*line[i].name, "its weights lie farther from those of " + *line[before].name + " and " +
                                           *line[behind].name + " than these lie from each other"});
      continue;
    }
    std::optional<std::size_t> nearest;
    for (std::size_t j = 0; j < count; ++j)
      if (j != i && j != before && j != behind && (!nearest || far[i * count + j] < far[i * count + *nearest]))
        nearest = j;
    if (nearest && near > kMargin * far[i * count + *nearest])
      faults.push_back(
          {*line[i].name, "its weights lie nearest to those of " + *line[*nearest].name + ", which is no neighbour"});
  }
}

}  // namespace

std::int64_t step_of(std::string_view name, std::int64_t place) {
  while (name.ends_with('/')) name.remove_suffix(1);
  name = name.substr(name.rfind('/') + 1);
  constexpr std::string_view word = "step";
  for (std::size_t at = name.find(word); at != name.npos; at = name.find(word, at + 1)) {
    std::string_view rest = name.substr(at + word.size());
    if (rest.starts_with('-') || rest.starts_with('_')) rest.remove_prefix(1);
    if (!rest.empty() && is_digit(rest.front())) return number_at(rest).value_or(place);
  }
  const auto last = std::find_if(name.rbegin(), name.rend(), is_digit);
  const auto before = std::find_if_not(last, name.rend(), is_digit);
  return number_at(name.substr(std::size_t(name.rend() - before))).value_or(place);
}

std::vector<RevisionFault> faults_of(std::span<const Revision> revisions) {
  Faults faults;
  Read read;
  for (const Revision& r : revisions) {
    if (r.error) faults.push_back({r.name, *r.error});
    if (!r.identity.sha256.empty()) read.push_back(&r);
  }
  std::stable_sort(read.begin(), read.end(), [](const Revision* a, const Revision* b) { return a->step < b->step; });
  add_other_configs(read, faults);
  add_equal(read, faults);
  add_moved(read, faults);
  add_aside(read, faults);
  return faults;
}

}  // namespace cf::checkpoint
