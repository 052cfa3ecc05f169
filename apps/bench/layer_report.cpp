#include "apps/bench/layer_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "apps/cli/table.hpp"
#include "apps/cli/terminal.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

std::string hex(std::uint64_t checksum) { return fmt::format("{:#018x}", checksum); }

// The fields of JSON and CSV, as flat objects.

Json run_fields(const RunInfo& r) {
  Json j = {{"program", "cf-layer"},
            {"version", r.version},
            {"commit", r.commit},
            {"command", r.command},
            {"cpu", r.cpu},
            {"threads", r.threads},
            {"backend", r.backend},
            {"model", r.model},
            {"weights", r.weights},
            {"seed", r.seed},
            {"activation_dtype", to_string(r.activation)},
            {"runs", r.bench.runs},
            {"warmup", r.bench.warmup},
            {"cold", !r.bench.warm}};
  if (r.device) {
    add_device(j, *r.device);
    j["l2_bytes"] = r.device->l2_bytes;
    j["launch_plan"] = r.launch_plan;
  }
  return j;
}

Json configuration_fields(const LayerReport& r) {
  Json j = {{"layer", r.layer},
            {"kv_len", r.load.kv_len},
            {"q_len", r.load.q_len},
            {"batch", r.load.batch},
            {"weights_dtype", to_string(r.weights_dtype)},
            {"weights_checksum", hex(r.weights_checksum)},
            {"read_best_gb_per_s", r.timing.best_read() * 1e-9},
            {"read_median_gb_per_s", r.timing.median_read() * 1e-9}};
  if (r.device) {
    j["impl"] = r.device->impl;
    j["resident_layers"] = r.device->resident_layers;
    j["step_layers"] = r.device->step_layers;
    j["host_us"] = r.device->host_us.median;
    j["capacity"] = r.load.cache_capacity();
  }
  if (r.check) {
    j["check_rel_l2"] = r.check->error.rel_l2;
    j["check_rel_l2_budget"] = r.check->budget.rel_l2;
    j["check_rel_max"] = r.check->error.rel_max;
    j["check_rel_max_budget"] = r.check->budget.rel_max;
    j["check_max_abs"] = r.check->error.max_abs;
    j["check_ok"] = r.check->ok();
  }
  return j;
}

/// What the L2 may keep from run to run, where a run goes through so many layers.
CacheUse l2_use(const RunInfo& run, std::int64_t layers) {
  return {.name = "the L2", .cache_bytes = double(run.device->l2_bytes), .layers = double(layers)};
}

/// The same for the sites of a configuration, or for its total.
CacheUse cache_use(const RunInfo& run, const LayerReport& r, bool total) {
  if (run.device) return l2_use(run, total ? r.device->step_layers : r.device->resident_layers);
  const long l3_bytes = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return {.name = "the processor's caches",
          .cache_bytes = l3_bytes > 0 ? double(l3_bytes) : std::numeric_limits<double>::infinity(),
          .layers = 1,
          .evicts_weights = !run.bench.warm};
}

/// Calls f(timing, note) for every site of a configuration, its total and its step.
template <class F>
void for_each_timing(const RunInfo& run, const LayerReport& r, F&& f) {
  const auto add = [&](const Timing& t, const CacheUse& use) {
    f(t, limit_note(r.timing.percent_of_read(t), t.bytes, t.own_bytes, use));
  };
  for (const Timing& t : r.timing.sites) add(t, cache_use(run, r, false));
  CacheUse use = cache_use(run, r, true);
  add(r.timing.total, use);
  use.layers = 1;  // the step's bytes are those of all its layers
  if (r.timing.step) add(*r.timing.step, use);
}

Json timing_fields(const LayerTiming& layer, const Timing& t, const std::string& note) {
  return {{"site", t.site},
          {"op", t.op},
          {"median_us", t.time_us.median},
          {"p10_us", t.time_us.p10},
          {"p99_us", t.time_us.p99},
          {"noise_percent", t.time_us.noise_percent()},
          {"bytes", std::int64_t(t.bytes)},
          {"gb_per_s", t.gb_per_s()},
          {"percent_of_read", layer.percent_of_read(t)},
          {"limit_note", note}};
}

std::string variant_note(const RunInfo& run, const AblationReport& r, const VariantReport& v) {
  return limit_note(r.percent_of_read(v), r.layer_bytes, r.layer_own_bytes, l2_use(run, r.resident_layers));
}

/// "kv_len 17, batch 2", with q_len where it is not 1.
std::string load_text(const Workload& load) {
  return fmt::format("kv_len {}{}, batch {}", load.kv_len, load.q_len > 1 ? fmt::format(", q_len {}", load.q_len) : "",
                     load.batch);
}

/// A column's heading that says what 100 % is.
std::string percent_heading(double bytes_per_s) { return fmt::format("% of read, {:.2f} GB/s", bytes_per_s * 1e-9); }

/// The JSON's text. Bytes of a command line that are not UTF-8 are replaced.
std::string text(const Json& j, int indent = -1) { return j.dump(indent, ' ', false, Json::error_handler_t::replace); }

/// A value as a CSV cell, quoted as RFC 4180 asks.
std::string cell(const Json& value) {
  if (!value.is_string()) return text(value);
  std::string quoted = "\"";
  for (char c : value.get_ref<const std::string&>()) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

}  // namespace

void print_header(std::FILE* out, const RunInfo& r) {
  fmt::print(out, "# cf-layer {}, commit {}\n\n", r.version, r.commit);
  if (r.device) {
    fmt::print(out, "- backend: {}, {}, CUDA {} (driver {}), memory clock {:.0f} MHz\n", r.backend, r.device->name,
               r.device->runtime, r.device->driver, r.device->memory_clock_mhz);
    fmt::print(out, "- launch plans: {}\n", r.launch_plan);
  } else {
    fmt::print(out, "- backend: {}, {}, {} thread{}\n", r.backend, r.cpu, r.threads, r.threads == 1 ? "" : "s");
  }
  fmt::print(out, "- model: {}, {}\n", visible(r.model), r.weights);
  fmt::print(out, "- activations: {}, procedural with seed {}\n", to_string(r.activation), r.seed);
  const char* cold = r.device ? "cold: the weights of many layers in turn"
                              : "cold: weights and cache evicted from the processor's caches before each";
  const char* warm = r.device ? "warm: the same layer again, of which the L2 keeps what it holds" : "warm";
  fmt::print(out, "- runs: {} after {} of warm-up, {}\n", r.bench.runs, r.bench.warmup, r.bench.warm ? warm : cold);
}

void print_report(std::FILE* out, const RunInfo& run, const LayerReport& r) {
  const LayerTiming& timing = r.timing;
  const std::string layers = timing.step ? timing.step->site : fmt::format("layer {}", r.layer);
  fmt::print(out, "\n## {}, {}{}\n\n", layers, load_text(r.load), r.device ? ", " + r.device->impl : "");
  fmt::print(out, "- weights: {}, checksum {}\n", to_string(r.weights_dtype), hex(r.weights_checksum));
  if (r.device)
    fmt::print(out,
               "- times are a layer's: a site's over {} resident layers, the total's over {}; caches of {} entries\n",
               r.device->resident_layers, r.device->step_layers, r.load.cache_capacity());
  fmt::print(out, "- streaming read{}: best {:.2f} GB/s, which is the 100 % below; median {:.2f} GB/s\n\n",
             r.device ? "" : " of the weights", timing.best_read() * 1e-9, timing.median_read() * 1e-9);
  Table table({"site", "op", "median us", "p10 us", "p99 us", "noise %", "bytes", "GB/s",
               percent_heading(timing.best_read()), "note"});
  for_each_timing(run, r, [&](const Timing& t, const std::string& note) {
    table.add({t.site, t.op, fmt::format("{:.1f}", t.time_us.median), fmt::format("{:.1f}", t.time_us.p10),
               fmt::format("{:.1f}", t.time_us.p99), fmt::format("{:.1f}", t.time_us.noise_percent()),
               fmt::format("{:.0f}", t.bytes), fmt::format("{:.2f}", t.gb_per_s()),
               fmt::format("{:.1f}", timing.percent_of_read(t)), note});
  });
  table.print(out);
  if (timing.step)
    fmt::print(out, "\n{} back to back: {:.3f} ms\n", timing.step->site, timing.step->time_us.median * 1e-3);
  if (!r.check) return;
  const LayerCheck& c = *r.check;
  fmt::print(out,
             "\ncheck against the float64 oracle: relative L2 {:.2e} (budget {:.2e}), relative max {:.2e} (budget "
             "{:.2e}), max abs {:.2e}: {}\n",
             c.error.rel_l2, c.budget.rel_l2, c.error.rel_max, c.budget.rel_max, c.error.max_abs,
             c.ok() ? "ok" : "FAIL");
  if (!c.ok())
    fmt::print(out, "worst at {}: got {:.9g}, expected {:.9g}; {} not finite\n", c.error.worst_coordinate,
               c.error.worst_got, c.error.worst_reference, c.error.non_finite);
}

bool AblationReport::ok() const {
  return std::all_of(variants.begin(), variants.end(), [](const VariantReport& v) { return v.ok; });
}

void print_ablation(std::FILE* out, const RunInfo& run, const AblationReport& r) {
  fmt::print(out, "\n## variants of the persistent kernel, {} layers, {}\n\n", r.resident_layers, load_text(r.load));
  fmt::print(out, "- plan: {}\n\n", r.variants.front().plan);
  Table table({"part", "variant", "us a layer", "noise %", "to the plan's", percent_heading(r.read_best_bytes_per_s),
               "note", "output"});
  for (const VariantReport& v : r.variants) {
    std::vector<std::string> cells{v.part, v.name};
    if (v.time_us)
      cells.insert(
          cells.end(),
          {fmt::format("{:.2f}", v.time_us->median), fmt::format("{:.1f}", v.time_us->noise_percent()),
           fmt::format("{:.3f}", r.ratio(v)), fmt::format("{:.1f}", r.percent_of_read(v)), variant_note(run, r, v),
           v.same_bits ? "the same bits" : fmt::format("relative L2 {:.1e}{}", v.rel_l2, v.ok ? "" : ", FAIL")});
    else
      cells.insert(cells.end(), {"-", "-", "-", "-", "", v.plan});
    table.add(std::move(cells));
  }
  table.print(out);
}

std::string report_json(const RunInfo& run, const std::vector<LayerReport>& reports,
                        const std::vector<AblationReport>& ablations, bool complete) {
  Json j = run_fields(run);
  j["complete"] = complete;
  j["configurations"] = Json::array();
  for (const LayerReport& r : reports) {
    Json c = configuration_fields(r);
    c["sites"] = Json::array();
    for_each_timing(run, r, [&](const Timing& t, const std::string& note) {
      Json fields = timing_fields(r.timing, t, note);
      if (&t == &r.timing.total)
        c["total"] = std::move(fields);
      else if (r.timing.step && &t == &*r.timing.step)
        c["step"] = std::move(fields);
      else
        c["sites"].push_back(std::move(fields));
    });
    j["configurations"].push_back(std::move(c));
  }
  for (const AblationReport& r : ablations) {
    Json a = {{"kv_len", r.load.kv_len},
              {"batch", r.load.batch},
              {"resident_layers", r.resident_layers},
              {"capacity", r.load.cache_capacity()},
              {"layer_bytes", std::int64_t(r.layer_bytes)},
              {"read_best_gb_per_s", r.read_best_bytes_per_s * 1e-9},
              {"variants", Json::array()}};
    for (const VariantReport& v : r.variants) {
      Json row = {{"part", v.part}, {"variant", v.name}, {"plan", v.plan}};
      if (v.time_us)
        row.update({{"median_us", v.time_us->median},
                    {"p10_us", v.time_us->p10},
                    {"p99_us", v.time_us->p99},
                    {"noise_percent", v.time_us->noise_percent()},
                    {"ratio", r.ratio(v)},
                    {"percent_of_read", r.percent_of_read(v)},
                    {"limit_note", variant_note(run, r, v)},
                    {"same_bits", v.same_bits},
                    {"rel_l2", v.rel_l2},
                    {"ok", v.ok}});
      a["variants"].push_back(std::move(row));
    }
    j["ablations"].push_back(std::move(a));
  }
  return text(j, 2) + "\n";
}

std::string report_csv(const RunInfo& run, const std::vector<LayerReport>& reports) {
  std::string header, rows;
  for (const LayerReport& r : reports)
    for_each_timing(run, r, [&](const Timing& t, const std::string& note) {
      Json row = run_fields(run);
      row.update(configuration_fields(r));
      row.update(timing_fields(r.timing, t, note));
      std::string names, line;
      for (const auto& [name, value] : row.items()) {
        names += (names.empty() ? "" : ",") + name;
        line += (line.empty() ? "" : ",") + cell(value);
      }
      header = names + "\n";
      rows += line + "\n";
    });
  return header + rows;
}

}  // namespace cf::apps
