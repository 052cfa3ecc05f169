#include "apps/layer_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/common.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

std::string hex(std::uint64_t checksum) { return fmt::format("{:#018x}", checksum); }

// The fields, once for JSON and CSV: each object is flat.

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
            {"seq_len", r.load.kv_len},
            {"batch", r.load.batch},
            {"weights_dtype", to_string(r.weights_dtype)},
            {"weights_checksum", hex(r.weights_checksum)},
            {"read_best_gb_per_s", r.timing.best_read() * 1e-9},
            {"read_median_gb_per_s", r.timing.median_read() * 1e-9}};
  if (r.device) {
    j["impl"] = r.device->impl;
    j["resident_layers"] = r.device->resident_layers;
    j["step_layers"] = r.device->step_layers;
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

Json timing_fields(const LayerTiming& layer, const Timing& t) {
  return {{"site", t.site},
          {"op", t.op},
          {"median_us", t.time_us.median},
          {"p10_us", t.time_us.p10},
          {"p99_us", t.time_us.p99},
          {"noise_percent", t.time_us.noise_percent()},
          {"bytes", std::int64_t(t.bytes)},
          {"gb_per_s", t.gb_per_s()},
          {"percent_of_read", layer.percent_of_read(t)}};
}

/// The sites whose bytes of all resident layers the L2 holds from one replay to the next.
std::string cached_sites(const RunInfo& run, const LayerReport& r) {
  std::string names;
  if (run.device && r.device)
    for (const Timing& t : r.timing.sites)
      if (t.bytes * double(r.device->resident_layers) <= double(run.device->l2_bytes))
        names += (names.empty() ? "" : ", ") + t.site;
  return names;
}

/// A command line may hold bytes that are no UTF-8: they are replaced.
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
  fmt::print(out, "- model: {}, {}\n", r.model, r.weights);
  fmt::print(out, "- activations: {}, procedural with seed {}\n", to_string(r.activation), r.seed);
  const char* cold = r.device ? "cold: the weights of many layers in turn"
                              : "cold: weights and cache evicted from the processor's caches before each";
  fmt::print(out, "- runs: {} after {} of warm-up, {}\n", r.bench.runs, r.bench.warmup, r.bench.warm ? "warm" : cold);
}

void print_report(std::FILE* out, const RunInfo& run, const LayerReport& r) {
  const LayerTiming& timing = r.timing;
  const std::string layers = timing.stack ? timing.stack->site : fmt::format("layer {}", r.layer);
  fmt::print(out, "\n## {}, seq_len {}, batch {}{}\n\n", layers, r.load.kv_len, r.load.batch,
             r.device ? ", " + r.device->impl : "");
  fmt::print(out, "- weights: {}, checksum {}\n", to_string(r.weights_dtype), hex(r.weights_checksum));
  if (r.device)
    fmt::print(out, "- times are a layer's, over {} resident layers with a cache of {} entries, the total over {}\n",
               r.device->resident_layers, r.load.cache_capacity(), r.device->step_layers);
  if (const std::string names = cached_sites(run, r); !names.empty())
    fmt::print(out, "- within the L2 from one run to the next: {}\n", names);
  fmt::print(out, "- streaming read{}: best {:.2f} GB/s, which is the 100 % below; median {:.2f} GB/s\n\n",
             r.device ? "" : " of the weights", timing.best_read() * 1e-9, timing.median_read() * 1e-9);
  Table table({"site", "op", "median us", "p10 us", "p99 us", "noise %", "bytes", "GB/s", "% of read"});
  const auto add = [&](const Timing& t) {
    table.add({t.site, t.op, fmt::format("{:.1f}", t.time_us.median), fmt::format("{:.1f}", t.time_us.p10),
               fmt::format("{:.1f}", t.time_us.p99), fmt::format("{:.1f}", t.time_us.noise_percent()),
               fmt::format("{:.0f}", t.bytes), fmt::format("{:.2f}", t.gb_per_s()),
               fmt::format("{:.1f}", timing.percent_of_read(t))});
  };
  for (const Timing& t : timing.sites) add(t);
  add(timing.total);
  if (timing.stack) add(*timing.stack);
  table.print(out);
  if (timing.stack)
    fmt::print(out, "\n{} back to back: {:.3f} ms, {:.1f} % of the streaming read\n", timing.stack->site,
               timing.stack->time_us.median * 1e-3, timing.percent_of_read(*timing.stack));
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

void print_ablation(std::FILE* out, const AblationReport& r) {
  fmt::print(out, "\n## parts of the persistent kernel, stack of {} layers, seq_len {}, batch {}\n\n",
             r.resident_layers, r.load.kv_len, r.load.batch);
  fmt::print(out, "- plan: {}\n", r.variants.front().plan);
  fmt::print(out, "- streaming read: best {:.2f} GB/s\n\n", r.read_best_bytes_per_s * 1e-9);
  Table table({"part", "variant", "us a layer", "noise %", "to the plan's", "% of read", "output"});
  for (const VariantReport& v : r.variants)
    table.add({v.part, v.name, v.time_us ? fmt::format("{:.2f}", v.time_us->median) : "-",
               v.time_us ? fmt::format("{:.1f}", v.time_us->noise_percent()) : "-",
               v.time_us ? fmt::format("{:.3f}", r.ratio(v)) : "-",
               v.time_us ? fmt::format("{:.1f}", r.percent_of_read(v)) : "-",
               !v.time_us    ? v.plan
               : v.same_bits ? "the same bits"
                             : fmt::format("relative L2 {:.1e}{}", v.rel_l2, v.ok ? "" : ", FAIL")});
  table.print(out);
}

std::string report_json(const RunInfo& run, const std::vector<LayerReport>& reports,
                        const std::vector<AblationReport>& ablations) {
  Json j = run_fields(run);
  j["configurations"] = Json::array();
  for (const LayerReport& r : reports) {
    Json c = configuration_fields(r);
    c["sites"] = Json::array();
    for (const Timing& t : r.timing.sites) c["sites"].push_back(timing_fields(r.timing, t));
    c["total"] = timing_fields(r.timing, r.timing.total);
    if (r.timing.stack) c["stack"] = timing_fields(r.timing, *r.timing.stack);
    j["configurations"].push_back(std::move(c));
  }
  for (const AblationReport& r : ablations) {
    Json a = {{"seq_len", r.load.kv_len},
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
  const auto add = [&](const LayerReport& r, const Timing& t) {
    Json row = run_fields(run);
    row.update(configuration_fields(r));
    row.update(timing_fields(r.timing, t));
    std::string names, line;
    for (const auto& [name, value] : row.items()) {
      names += (names.empty() ? "" : ",") + name;
      line += (line.empty() ? "" : ",") + cell(value);
    }
    header = names + "\n";
    rows += line + "\n";
  };
  for (const LayerReport& r : reports) {
    for (const Timing& t : r.timing.sites) add(r, t);
    add(r, r.timing.total);
    if (r.timing.stack) add(r, *r.timing.stack);
  }
  return header + rows;
}

}  // namespace cf::apps
