#include "apps/model/sweep_rows.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

SweepRow row_of(const Json& json) {
  SweepRow row;
  checkpoint::Revision& r = row.revision;
  r.name = json.at("name").get<std::string>();
  r.step = json.at("step").get<std::int64_t>();
  row.directory = json.at("directory").get<std::string>();
  json.at("files").get_to(r.identity.files);
  json.at("files_sha256").get_to(r.identity.files_sha256);
  r.identity.config = json.at("config").dump();
  json.at("sha256").get_to(r.identity.sha256);
  json.at("tensors").get_to(r.identity.tensors);
  json.at("elements").get_to(r.identity.elements);
  for (const auto& [name, value] : json.at("metrics").items()) row.metrics.emplace_back(name, value.get<double>());
  if (const Json& error = json.at("error"); !error.is_null()) r.error = error.get<std::string>();
  row.load_s = json.at("load_s").get<double>();
  row.swap_s = json.at("swap_s").get<double>();
  row.run_s = json.at("run_s").get<double>();
  return row;
}

/// A cell as Python's csv module writes it.
std::string cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == text.npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + "\"";
}

/// A number as Python writes it.
std::string number(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_not_of("-0123456789") == text.npos) text += ".0";
  return text;
}

}  // namespace

const double* SweepRow::find(const std::string& metric) const {
  for (const auto& [name, value] : metrics)
    if (name == metric) return &value;
  return nullptr;
}

std::string SweepRow::in_words() const {
  std::string values;
  for (const auto& [name, value] : metrics)
    values += fmt::format("{}{} {:.6g}", values.empty() ? "" : "  ", name, value);
  return fmt::format("{}: {} ({:.1f} s to read, {:.1f} s to run)", revision.name, revision.error.value_or(values),
                     load_s, run_s);
}

std::vector<std::string> metrics_of(std::span<const SweepRow> rows) {
  std::vector<std::string> names;
  for (const SweepRow& row : rows)
    for (const auto& [name, value] : row.metrics)
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  return names;
}

std::vector<checkpoint::RevisionFault> faults_of(std::span<const SweepRow> rows) {
  std::vector<checkpoint::Revision> revisions;
  for (const SweepRow& row : rows) revisions.push_back(row.revision);
  return checkpoint::faults_of(revisions);
}

Json json_of(const SweepRow& row) {
  const checkpoint::Revision& r = row.revision;
  Json metrics = Json::object();
  for (const auto& [name, value] : row.metrics) metrics[name] = value;
  return {{"name", r.name},
          {"step", r.step},
          {"directory", row.directory},
          {"files", r.identity.files},
          {"files_sha256", r.identity.files_sha256},
          {"config", r.identity.config.empty() ? Json::object() : Json::parse(r.identity.config)},
          {"sha256", r.identity.sha256},
          {"tensors", r.identity.tensors},
          {"elements", r.identity.elements},
          {"metrics", metrics},
          {"error", r.error ? Json(*r.error) : Json()},
          {"load_s", row.load_s},
          {"swap_s", row.swap_s},
          {"run_s", row.run_s}};
}

Result<std::map<std::string, SweepRow>> read_rows(const std::string& path, const Json& about) {
  std::map<std::string, SweepRow> rows;
  if (::access(path.c_str(), F_OK) != 0) return rows;
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, path + ": " + what); };
  std::ifstream file(path, std::ios::binary);
  const Json found = Json::parse(file, nullptr, false);
  if (!found.is_object()) return refuse("expected a sweep as JSON, to go on with");
  for (const auto& [name, value] : about.items()) {
    const auto given = found.find(name);
    if (given == found.end() || *given != value)
      return refuse("expected a sweep with " + name + " " + value.dump() + ", to go on with, got " +
                    (given == found.end() ? "none" : given->dump(-1, ' ', false, Json::error_handler_t::replace)));
  }
  try {
    for (const Json& each : found.at("revisions"))
      if (SweepRow row = row_of(each); !row.revision.error) rows.emplace(row.revision.name, std::move(row));
  } catch (const Json::exception&) {
    return refuse("expected the rows of a sweep");
  }
  return rows;
}

std::string csv_of(std::span<const SweepRow> rows) {
  const std::vector<std::string> names = metrics_of(rows);
  std::string text = "revision,step,";
  for (const std::string& name : names) text += cell(name) + ",";
  text += "sha256,directory,error\n";
  for (const SweepRow& row : rows) {
    text += cell(row.revision.name) + "," + std::to_string(row.revision.step) + ",";
    for (const std::string& name : names) {
      const double* const value = row.find(name);
      text += (value ? number(*value) : "") + ",";
    }
    text +=
        row.revision.identity.sha256 + "," + cell(row.directory) + "," + cell(row.revision.error.value_or("")) + "\n";
  }
  return text;
}

}  // namespace cf::apps
