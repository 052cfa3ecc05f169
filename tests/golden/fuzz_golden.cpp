// Golden files with random changes, from fixed seeds. Nothing crashes or hangs; a refusal is one line that names the
// file; an accepted file can be loaded and run.
#include <omp.h>

#include <cstring>
#include <random>

#include "tests/checkpoint/reader_invariants.hpp"
#include "tests/golden/golden_sample.hpp"
#include "tests/golden/model_sample.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::test;
using golden::GoldenFile;
using golden::ModelGolden;

namespace {

using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t n) { return std::size_t(random() % n); }

/// A number at the edge of what a field may hold, or any number.
std::int64_t odd_integer(Random& random) {
  constexpr std::int64_t edges[] = {
      0, 1, -1, 2, 3, 5, 63, 64, 65, 1 << 24, (1 << 24) + 1, 1 << 30, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
  return below(random, 3) ? edges[below(random, std::size(edges))] : std::int64_t(random());
}

/// Changes a file behind its seal, and seals it again: what a reader meets that trusts the seal.
class Reseal {
 public:
  explicit Reseal(std::string whole) : whole_(std::move(whole)) {
    for (std::size_t at = kBegin; at + 8 <= whole_.size(); at += 8) {
      const std::string_view word(&whole_[at], 8);
      if (word != std::string_view("\0\0\0\0\0\0\0\0", 8)) words_.push_back(at);
      for (const char* signature : {"TREE", "HEAP", "SNOD", "GCOL", "\x89HDF"})
        if (word.starts_with(signature)) structures_.push_back(at);
    }
  }

  std::string changed(Random& random) const {
    std::string bytes = whole_;
    for (std::size_t n = below(random, 4) + 1; n > 0; --n) change(random, bytes);
    seal(bytes);
    return bytes;
  }

 private:
  static constexpr std::size_t kBegin = 512;  // behind the seal

  /// Any byte, a word that is not zero, or a place near the start of one of HDF5's structures.
  std::size_t place(Random& random) const {
    switch (below(random, 3)) {
      case 0: return kBegin + below(random, whole_.size() - kBegin);
      case 1: return words_[below(random, words_.size())] + (below(random, 2) ? 0 : below(random, 8));
      default: return structures_[below(random, structures_.size())] + below(random, 64);
    }
  }

  void put(std::string& bytes, std::size_t at, const void* from, std::size_t count) const {
    if (at < bytes.size()) std::memcpy(&bytes[at], from, std::min(count, bytes.size() - at));
  }

  void change(Random& random, std::string& bytes) const {
    const std::size_t at = place(random);
    switch (below(random, 8)) {
      case 0: {
        if (at < bytes.size()) bytes[at] = char(bytes[at] ^ (1 << below(random, 8)));
        break;
      }
      case 1: {
        const char byte = char(random());
        put(bytes, at, &byte, 1);
        break;
      }
      case 2:
      case 3: {  // a word, such as an address or a length, by one from elsewhere in the file or from its end
        std::uint64_t word = std::uint64_t(odd_integer(random));
        if (below(random, 2)) std::memcpy(&word, &whole_[words_[below(random, words_.size())]], 8);
        if (below(random, 4) == 0) word = whole_.size() - kBegin - below(random, 600);
        put(bytes, at / 8 * 8, &word, 8);
        break;
      }
      case 4: {  // the address of a structure
        const std::uint64_t word = structures_[below(random, structures_.size())] - kBegin;
        put(bytes, at / 8 * 8, &word, 8);
        break;
      }
      case 5: {
        const std::uint64_t number = std::uint64_t(odd_integer(random));
        put(bytes, at, &number, below(random, 2) ? 2 : 4);
        break;
      }
      case 6: put(bytes, at, &whole_[words_[below(random, words_.size() / 2)]], below(random, 64) + 1); break;
      default: {
        if (below(random, 4))
          bytes.replace(std::min(at, bytes.size() - 1), below(random, 64), below(random, 64), char(random()));
        else
          bytes.resize(std::max(kBegin + 1, at));
      }
    }
  }

  std::string whole_;
  std::vector<std::size_t> words_, structures_;
};

/// Changes a file and its seal, without sealing it again.
void damage_bytes(Random& random, std::string& bytes) {
  switch (below(random, 6)) {
    case 0: bytes.resize(below(random, bytes.size())); break;
    case 1: bytes.append(1 + below(random, 600), char(random())); break;
    case 2: bytes[below(random, bytes.size())] ^= char(1 << below(random, 8)); break;
    case 3: bytes.erase(below(random, bytes.size()), 1 + below(random, 16)); break;
    case 4: bytes.insert(below(random, bytes.size()), 1 + below(random, 16), char(random())); break;
    default:
      for (std::size_t i = below(random, 64) + 1, at = below(random, bytes.size() - 64); i > 0; --i)
        bytes[at + i] = char(random());
  }
}

template <class Map>
auto any_of(Random& random, Map& map) {
  return std::next(map.begin(), std::ptrdiff_t(below(random, map.size())));
}

std::map<std::string, Tensor> clone(const std::map<std::string, Tensor>& tensors) {
  std::map<std::string, Tensor> copy;
  for (const auto& [name, tensor] : tensors) copy[name] = tensor.clone();
  return copy;
}

/// What a writer reads of a sample.
GoldenSample clone(const GoldenSample& s) {
  GoldenSample copy{.meta = s.meta,
                    .inputs = clone(s.inputs),
                    .weights = clone(s.weights),
                    .taps = {},
                    .variants = s.variants,
                    .layer = {}};
  for (const auto& [variant, taps] : s.taps) copy.taps[variant] = clone(taps);
  return copy;
}

void change_tensor(Random& random, std::map<std::string, Tensor>& tensors) {
  if (tensors.empty()) return;
  const auto it = any_of(random, tensors);
  Tensor& t = it->second;
  constexpr DType dtypes[] = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32};
  switch (below(random, 5)) {
    case 0: tensors.erase(it); break;
    case 1: t = Tensor(dtypes[below(random, std::size(dtypes))], t.shape()); break;
    case 2: {
      Shape shape = t.shape();
      if (shape.empty() || below(random, 4) == 0)
        shape.push_back(1 + std::int64_t(below(random, 3)));
      else if (below(random, 4) == 0)
        shape.pop_back();
      else
        shape[below(random, shape.size())] = std::int64_t(below(random, 70));
      t = Tensor(t.dtype(), shape);
      break;
    }
    default:
      // Any bits at all: NaNs and infinities among the floats, anything among the lengths.
      for (std::size_t n = below(random, 8) + 1; n > 0 && t.size() > 0; --n)
        static_cast<char*>(t.data())[below(random, std::size_t(t.size_bytes()))] = char(random());
  }
}

void change_text(Random& random, std::string& text) {
  constexpr std::string_view words[] = {"", "none", "stored", "float16", "float64", "procedural", "\xff\n\x1b", "{}"};
  if (text.empty() || below(random, 3) == 0)
    text = words[below(random, std::size(words))];
  else
    text[below(random, text.size())] = char(random());
}

/// Puts an odd number into one of the config's fields, which hold these numbers.
void change_config(Random& random, std::string& config, const std::vector<std::string_view>& fields) {
  const std::string_view field = fields[below(random, fields.size())];
  const std::size_t at = config.find(field);
  if (at != std::string::npos)
    config.replace(at, field.size(),
                   std::string(field.substr(0, field.find(':') + 1)) + std::to_string(odd_integer(random)));
}

/// Changes one thing that the schema speaks of.
void change_content(Random& random, GoldenSample& s) {
  golden::GoldenMeta& m = s.meta;
  switch (below(random, 12)) {
    case 0: m.layer = odd_integer(random); break;
    case 1: m.load.batch = odd_integer(random); break;
    case 2: m.load.q_len = odd_integer(random); break;
    case 3: m.seed = random(); break;
    case 4: change_text(random, below(random, 2) ? m.cache : m.weights); break;
    case 5: (below(random, 2) ? m.cache_checksum : m.weights_checksum) ^= random(); break;
    case 6:
      change_config(random, m.config_json,
                    {"\"hidden_size\": 32", "\"num_attention_heads\": 4", "\"intermediate_size\": 48",
                     "\"max_position_embeddings\": 64", "\"num_hidden_layers\": 2"});
      break;
    case 7: change_text(random, m.config_json); break;
    case 8: {
      golden::VariantInfo& v = any_of(random, s.variants)->second;
      change_text(random, below(random, 2) ? v.dtype : v.device);
      break;
    }
    case 9: change_tensor(random, s.taps.begin()->second); break;
    case 10: change_tensor(random, s.weights); break;
    default: change_tensor(random, s.inputs);
  }
}

/// Loads and runs an accepted file as the programs do. Empty, or what is wrong with it.
std::string use_fault(const GoldenFile& file, const std::string& path) {
  const golden::GoldenMeta& m = file.meta();
  if (const Status s = m.config.validate(); !s) return s.message();
  if (m.load.batch < 1 || m.load.q_len < 1 || m.load.kv_len > m.config.max_position_embeddings) return "sizes";
  for (std::int32_t n : m.kv_len)
    if (n < m.load.q_len || n > m.load.kv_len) return "kv_len";
  for (const golden::VariantInfo& v : file.variants())
    for (const std::string& tap : v.taps)
      if (const auto t = file.tap(v.name, tap); !t) return message_fault(t.status(), path);
  // A file may ask for a step of 2^33 elements: only small ones are run here.
  if (m.config.layer_parameters() > 1 << 20 || m.config.max_position_embeddings > 4096) return "";
  for (const char* name : {"hidden", "kv_len", "positions", "cos", "sin", "k_cache", "v_cache"})
    if (const auto t = file.input(name); !t) return message_fault(t.status(), path);
  LayerState state(m.config, m.load, DType::f32);
  if (const Status s = file.load(state); !s) return message_fault(s, path);
  // Its checkpoint lies where the file says, which may be anywhere.
  if (m.weights == "checkpoint") return "";
  const auto weights = file.weights();
  if (!weights) return message_fault(weights.status(), path);
  const auto rows = apps::walk_golden(file, *weights, {.activation = DType::f32});
  return rows ? "" : message_fault(rows.status(), path);
}

ModelSample clone(const ModelSample& s) {
  ModelSample copy{.meta = s.meta,
                   .ids = s.ids.clone(),
                   .inputs = clone(s.inputs),
                   .logits = clone(s.logits),
                   .top = {},
                   .taps = {},
                   .variants = s.variants};
  for (const auto& [variant, top] : s.top)
    copy.top[variant] = {top.ids.clone(), top.values.clone(), top.log_sum_exp.clone()};
  for (const auto& [variant, taps] : s.taps) copy.taps[variant] = clone(taps);
  return copy;
}

/// Changes a tensor that is in no map; it may be lost.
void change_tensor(Random& random, Tensor& t) {
  std::map<std::string, Tensor> alone;
  alone["t"] = std::move(t);
  change_tensor(random, alone);
  t = alone.empty() ? Tensor(DType::i32, {0}) : std::move(alone["t"]);
}

void change_content(Random& random, ModelSample& s) {
  golden::ModelGoldenMeta& m = s.meta;
  switch (below(random, 10)) {
    case 0: m.prompt_len = odd_integer(random); break;
    case 1: m.seed = random(); break;
    case 2: change_text(random, below(random, 2) ? m.weights : m.config_json); break;
    case 3: m.weights_checksum ^= random(); break;
    case 4:
      change_config(random, m.config_json,
                    {"\"hidden_size\": 16", "\"num_attention_heads\": 2", "\"vocab_size\": 20",
                     "\"max_position_embeddings\": 16", "\"num_hidden_layers\": 2"});
      break;
    case 5: {
      golden::VariantInfo& v = any_of(random, s.variants)->second;
      change_text(random, below(random, 2) ? v.dtype : v.device);
      break;
    }
    case 6: change_tensor(random, s.ids); break;
    case 7: change_tensor(random, any_of(random, s.taps)->second); break;
    case 8: change_tensor(random, s.inputs); break;
    default: {
      if (s.top.empty()) return change_tensor(random, s.logits);
      golden::TopLogits& top = any_of(random, s.top)->second;
      Tensor* const parts[] = {&top.ids, &top.values, &top.log_sum_exp};
      change_tensor(random, *parts[below(random, std::size(parts))]);
    }
  }
}

/// Reads all of an accepted file. Returns what is wrong with it, or an empty text.
std::string use_fault(const ModelGolden& file, const std::string& path) {
  const golden::ModelGoldenMeta& m = file.meta();
  if (const Status s = m.config.validate(); !s) return s.message();
  if (m.tokens < 2 || m.fed() > m.config.max_position_embeddings || m.prompt_len < 1 || m.prompt_len >= m.tokens ||
      m.top < 0 || m.top > m.config.vocab_size)
    return "sizes";
  const auto ids = file.ids();
  if (!ids) return message_fault(ids.status(), path);
  for (std::int64_t i = 0; i < ids->size(); ++i)
    if (const std::int32_t id = ids->as<std::int32_t>()[i]; id < 0 || id >= m.config.vocab_size) return "ids";
  for (const char* name : {"cos", "sin"})
    if (const auto t = file.input(name); !t || t->shape() != Shape{m.fed(), m.config.rotary_dim / 2}) return "inputs";
  for (const golden::VariantInfo& v : file.variants()) {
    const DType dtype = *dtype_from_string(v.dtype);
    if (m.top == 0) {
      const auto t = file.logits(v.name);
      if (!t || t->dtype() != dtype || t->shape() != Shape{m.fed(), m.config.vocab_size}) return "logits";
    } else {
      const auto t = file.top_logits(v.name);
      if (!t || t->values.dtype() != dtype || t->values.shape() != Shape{m.fed(), m.top}) return "top logits";
      for (std::int64_t i = 0; i < t->ids.size(); ++i)
        if (const std::int32_t id = t->ids.as<std::int32_t>()[i]; id < 0 || id >= m.config.vocab_size) return "top ids";
    }
    for (const std::string& tap : v.taps)
      if (const auto t = file.tap(v.name, tap); !t || t->shape() != Shape{m.fed(), m.config.hidden_size}) return tap;
  }
  // A file may ask for 2^34 parameters, and its checkpoint may lie anywhere.
  if (m.config.num_parameters() > 1 << 20 || m.weights == "checkpoint") return "";
  const auto weights = file.weights();
  return weights ? "" : message_fault(weights.status(), path);
}

/// Opens as File each of the files that `changed` makes of a seed, and uses it. Returns how many were accepted.
template <class File, class Changed>
int accepted_of(int rounds, const std::string& path, Changed&& changed) {
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < std::uint64_t(rounds); ++seed) {
    Random random(seed);
    if (!changed(random)) continue;
    CAPTURE(seed);
    const auto file = File::open(path);
    accepted += bool(file);
    REQUIRE((file ? use_fault(*file, path) : message_fault(file.status(), path)) == "");
  }
  return accepted;
}

/// How many files of a sample with damaged bytes are accepted.
template <class File, class Sample>
int accepted_damaged(const Sample& sample) {
  const TempDir dir;
  const std::string path = dir / "x.h5";
  check_ok(write_sample(sample, path));
  const std::string whole = read_file(path);
  return accepted_of<File>(2000, path, [&](Random& random) {
    std::string bytes = whole;
    damage_bytes(random, bytes);
    write_file(path, bytes);
    return bytes != whole;
  });
}

}  // namespace

TEST_CASE("no golden file with damaged bytes is accepted") {
  CHECK(accepted_damaged<GoldenFile>(make_sample({.cache = "procedural", .weights = "procedural"})) == 0);
  CHECK(accepted_damaged<ModelGolden>(make_model_sample()) == 0);
  CHECK(accepted_damaged<ModelGolden>(make_model_sample({.top = 3})) == 0);
}

TEST_CASE("a golden file changed behind a valid seal is refused, or of use") {
  omp_set_num_threads(1);  // the layers are tiny
  const TempDir dir;
  const std::string path = dir / "x.h5", old = CF_DATA_DIR "/../tests/golden/schema_1/";
  std::vector<Reseal> files;
  for (const SampleOptions& options : {SampleOptions{.cache = "procedural", .weights = "procedural"},
                                       SampleOptions{.dtype = DType::bf16}, SampleOptions{.q_len = 2}}) {
    check_ok(write_sample(make_sample(options), path));
    files.emplace_back(read_file(path));
  }
  for (const char* name : {"layer.h5", "neox-bf16-kv1-b1.h5"}) files.emplace_back(read_file(old + name));

  std::vector<Reseal> models;
  for (const ModelSampleOptions& options : {ModelSampleOptions{}, ModelSampleOptions{.dtype = DType::bf16, .top = 3}}) {
    check_ok(write_sample(make_model_sample(options), path));
    models.emplace_back(read_file(path));
  }

  constexpr int rounds = 800;
  for (std::size_t f = 0; f < files.size() + models.size(); ++f) {
    const bool of_layer = f < files.size();
    const Reseal& file = of_layer ? files[f] : models[f - files.size()];
    const auto change = [&](Random& random) {
      write_file(path, file.changed(random));
      return true;
    };
    CAPTURE(f);
    const int accepted =
        of_layer ? accepted_of<GoldenFile>(rounds, path, change) : accepted_of<ModelGolden>(rounds, path, change);
    // Some changes hit data or spare room, and most do not.
    CHECK(accepted > rounds / 20);
    CHECK(accepted < rounds * 3 / 4);
  }
}

TEST_CASE("a change of stored data behind a valid seal is read as it is") {
  const TempDir dir;
  const GoldenSample s = make_sample();
  check_ok(write_sample(s, dir / "x.h5"));
  const std::string whole = read_file(dir / "x.h5");
  for (const char* name : {"hidden", "k_cache"}) {
    const Tensor& stored = s.inputs.at(name);
    const std::string_view data(static_cast<const char*>(stored.data()), std::size_t(stored.size_bytes()));
    const std::size_t at = whole.find(data);
    REQUIRE(at != whole.npos);
    for (const std::size_t byte : {std::size_t{0}, data.size() / 2, data.size() - 1}) {
      std::string changed = whole;
      changed[at + byte] = char(~changed[at + byte]);
      seal(changed);
      write_file(dir / "y.h5", changed);
      const auto file = GoldenFile::open(dir / "y.h5");
      REQUIRE(file.status().message() == "");
      const Result<Tensor> got = file->input(name);
      REQUIRE(got);
      CHECK(std::memcmp(got->data(), &changed[at], data.size()) == 0);
    }
  }
}

TEST_CASE("a golden file with wrong content is refused, or of use") {
  omp_set_num_threads(1);
  GoldenSample small = make_sample({.cache = "procedural", .weights = "procedural"}), full = make_sample();
  for (GoldenSample* s : {&small, &full}) s->meta.config_json = checkpoint::to_hf_json(s->meta.config);
  ModelSample all = make_model_sample(), some = make_model_sample({.top = 3});
  for (ModelSample* s : {&all, &some}) s->meta.config_json = checkpoint::to_hf_json(s->meta.config);
  const TempDir dir;
  const std::string path = dir / "x.h5";
  const auto write_changed = [&](Random& random, auto sample) {
    for (std::size_t n = below(random, 3) + 1; n > 0; --n) change_content(random, sample);
    return bool(write_sample(sample, path));
  };
  constexpr int files = 700;
  const int layers = accepted_of<GoldenFile>(
      files, path, [&](Random& random) { return write_changed(random, clone(below(random, 4) == 0 ? full : small)); });
  const int models = accepted_of<ModelGolden>(
      files, path, [&](Random& random) { return write_changed(random, clone(below(random, 2) == 0 ? all : some)); });
  for (const int accepted : {layers, models}) {
    // Otherwise the changes are too coarse or too fine to test anything.
    CHECK(accepted > files / 20);
    CHECK(accepted < files);
  }
}
