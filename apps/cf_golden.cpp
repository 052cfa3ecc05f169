// cf-golden: looks into golden files, runs a backend against them, compares two of them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/common.hpp"
#include "apps/golden_walk.hpp"

namespace cf::apps {
namespace {

using golden::GoldenFile;
using golden::GoldenMeta;
using golden::VariantInfo;
using Json = nlohmann::ordered_json;

struct Options {
  std::vector<std::string> files;
  std::string backend = "cpu", impl = "unfused", dtype, site, model, json, variant_a, variant_b;
  bool isolated = false, chained = false;  // isolated unless chained
};

void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

std::string scientific(double x) { return fmt::format("{:.2e}", x); }

std::string verdict(bool ok) { return ok ? "ok" : "FAIL"; }

std::string summary(const GoldenFile& file) {
  const GoldenMeta& m = file.meta();
  return fmt::format("{}: {} layer {}, {}, batch {}, q_len {}, kv_len {}", file.path(), m.model, m.layer,
                     to_string(m.dtype), m.load.batch, m.load.q_len, m.load.kv_len);
}

Json error_json(const Comparison& e) {
  return {{"max_abs", e.max_abs},
          {"rel_l2", e.rel_l2},
          {"rel_max", e.rel_max},
          {"mean_signed", e.mean_signed},
          {"ulp_fp16", {{"p50", e.ulp_p50}, {"p99", e.ulp_p99}, {"max", e.ulp_max}}},
          {"non_finite", e.non_finite},
          {"worst_index", e.worst},
          {"worst_got", e.worst_got},
          {"worst_reference", e.worst_reference}};
}

/// The report's columns that every comparison has.
std::vector<std::string> error_headers() {
  return {"max abs", "rel L2", "ULP16 p50", "ULP16 p99", "ULP16 max", "mean signed", "worst at"};
}
std::vector<std::string> error_cells(const Comparison& e, const std::string& worst) {
  return {scientific(e.max_abs),
          e.non_finite ? "nan" : scientific(e.rel_l2),
          fmt::format("{:.3g}", e.ulp_p50),
          fmt::format("{:.3g}", e.ulp_p99),
          fmt::format("{:.3g}", e.ulp_max),
          fmt::format("{:+.1e}", e.mean_signed),
          e.max_abs > 0 || e.non_finite ? worst : "-"};
}

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b,
                                const std::vector<std::string>& c) {
  a.insert(a.end(), b.begin(), b.end());
  a.insert(a.end(), c.begin(), c.end());
  return a;
}

Status write_json(const Options& o, const std::string& command, Json rows) {
  if (o.json.empty()) return {};
  const Json document{{"program", "cf-golden"}, {"commit", commit()}, {"command", command}, {"rows", std::move(rows)}};
  // A name in a file may be no UTF-8: its bytes are replaced.
  return write_file_atomically(o.json, document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

/// The exit code, unless what was printed did not arrive.
int finish(bool passed) {
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return fail("standard output: cannot be written");
  return passed ? kOk : kComparisonFailed;
}

std::string shape_of(const GoldenMeta& m, const std::string& tap) {
  std::string shape;
  for (const golden::TapDim& d : golden::tap_dims(m.config, m.load, tap))
    shape += fmt::format("{}{}={}", shape.empty() ? "" : ", ", d.name, d.size);
  return shape.empty() ? "the producer's own" : shape;
}

int info(const Options& o) {
  const Result<GoldenFile> opened = GoldenFile::open(o.files.front());
  if (!opened) return fail(opened.status());
  const GoldenMeta& m = opened->meta();
  const ModelConfig& c = m.config;

  std::string kv_len;
  for (std::int32_t n : m.kv_len) kv_len += (kv_len.empty() ? "" : ", ") + std::to_string(n);
  Table attributes({"attribute", "value"});
  attributes.add({"file", opened->path()});
  attributes.add({"producer", m.producer});
  attributes.add({"command", m.command});
  attributes.add({"versions", m.versions});
  attributes.add({"model", fmt::format("{}, layer {} of {}", m.model, m.layer, c.num_hidden_layers)});
  attributes.add(
      {"sizes", fmt::format("hidden {}, heads {}, head_dim {}, rotary_dim {}, intermediate {}", c.hidden_size,
                            c.num_attention_heads, c.head_dim(), c.rotary_dim, c.intermediate_size)});
  attributes.add(
      {"arithmetic", fmt::format("{}, {} residual, eps {:g}, rope theta {:g}", to_string(c.hidden_act),
                                 c.use_parallel_residual ? "parallel" : "sequential", c.layer_norm_eps, c.rope_theta)});
  attributes.add({"dtype", std::string(to_string(m.dtype))});
  attributes.add({"seed", std::to_string(m.seed)});
  attributes.add({"batch, q_len", fmt::format("{}, {}", m.load.batch, m.load.q_len)});
  attributes.add({"kv_len", kv_len});
  attributes.add({"cache", m.cache});
  attributes.add({"weights", m.weights + (m.weights_checkpoint.empty() ? "" : ", " + m.weights_checkpoint)});
  attributes.add({"weights checksum", fmt::format("{:016x}", m.weights_checksum)});
  attributes.print(stdout);

  std::vector<std::string> headers{"tap", "shape"}, taps;
  for (const VariantInfo& v : opened->variants()) {
    headers.push_back(fmt::format("{} ({}, {})", v.name, v.attn_implementation, v.device));
    for (const std::string& tap : v.taps)
      if (!std::count(taps.begin(), taps.end(), tap)) taps.push_back(tap);
  }
  Table table(headers);
  for (const std::string& tap : taps) {
    std::vector<std::string> row{tap, shape_of(m, tap)};
    for (const VariantInfo& v : opened->variants())
      row.push_back(std::count(v.taps.begin(), v.taps.end(), tap) ? "yes" : "");
    table.add(row);
  }
  print("\n");
  table.print(stdout);
  return finish(true);
}

/// The smallest error of the producer's own runs in the file's dtype, or "-".
std::string producer_error(const GoldenFile& file, const TapResult& r) {
  double least = INFINITY;
  for (const VariantInfo& v : file.variants())
    if (const auto e = r.producer_rel_l2.find(v.name);
        e != r.producer_rel_l2.end() && v.dtype == to_string(file.meta().dtype))
      least = std::min(least, e->second);
  return std::isfinite(least) ? scientific(least) : "-";
}

std::string_view short_name(DType d) {
  switch (d) {
    case DType::f16: return "fp16";
    case DType::bf16: return "bf16";
    case DType::f32: return "fp32";
    case DType::f64: return "fp64";
    case DType::i32: return "int32";
  }
  return "?";
}

/// The options' names of the activation dtypes.
std::string option_name(DType d) {
  switch (d) {
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::f64: return "f64";
    default: return "f32";
  }
}

/// The activations that a backend walks a file with: the CPU the oracle's and its own, the GPU the stored dtype. An
/// option names one of those that it can.
Result<std::vector<DType>> choose_dtypes(const Options& o, Backend backend, DType stored) {
  const bool cpu = backend == Backend::cpu;
  if (o.dtype.empty()) return cpu ? std::vector{DType::f64, DType::f32} : std::vector{stored};
  for (DType d : cpu ? std::vector{DType::f64, DType::f32} : std::vector{DType::f16, DType::bf16, DType::f32})
    if (option_name(d) == o.dtype) return std::vector{d};
  return Status::error(Code::invalid_argument, fmt::format("--dtype {}: the {} backend takes {}", o.dtype, o.backend,
                                                           cpu ? "f64 or f32" : "f16, bf16 or f32"));
}

std::string reproduce(const Options& o, const std::string& path, const TapResult& r) {
  std::vector<std::string> words{
      "cf-golden",         "run", path, "--site", r.site, o.chained ? "--chained" : "--isolated", "--dtype",
      option_name(r.dtype)};
  if (o.backend != "cpu") words.insert(words.end(), {"--backend", o.backend, "--impl", o.impl});
  if (!o.model.empty()) words.insert(words.end(), {"--model", o.model});
  return "reproduce: " + shell_command(words) + "\n";
}

Json row_json(const std::string& path, const Options& o, const TapResult& r) {
  Json row{{"file", path},
           {"backend", o.backend},
           {"impl", o.impl},
           {"mode", o.chained ? "chained" : "isolated"},
           {"site", r.site},
           {"tap", r.tap},
           {"dtype", to_string(r.dtype)}};
  row.update(error_json(r.error));
  row.update({{"worst_at", r.worst}, {"budget", r.budget}, {"producer_rel_l2", r.producer_rel_l2}, {"ok", r.ok()}});
  return row;
}

int run(const Options& o, const std::string& command) {
  const Result<Backend> backend = choose_backend(o.backend);
  if (!backend) return fail(backend.status());
  if (!o.json.empty())
    if (const Status s = check_writable(o.json); !s) return fail(s);

  bool passed = true;
  Json rows = Json::array();
  for (const std::string& path : o.files) {
    const Result<GoldenFile> file = GoldenFile::open(path);
    if (!file) return fail(file.status());
    const Result<golden::GoldenWeights> weights = file->weights(o.model);
    if (!weights) return fail(weights.status());
    print_notes(weights->notes);
    const Result<std::vector<DType>> dtypes = choose_dtypes(o, *backend, file->meta().dtype);
    if (!dtypes) return fail(dtypes.status());

    Table table(joined({"site", "tap", "dtype"}, error_headers(),
                       {"budget", fmt::format("HF {}", short_name(file->meta().dtype)), "verdict"}));
    std::string failures;
    for (DType dtype : *dtypes) {
      const auto results = walk_golden(*file, *weights,
                                       {.backend = *backend,
                                        .activation = dtype,
                                        .isolated = !o.chained,
                                        .site = o.site,
                                        .fused = o.impl == "fused"});
      if (!results) return fail(results.status());
      for (const TapResult& r : *results) {
        table.add(joined({r.site, r.tap, option_name(r.dtype)}, error_cells(r.error, r.worst),
                         {scientific(r.budget), producer_error(*file, r), verdict(r.ok())}));
        rows.push_back(row_json(path, o, r));
        if (const std::string line = reproduce(o, path, r); !r.ok() && failures.find(line) == std::string::npos)
          failures += line;
      }
    }
    print(fmt::format("## {}, {}, {} backend, {}\n\n", summary(*file), o.chained ? "chained" : "isolated", o.backend,
                      o.impl));
    table.print(stdout);
    print(failures.empty() ? "\n" : "\n" + failures + "\n");
    passed = passed && failures.empty();
  }
  if (const Status s = write_json(o, command, std::move(rows)); !s) return fail(s);
  return finish(passed);
}

/// The variant that was asked for, else the reference, else the first.
Result<VariantInfo> choose_variant(const GoldenFile& file, const std::string& name) {
  const VariantInfo* first = nullptr;
  std::string names;
  for (const VariantInfo& v : file.variants()) {
    if (v.name == (name.empty() ? golden::kReference : std::string_view(name))) return v;
    if (!first) first = &v;
    names += (names.empty() ? "" : ", ") + v.name;
  }
  if (name.empty() && first) return *first;
  return Status::error(Code::not_found, file.path() + ": expected the variant '" +
                                            (name.empty() ? std::string(golden::kReference) : name) + "', got " +
                                            (names.empty() ? "none" : names));
}

DType coarser(DType a, DType b) { return unit_roundoff(a) < unit_roundoff(b) ? b : a; }

/// What two runs in a dtype may differ by: each of the sites sums at most its longest reduction in that dtype, or in
/// float32 where it is a 16-bit one, and stores once; the sites' errors are independent and add in quadrature.
double compare_budget(DType dtype, const GoldenMeta& m) {
  const DType compute = size_bytes(dtype) < size_bytes(DType::f32) ? DType::f32 : dtype;
  const std::int64_t longest = std::max({m.config.hidden_size, m.config.intermediate_size, m.load.kv_len});
  return std::sqrt(double(sites.size())) * reduction_budget(longest, {compute, dtype}, {}).rel_l2;
}

/// Inputs are the same bits in one dtype, else one rounding apart; cos and sin come from two makers' float32.
double input_budget(std::string_view name, DType a, DType b) {
  if (name == "cos" || name == "sin") return kTableBudget;
  return a == b ? 0 : unit_roundoff(coarser(a, b));
}

/// Dimensions without names.
std::vector<golden::TapDim> plain_dims(const Shape& shape) {
  constexpr std::string_view names[] = {"i", "j", "k", "l", "m", "n"};
  std::vector<golden::TapDim> dims;
  for (std::size_t d = 0; d < shape.size(); ++d) dims.push_back({d < std::size(names) ? names[d] : "?", shape[d]});
  return dims;
}

/// One line of the comparison of two files.
struct Difference {
  std::string tensor, dtypes, worst;
  Comparison error;
  double budget;
  bool ok() const { return error.non_finite == 0 && error.rel_l2 <= budget; }
};

Status add_difference(const std::string& name, const Result<Tensor>& a, const Result<Tensor>& b,
                      std::vector<golden::TapDim> dims, double budget, std::vector<Difference>& out) {
  if (!a) return a.status();
  if (!b) return b.status();
  const Result<Comparison> c = compare(*a, *b);
  if (!c) return Status::error(c.status().code(), name + ": " + c.status().message());
  if (dims.empty()) dims = plain_dims(a->shape());
  out.push_back({name, fmt::format("{}, {}", short_name(a->dtype()), short_name(b->dtype())),
                 a->size() ? name_coordinate(dims, c->worst) : "", *c, budget});
  return {};
}

int compare_files(const Options& o, const std::string& command) {
  if (!o.json.empty())
    if (const Status s = check_writable(o.json); !s) return fail(s);
  const Result<GoldenFile> a = GoldenFile::open(o.files[0]), b = GoldenFile::open(o.files[1]);
  for (const auto* file : {&a, &b})
    if (!*file) return fail(file->status());
  const Result<VariantInfo> va = choose_variant(*a, o.variant_a), vb = choose_variant(*b, o.variant_b);
  for (const auto* variant : {&va, &vb})
    if (!*variant) return fail(variant->status());
  const GoldenMeta& m = a->meta();
  const DType dtype = coarser(*dtype_from_string(va->dtype), *dtype_from_string(vb->dtype));

  std::vector<Difference> differences;
  for (const char* name : {"hidden", "kv_len", "positions", "cos", "sin", "k_cache", "v_cache"}) {
    const Result<Tensor> ta = a->input(name), tb = b->input(name);
    const double budget = ta && tb ? input_budget(name, ta->dtype(), tb->dtype()) : 0;
    if (const Status s = add_difference(fmt::format("inputs/{}", name), ta, tb, {}, budget, differences); !s)
      return fail(s);
  }
  std::string lonely;
  for (const std::string& tap : va->taps) {
    if (!std::count(vb->taps.begin(), vb->taps.end(), tap)) {
      lonely += fmt::format("only in {}: {}\n", a->path(), tap);
      continue;
    }
    if (const Status s = add_difference(tap, a->tap(va->name, tap), b->tap(vb->name, tap),
                                        golden::tap_dims(m.config, m.load, tap), compare_budget(dtype, m), differences);
        !s)
      return fail(s);
  }
  for (const std::string& tap : vb->taps)
    if (!std::count(va->taps.begin(), va->taps.end(), tap)) lonely += fmt::format("only in {}: {}\n", b->path(), tap);

  bool passed = true;
  Json rows = Json::array();
  Table table(joined({"tensor", "dtypes"}, error_headers(), {"budget", "verdict"}));
  for (const Difference& d : differences) {
    passed = passed && d.ok();
    table.add(joined({d.tensor, d.dtypes}, error_cells(d.error, d.worst), {scientific(d.budget), verdict(d.ok())}));
    Json row{{"tensor", d.tensor}, {"dtypes", d.dtypes}};
    row.update(error_json(d.error));
    row.update({{"worst_at", d.worst}, {"budget", d.budget}, {"ok", d.ok()}});
    rows.push_back(std::move(row));
  }
  print(fmt::format("A {}, {}\n\nB {}, {}\n\n", summary(*a), va->name, summary(*b), vb->name));
  table.print(stdout);
  print("\n" + lonely);
  if (!passed)
    print("reproduce: " +
          shell_command(
              {"cf-golden", "compare", a->path(), b->path(), "--variant-a", va->name, "--variant-b", vb->name}) +
          "\n");
  if (const Status s = write_json(o, command, std::move(rows)); !s) return fail(s);
  return finish(passed);
}

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"Looks into golden files, runs a backend against them, compares two of them."};
  app.require_subcommand(1);

  CLI::App* info_command = app.add_subcommand("info", "Print what a golden file holds");
  info_command->add_option("file", o.files, "The golden file")->required()->expected(1);

  CLI::App* run_command = app.add_subcommand("run", "Run a backend site by site and compare it with the file's taps");
  run_command->add_option("files", o.files, "Golden files")->required();
  run_command->add_option("--backend", o.backend, "cpu or cuda")->capture_default_str();
  run_command
      ->add_option(
          "--impl", o.impl,
          "unfused: an op a site; fused: all sites by one persistent kernel, with --backend cuda and --chained")
      ->capture_default_str()
      ->check(CLI::IsMember({"unfused", "fused"}));
  run_command
      ->add_option("--dtype", o.dtype,
                   "Activations: f64 (the oracle) or f32 on the CPU, both when left out; on a GPU "
                   "f16, bf16 or f32, the file's when left out")
      ->check(CLI::IsMember({"f64", "f32", "f16", "bf16"}));
  run_command->add_option("--site", o.site, "This site alone, for example attention.context");
  CLI::Option* isolated = run_command->add_flag("--isolated", o.isolated,
                                                "Feed every site the file's tensors: names the guilty one (default)");
  run_command->add_flag("--chained", o.chained, "Feed only the first site: shows how errors add up")
      ->excludes(isolated);
  run_command->add_option("--model", o.model, "Take the weights from this checkpoint directory");

  CLI::App* compare_command = app.add_subcommand("compare", "Compare the inputs and taps of two golden files");
  compare_command->add_option("files", o.files, "The two golden files")->required()->expected(2);
  compare_command->add_option("--variant-a", o.variant_a,
                              "The first file's taps; float64 where it is there, else the first");
  compare_command->add_option("--variant-b", o.variant_b, "The same of the second file");
  for (CLI::App* c : {run_command, compare_command}) c->add_option("--json", o.json, "Write all rows to this file");

  if (const auto code = parse(app, argc, argv)) return *code;
  const std::string command = shell_command(argc, argv);
  if (*info_command) return info(o);
  if (*run_command) return run(o, command);
  return compare_files(o, command);
}

}  // namespace
}  // namespace cf::apps

int main(int argc, char** argv) {
  try {
    return cf::apps::main(argc, argv);
  } catch (const std::bad_alloc&) {
    return cf::apps::fail("not enough memory");
  }
}
