// cf-golden: looks into golden files, runs a backend against them, compares two of them.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/cli/options.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/table.hpp"
#include "apps/cli/terminal.hpp"
#include "apps/verify/golden_walk.hpp"
#include "apps/verify/model_walk.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "golden/checkpoint/checkpoint.hpp"
#include "golden/checkpoint/model_source.hpp"

namespace cf::apps {
namespace {

using golden::GoldenFile;
using golden::GoldenMeta;
using golden::VariantInfo;
using Json = nlohmann::ordered_json;

struct Options {
  std::vector<std::string> files;
  std::string backend = "cpu", impl = "unfused", site, model, json, variant_a, variant_b;
  std::optional<DType> dtype;
  bool isolated = false, chained = false, verbose = false;  // without --chained the walk is isolated

  bool cuda() const { return backend == "cuda"; }
};

void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

std::string scientific(double x) { return fmt::format("{:.1e}", x); }

std::string verdict(bool ok) { return ok ? "ok" : std::string(kFail); }

std::string summary(const GoldenFile& file) {
  const GoldenMeta& m = file.meta();
  return fmt::format("{}: {} layer {}, {}, batch {}, q_len {}, kv_len {}", file.path(), visible(m.model), m.layer,
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

/// The columns that the tables of run and compare share.
std::vector<std::string> error_headers() { return {"rel L2", "budget", "max abs", "worst at"}; }
std::vector<std::string> error_cells(const Comparison& e, double budget, const std::string& worst) {
  return {e.non_finite ? "nan" : scientific(e.rel_l2), scientific(budget), scientific(e.max_abs),
          e.max_abs > 0 || e.non_finite ? worst : "-"};
}

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b,
                                const std::vector<std::string>& c) {
  a.insert(a.end(), b.begin(), b.end());
  a.insert(a.end(), c.begin(), c.end());
  return a;
}

/// Refuses a report in the place of a file of the checkpoint that a golden file names.
template <class Meta>
Status check_report(const Options& o, const std::string& path, const Meta& m) {
  if (o.json.empty() || m.weights != "checkpoint") return {};
  return check_apart("--json", o.json, path + "'s weights",
                     (std::filesystem::path(path).parent_path() / m.weights_checkpoint).string());
}

Status write_json(const Options& o, const std::string& command, Json rows) {
  if (o.json.empty()) return {};
  const Json document{{"program", "cf-golden"}, {"commit", commit()}, {"command", command}, {"rows", std::move(rows)}};
  // A name from a file may not be UTF-8: its other bytes are replaced.
  return write_file_atomically(o.json, document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

/// The exit code of a comparison, or kBadInput where standard output cannot be written.
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

/// What every golden file says of its origin and its model; rows of its own kind come between.
void add_origin(const std::string& path, const golden::GoldenOrigin& m, const std::string& model, Table& attributes) {
  const ModelConfig& c = m.config;
  attributes.add({"file", path});
  attributes.add({"producer", m.producer});
  attributes.add({"command", m.command});
  attributes.add({"versions", m.versions});
  attributes.add({"model", model});
  attributes.add(
      {"sizes", fmt::format("hidden {}, heads {}, head_dim {}, rotary_dim {}, intermediate {}", c.hidden_size,
                            checkpoint::heads_of(c), c.head_dim(), c.rotary_dim, c.intermediate_size)});
  attributes.add(
      {"arithmetic", fmt::format("{}, {} residual, eps {:g}, rope theta {:g}", to_string(c.hidden_act),
                                 c.use_parallel_residual ? "parallel" : "sequential", c.layer_norm_eps, c.rope_theta) +
                         (c.rope_scaling == ops::RopeScaling{} ? "" : fmt::format(" / {:g}", c.rope_scaling.factor))});
  attributes.add({"dtype", std::string(to_string(m.dtype))});
  attributes.add({"seed", std::to_string(m.seed)});
  attributes.add({"weights", m.weights + (m.weights_checkpoint.empty() ? "" : ", " + m.weights_checkpoint)});
  attributes.add({"weights checksum", fmt::format("{:016x}", m.weights_checksum)});
}

/// Prints which variant has which tap, below the attributes.
int print_info(const Table& attributes, const std::vector<VariantInfo>& variants,
               const std::function<std::string(const std::string&)>& shape_of_tap) {
  attributes.print(stdout);
  std::vector<std::string> headers{"tap", "shape"}, taps;
  for (const VariantInfo& v : variants) {
    headers.push_back(fmt::format("{} ({}, {})", v.name, v.attn_implementation, v.device));
    for (const std::string& tap : v.taps)
      if (!std::count(taps.begin(), taps.end(), tap)) taps.push_back(tap);
  }
  Table table(headers);
  for (const std::string& tap : taps) {
    std::vector<std::string> row{tap, shape_of_tap(tap)};
    for (const VariantInfo& v : variants) row.push_back(std::count(v.taps.begin(), v.taps.end(), tap) ? "yes" : "");
    table.add(row);
  }
  print("\n");
  table.print(stdout);
  return finish(true);
}

int model_info(const std::string& path) {
  const Result<golden::ModelGolden> opened = golden::ModelGolden::open(path);
  if (!opened) return fail(opened.status());
  const golden::ModelGoldenMeta& m = opened->meta();
  Table attributes({"attribute", "value"});
  add_origin(path, m, fmt::format("{}, {} layers", m.model, m.config.num_hidden_layers), attributes);
  attributes.add({"vocab_size", std::to_string(m.config.vocab_size)});
  attributes.add({"ids", fmt::format("{} of the prompt, then {} greedy ones", m.prompt_len, m.tokens - m.prompt_len)});
  const std::string logits = m.top ? fmt::format("the {} largest, and the log of the sum", m.top) : std::string("all");
  attributes.add({"logits a position", logits});
  std::vector<VariantInfo> variants = opened->variants();
  for (VariantInfo& v : variants) v.taps.push_back("logits");
  return print_info(attributes, variants, [&](const std::string& tap) {
    return fmt::format("position={}, {}", m.fed(),
                       tap != "logits" ? fmt::format("i={}", m.config.hidden_size)
                       : m.top         ? fmt::format("rank={}", m.top)
                                       : fmt::format("id={}", m.config.vocab_size));
  });
}

int info(const Options& o) {
  const std::string& path = o.files.front();
  const Result<golden::GoldenSchema> schema = golden::golden_schema(path);
  if (!schema) return fail(schema.status());
  if (*schema == golden::GoldenSchema::model) return model_info(path);
  const Result<GoldenFile> opened = GoldenFile::open(path);
  if (!opened) return fail(opened.status());
  const GoldenMeta& m = opened->meta();
  std::string kv_len;
  for (std::int32_t n : m.kv_len) kv_len += (kv_len.empty() ? "" : ", ") + std::to_string(n);
  Table attributes({"attribute", "value"});
  add_origin(path, m, fmt::format("{}, layer {} of {}", m.model, m.layer, m.config.num_hidden_layers), attributes);
  attributes.add({"batch, q_len", fmt::format("{}, {}", m.load.batch, m.load.q_len)});
  attributes.add({"kv_len", kv_len});
  attributes.add({"cache", m.cache});
  return print_info(attributes, opened->variants(), [&](const std::string& tap) { return shape_of(m, tap); });
}

std::string variant_names(const std::vector<VariantInfo>& variants) {
  std::string names;
  for (const VariantInfo& v : variants) names += (names.empty() ? "" : ", ") + visible(v.name);
  return names.empty() ? "none" : names;
}

/// Refuses a file without the variant that run compares with.
Status check_reference(const std::string& path, const std::vector<VariantInfo>& variants) {
  if (std::ranges::count(variants, golden::kReference, &VariantInfo::name)) return {};
  return Status::error(Code::not_found,
                       fmt::format("{0}: expected the variant '{1}', which run compares with, got {2}; 'cf-golden "
                                   "compare {0} OTHER.h5' compares the taps of two files",
                                   path, golden::kReference, variant_names(variants)));
}

/// The smallest error of the producer's own runs in the file's dtype, or "-".
std::string producer_error(const std::vector<VariantInfo>& variants, DType stored, const TapResult& r) {
  double least = INFINITY;
  for (const VariantInfo& v : variants)
    if (const auto e = r.producer_rel_l2.find(v.name); e != r.producer_rel_l2.end() && v.dtype == to_string(stored))
      least = std::min(least, e->second);
  return std::isfinite(least) ? scientific(least) : "-";
}

/// The activations that --dtype accepts: on the CPU the oracle's and the float backend's, on a GPU those of its
/// kernels.
std::vector<DType> accepted_dtypes(const Options& o) {
  if (o.cuda()) return {DType::f16, DType::bf16, DType::f32};
  return {DType::f64, DType::f32};
}

/// The activations to walk a file with, whose stored dtype is `stored`.
std::vector<DType> chosen_dtypes(const Options& o, DType stored) {
  if (o.dtype) return {*o.dtype};
  return o.cuda() ? std::vector{stored} : accepted_dtypes(o);
}

std::string reproduce(const Options& o, const std::string& path, const TapResult& r) {
  std::vector<std::string> words{"cf-golden", "run",
                                 path,        "--site",
                                 r.site,      o.chained ? "--chained" : "--isolated",
                                 "--dtype",   std::string(to_string(r.dtype))};
  if (o.cuda()) words.insert(words.end(), {"--backend", o.backend, "--impl", o.impl});
  if (!o.model.empty()) words.insert(words.end(), {"--model", o.model});
  return "reproduce: " + shell_command(words) + "\n";
}

/// The name of a result in messages, "x.h5, attention.context, float32".
std::string name_of(const std::string& path, const TapResult& r) {
  return fmt::format("{}, {}, {}", path, visible(r.tap), to_string(r.dtype));
}

std::string failure(const std::string& path, const TapResult& r) {
  const std::string error = r.error.non_finite ? fmt::format("{} elements are not finite", r.error.non_finite)
                                               : fmt::format("rel L2 {:.2e}, budget {:.2e}", r.error.rel_l2, r.budget);
  return fmt::format("{} {}: {}, worst at {}\n", in_colour(kFail, stdout), name_of(path, r), error, r.worst);
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

/// What the last line of a run says of all files.
class Summary {
 public:
  void add(const std::string& path, const TapResult& r) {
    ++taps_;
    failed_ += !r.ok();
    if (worst_.empty() || r.error_over_budget() > worst_ratio_) {
      worst_ratio_ = r.error_over_budget();
      worst_ = name_of(path, r);
    }
  }
  /// Counts a failure that no tap shows.
  void fail() { failed_ += 1; }
  bool passed() const { return failed_ == 0; }
  std::string line(std::size_t files) const {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start_;
    return fmt::format("{} file{}, {} taps compared, {} failed, worst error/budget {:.2g} at {}, {:.1f} s\n", files,
                       files == 1 ? "" : "s", taps_, failed_, worst_ratio_, worst_, seconds.count());
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::int64_t taps_ = 0, failed_ = 0;
  double worst_ratio_ = 0;
  std::string worst_;
};

/// Adds a walk's taps to the rows and the summary, and prints what failed, with --verbose a table under `title`.
/// `command` repeats what failed.
void report_taps(const Options& o, const std::string& path, const std::vector<TapResult>& results,
                 const std::vector<VariantInfo>& variants, DType stored, const std::string& title,
                 const std::function<std::string(const TapResult&)>& command, Json& rows, Summary& summary_of_all) {
  Table table(joined({"tap"}, error_headers(), {"HF", "verdict"}));
  std::string failures, last_command;
  for (const TapResult& r : results) {
    table.add(joined({r.tap}, error_cells(r.error, r.budget, r.worst),
                     {producer_error(variants, stored, r), verdict(r.ok())}));
    rows.push_back(row_json(path, o, r));
    summary_of_all.add(path, r);
    if (r.ok()) continue;
    failures += failure(path, r);
    // Several taps of one site fail with the same command, which is printed once.
    if (const std::string repeats = command(r); repeats != last_command) failures += last_command = repeats;
  }
  if (o.verbose) {
    print("## " + title + "\n\n");
    table.print(stdout);
    print("\n");
  }
  print(failures);
  std::fflush(stdout);
}

/// The same for a file of a whole model.
Status run_model_file(const Options& o, const std::string& path, Json& rows, Summary& summary_of_all) {
  if (o.impl == "layer" || !o.site.empty() || o.isolated)
    return Status::error(Code::invalid_argument,
                         path +
                             ": a whole model's file is run from its ids on: expected no --impl layer, --site or "
                             "--isolated");
  CF_TRY_ASSIGN(const golden::ModelGolden file, golden::ModelGolden::open(path));
  CF_TRY(check_reference(path, file.variants()));
  CF_TRY(check_report(o, path, file.meta()));
  CF_TRY_ASSIGN(const golden::GoldenModelWeights weights, file.weights(o.model));
  print_notes(weights.notes);
  const golden::ModelGoldenMeta& m = file.meta();
  const Backend backend = o.cuda() ? Backend::cuda : Backend::cpu;
  for (DType dtype : chosen_dtypes(o, m.dtype)) {
    CF_TRY_ASSIGN(const ModelWalk walk, walk_model(file, weights, {.backend = backend, .activation = dtype}));
    const std::string same = fmt::format("{} of {} greedy ids are the file's{}", walk.same, walk.chosen,
                                         walk.excused ? fmt::format(", {} as close as the bound", walk.excused) : "");
    std::vector<std::string> words{"cf-golden", "run", path, "--dtype", std::string(to_string(dtype))};
    if (o.cuda()) words.insert(words.end(), {"--backend", o.backend});
    if (!o.model.empty()) words.insert(words.end(), {"--model", o.model});
    const std::string repeats = "reproduce: " + shell_command(words) + "\n";
    report_taps(
        o, path, walk.taps, file.variants(), m.dtype,
        fmt::format("{}: {} of {} layers, {} ids, {} backend, {} activations; {}", path, visible(m.model),
                    m.config.num_hidden_layers, m.tokens, o.backend, to_string(dtype), same),
        [&](const TapResult&) { return repeats; }, rows, summary_of_all);
    if (walk.same + walk.excused < walk.chosen) {
      summary_of_all.fail();
      print(fmt::format("{} {}, {}: {}\n{}", in_colour(kFail, stdout), path, to_string(dtype), same, repeats));
    }
  }
  return {};
}

/// Walks one file in every chosen dtype, prints what failed, and adds every tap to the rows and the summary.
Status run_file(const Options& o, const std::string& path, Json& rows, Summary& summary_of_all) {
  CF_TRY_ASSIGN(const golden::GoldenSchema schema, golden::golden_schema(path));
  if (schema == golden::GoldenSchema::model) return run_model_file(o, path, rows, summary_of_all);
  CF_TRY_ASSIGN(const GoldenFile file, GoldenFile::open(path));
  CF_TRY(check_reference(path, file.variants()));
  WalkOptions walk{.backend = o.cuda() ? Backend::cuda : Backend::cpu,
                   .isolated = !o.chained,
                   .site = o.site,
                   .impl = o.impl == "layer" ? WalkImpl::layer : WalkImpl::unfused};
  CF_TRY(check_taps(file, walk));
  CF_TRY(check_report(o, path, file.meta()));
  CF_TRY_ASSIGN(const golden::GoldenWeights weights, file.weights(o.model));
  print_notes(weights.notes);
  for (DType dtype : chosen_dtypes(o, file.meta().dtype)) {
    walk.activation = dtype;
    CF_TRY_ASSIGN(const auto results, walk_golden(file, weights, walk));
    report_taps(
        o, path, results, file.variants(), file.meta().dtype,
        fmt::format("{}, {}, {} backend, {}, {} activations", summary(file), o.chained ? "chained" : "isolated",
                    o.backend, o.impl, to_string(dtype)),
        [&](const TapResult& r) { return reproduce(o, path, r); }, rows, summary_of_all);
  }
  return {};
}

int run(const Options& o, const std::string& command) {
  if (const Status s = cpu_ref::start_threads("OMP_NUM_THREADS", omp_get_max_threads()); !s) return fail(s);
  Json rows = Json::array();
  Summary summary_of_all;
  for (const std::string& path : o.files)
    if (const Status s = run_file(o, path, rows, summary_of_all); !s) return fail(s);
  print(summary_of_all.line(o.files.size()));
  if (const Status s = write_json(o, command, std::move(rows)); !s) return fail(s);
  return finish(summary_of_all.passed());
}

/// The variant of that name. Without a name, the reference, or the first variant of a file without it.
Result<VariantInfo> choose_variant(const GoldenFile& file, const std::string& name) {
  for (const VariantInfo& v : file.variants())
    if (v.name == (name.empty() ? golden::kReference : std::string_view(name))) return v;
  if (name.empty() && !file.variants().empty()) return file.variants().front();
  return Status::error(Code::not_found, fmt::format("{}: expected the variant '{}', got {}", file.path(),
                                                    name.empty() ? golden::kReference : std::string_view(name),
                                                    variant_names(file.variants())));
}

DType coarser(DType a, DType b) { return unit_roundoff(a) < unit_roundoff(b) ? b : a; }

/// What two runs in a dtype may differ by. Each site sums at most as many terms as the layer's longest reduction has,
/// in that dtype or, for a 16-bit dtype, in float32, and stores its result once. The sites' errors are independent and
/// add in quadrature.
double compare_budget(DType dtype, const GoldenMeta& m) {
  const DType compute = size_bytes(dtype) < size_bytes(DType::f32) ? DType::f32 : dtype;
  const std::int64_t longest = std::max({m.config.hidden_size, m.config.intermediate_size, m.load.kv_len});
  return std::sqrt(double(names_of(m.config).sites().size())) * reduction_budget(longest, {compute, dtype}, {}).rel_l2;
}

/// What an input may differ by. In one dtype both files hold the same bits, in two dtypes one rounding is between them.
/// cos and sin are computed in float32 by each file's producer.
double input_budget(std::string_view name, DType a, DType b) {
  if (name == "cos" || name == "sin") return kTableBudget;
  return a == b ? 0 : unit_roundoff(coarser(a, b));
}

/// The dimensions of a tensor that is no tap: i, j, k and so on.
std::vector<golden::TapDim> plain_dims(const Shape& shape) {
  constexpr std::string_view names[] = {"i", "j", "k", "l", "m", "n"};
  std::vector<golden::TapDim> dims;
  for (std::size_t d = 0; d < shape.size(); ++d) dims.push_back({d < std::size(names) ? names[d] : "?", shape[d]});
  return dims;
}

/// A tensor of two files, compared.
struct Difference {
  std::string tensor, dtypes, worst;
  Comparison error;
  double budget;
  bool ok() const { return error.non_finite == 0 && error.rel_l2 <= budget; }
};

Status add_difference(const std::string& name, const Result<Tensor>& a, const Result<Tensor>& b,
                      std::vector<golden::TapDim> dims, double budget, std::vector<Difference>& out) {
  CF_TRY(a.status());
  CF_TRY(b.status());
  const Result<Comparison> c = compare(*a, *b);
  if (!c) return Status::error(c.status().code(), name + ": " + c.status().message());
  if (dims.empty()) dims = plain_dims(a->shape());
  out.push_back({name, fmt::format("{}, {}", to_string(a->dtype()), to_string(b->dtype())),
                 a->size() ? name_coordinate(dims, c->worst) : "", *c, budget});
  return {};
}

/// A comma list of the inputs, the weights included, that differ between two files; empty where none does.
std::string differing_inputs(const GoldenMeta& a, const GoldenMeta& b, const std::vector<Difference>& inputs) {
  std::string names = a.weights_checksum == b.weights_checksum ? "" : "weights";
  for (const Difference& d : inputs)
    if (!d.ok()) names += (names.empty() ? "" : ", ") + d.tensor;
  return names;
}

int compare_files(const Options& o, const std::string& command) {
  const Result<GoldenFile> a = GoldenFile::open(o.files[0]), b = GoldenFile::open(o.files[1]);
  for (const auto* file : {&a, &b})
    if (!*file) return fail(file->status());
  const Result<VariantInfo> va = choose_variant(*a, o.variant_a), vb = choose_variant(*b, o.variant_b);
  for (const auto* variant : {&va, &vb})
    if (!*variant) return fail(variant->status());
  const GoldenMeta& m = a->meta();
  const DType dtype = coarser(*dtype_from_string(va->dtype), *dtype_from_string(vb->dtype));
  const auto fail_of_both = [&](const Status& s) {
    return fail(fmt::format("{} and {}: {}", a->path(), b->path(), s.message()));
  };

  std::vector<Difference> differences;
  for (const char* name : {"hidden", "kv_len", "positions", "cos", "sin", "k_cache", "v_cache"}) {
    if (m.config.rotary_dim == 0 && (name == std::string("cos") || name == std::string("sin"))) continue;
    const Result<Tensor> ta = a->input(name), tb = b->input(name);
    const double budget = ta && tb ? input_budget(name, ta->dtype(), tb->dtype()) : 0;
    if (const Status s = add_difference(fmt::format("inputs/{}", name), ta, tb, {}, budget, differences); !s)
      return fail_of_both(s);
  }
  const std::string inputs = differing_inputs(m, b->meta(), differences);
  std::string lonely;
  for (const std::string& tap : va->taps) {
    if (!std::count(vb->taps.begin(), vb->taps.end(), tap)) {
      lonely += fmt::format("only in {}: {}\n", a->path(), visible(tap));
      continue;
    }
    if (const Status s = add_difference(tap, a->tap(va->name, tap), b->tap(vb->name, tap),
                                        golden::tap_dims(m.config, m.load, tap), compare_budget(dtype, m), differences);
        !s)
      return fail_of_both(s);
  }
  for (const std::string& tap : vb->taps)
    if (!std::count(va->taps.begin(), va->taps.end(), tap))
      lonely += fmt::format("only in {}: {}\n", b->path(), visible(tap));

  bool passed = true;
  Json rows = Json::array();
  Table table(joined({"tensor"}, error_headers(), {"verdict"}));
  for (const Difference& d : differences) {
    passed = passed && d.ok();
    table.add(joined({d.tensor}, error_cells(d.error, d.budget, d.worst), {verdict(d.ok())}));
    Json row{{"tensor", d.tensor}, {"dtypes", d.dtypes}};
    row.update(error_json(d.error));
    row.update({{"worst_at", d.worst}, {"budget", d.budget}, {"ok", d.ok()}});
    rows.push_back(std::move(row));
  }
  print(fmt::format("## {} ({}) against {} ({})\n\n- {}\n- {}\n", a->path(), visible(va->name), b->path(),
                    visible(vb->name), summary(*a), summary(*b)));
  if (!inputs.empty())
    print(fmt::format("- the inputs already differ, so the taps are expected to differ, too: {}\n", inputs));
  print("\n");
  table.print(stdout);
  print("\n" + lonely);
  if (!passed)
    print("reproduce: " +
          shell_command({"cf-golden", "compare", a->path(), b->path(), "--variant-a", visible(va->name), "--variant-b",
                         visible(vb->name)}) +
          "\n");
  if (const Status s = write_json(o, command, std::move(rows)); !s) return fail(s);
  return finish(passed);
}

/// Says in --help what the columns of a command's tables are. `more` are columns of that command alone.
void explain_table(CommandLine& line, const std::string& title, const std::vector<HelpSection::Entry>& more) {
  HelpSection columns{.title = title,
                      .entries = {{"rel L2", "||got - reference|| / ||reference||"},
                                  {"budget", "The largest rel L2 that passes"},
                                  {"max abs", "The largest |got - reference|"},
                                  {"worst at", "The element of max abs, or the first one that is not finite"}}};
  columns.entries.insert(columns.entries.end(), more.begin(), more.end());
  columns.entries.push_back({"verdict", "ok or FAIL"});
  line.section(std::move(columns));
  line.notes("--json holds more of every row: float16 ULPs, the mean signed error, the values at the worst element.");
  line.notes("Exit code 0: all passed; 1: a comparison failed; 2: bad usage or input.");
}

std::vector<std::string> site_names() {
  std::vector<std::string> names;
  for (const FamilySpec* family : kFamilies)
    for (const Site& s : family->names.sites())
      if (!std::count(names.begin(), names.end(), s.name)) names.emplace_back(s.name);
  return names;
}

int main(int argc, char** argv) {
  Options o;
  CommandLine line("Looks into golden files, runs a backend against them, compares two of them.",
                   std::string("cf-golden ") + CF_VERSION);
  line.example("What a file holds", "cf-golden info data/golden/neox-d80-kv17-b3.h5");
  line.example("Compare the CPU backend with Hugging Face", "cf-golden run data/golden/neox-d80-kv17-b*.h5");

  CommandLine& info_line = line.subcommand("info", "Print what a golden file holds");
  info_line.group("Arguments");
  info_line.files("file", o.files, 1, 1, "The golden file");
  info_line.example("A layer's file", "cf-golden info data/golden/neox-d80-kv17-b3.h5");
  info_line.example("A whole model's file", "cf-golden info data/golden_model/neox-d80-16.h5");

  CommandLine& run_line = line.subcommand("run", "Run a backend site by site and compare it with the files' taps");
  run_line.group("Arguments");
  run_line.files("files", o.files, 1, CommandLine::kMany, "Golden files");
  run_line.group("Backend");
  run_line.choice("--backend,--device", o.backend, {"cpu", "cuda"}, "What runs the sites");
  run_line.choice("--impl", o.impl, {"unfused", "layer"},
                  "An op a site, or the layer by the persistent kernel (with --backend cuda --chained)");
  run_line.dtype("--dtype", o.dtype, {DType::f16, DType::bf16, DType::f32, DType::f64},
                 "Activations, when left out float64 (the oracle) and float32 on the CPU, the file's dtype on a GPU");
  run_line.text("--model", o.model, "Take the weights from this checkpoint directory", "DIR");
  run_line.reads("--model");
  run_line.group("Walk");
  run_line.choice("--site", o.site, site_names(), "This site alone");
  run_line.flag("--isolated", o.isolated, "Feed every site the file's tensors: names the guilty site (default)");
  run_line.flag("--chained", o.chained, "Feed the first site alone: shows how errors add up");
  run_line.group("Output");
  run_line.flag("-v,--verbose", o.verbose, "Print a table of all taps a file and dtype");
  run_line.excludes("--isolated", "--chained");
  run_line.check([&](Faults& faults) {
    const std::vector<DType> dtypes = accepted_dtypes(o);
    if (o.dtype && std::find(dtypes.begin(), dtypes.end(), *o.dtype) == dtypes.end())
      faults.expected("--dtype", fmt::format("{} with --backend {}", list_of(dtypes), o.backend), to_string(*o.dtype));
    if (o.impl == "layer" && !(o.cuda() && o.chained))
      faults.add("--impl layer: expected with --backend cuda and --chained");
    faults.add(choose_backend(o.backend).status());
  });
  run_line.notes("Prints a line for each tap that fails, the command that repeats it, and one line for all files.");
  explain_table(run_line, "Columns of --verbose, whose reference is Hugging Face in float64",
                {{"HF", "The smallest rel L2 of Hugging Face's own runs in the file's dtype; - without such a run"}});
  run_line.example("A table of all taps of a file", "cf-golden run -v data/golden/neox-d80-kv17-b3.h5");
  run_line.example("One site of several files",
                   "cf-golden run --site attention.context data/golden/neox-d80-kv17-b*.h5");

  CommandLine& compare_line = line.subcommand("compare", "Compare the inputs and taps of two golden files");
  compare_line.group("Arguments");
  compare_line.files("files", o.files, 2, 2, "The two golden files");
  compare_line.group("Taps");
  compare_line.text("--variant-a", o.variant_a, "The first file's taps; float64 where the file has it, else its first",
                    "NAME");
  compare_line.text("--variant-b", o.variant_b, "The same of the second file", "NAME");
  explain_table(compare_line, "Columns, whose reference is the second file", {});
  compare_line.example("Hugging Face's float16 against its float64",
                       "cf-golden compare --variant-a float16_eager \\\n"
                       "      data/golden/neox-d80-kv17-b3.h5 data/golden/neox-d80-kv17-b3.h5");
  compare_line.example("Two files that cf-layer --dump wrote", "cf-golden compare cpu.h5 gpu.h5");

  for (CommandLine* c : {&run_line, &compare_line})
    c->group("Output"), c->output("--json", o.json, "Write all rows to this file");

  if (const auto exit_code = line.parse(argc, argv)) return *exit_code;
  const std::string command = shell_command(argc, argv);
  if (info_line.chosen()) return info(o);
  if (run_line.chosen()) return run(o, command);
  return compare_files(o, command);
}

}  // namespace
}  // namespace cf::apps

int main(int argc, char** argv) {
  cf::checkpoint::guard_mapped_files();
  return cf::apps::run_main([&] { return cf::apps::main(argc, argv); });
}
