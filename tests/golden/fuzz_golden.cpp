// Golden files with random changes, from fixed seeds. Nothing crashes or hangs; a refusal is one line that names the
// file; an accepted file can be loaded and run.
#include <omp.h>

#include <cstring>
#include <random>

#include "tests/checkpoint/reader_invariants.hpp"
#include "tests/golden/golden_sample.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::test;
using golden::GoldenFile;

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
    case 6: {
      constexpr std::string_view fields[] = {"\"hidden_size\": 32", "\"num_attention_heads\": 4",
                                             "\"intermediate_size\": 48", "\"max_position_embeddings\": 64",
                                             "\"num_hidden_layers\": 2"};
      const std::string_view field = fields[below(random, std::size(fields))];
      const std::size_t at = m.config_json.find(field);
      if (at != std::string::npos)
        m.config_json.replace(at, field.size(),
                              std::string(field.substr(0, field.find(':') + 1)) + std::to_string(odd_integer(random)));
      break;
    }
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

}  // namespace

TEST_CASE("no golden file with damaged bytes is accepted") {
  const TempDir dir;
  const std::string path = dir / "x.h5";
  check_ok(write_sample(make_sample({.cache = "procedural", .weights = "procedural"}), path));
  const std::string whole = read_file(path);
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    std::string bytes = whole;
    damage_bytes(random, bytes);
    if (bytes == whole) continue;
    write_file(path, bytes);
    CAPTURE(seed);
    const Status status = GoldenFile::open(path).status();
    REQUIRE_FALSE(status);
    REQUIRE(message_fault(status, path) == "");
  }
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

  constexpr int rounds = 800;
  for (std::size_t f = 0; f < files.size(); ++f) {
    int accepted = 0;
    for (std::uint64_t seed = 0; seed < rounds; ++seed) {
      Random random(seed * files.size() + f);
      write_file(path, files[f].changed(random));
      CAPTURE(f, seed);
      const auto file = GoldenFile::open(path);
      accepted += bool(file);
      REQUIRE((file ? use_fault(*file, path) : message_fault(file.status(), path)) == "");
    }
    // Some changes hit data or spare room, and most do not.
    CAPTURE(f);
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
  const TempDir dir;
  const std::string path = dir / "x.h5";
  constexpr int files = 700;
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < files; ++seed) {
    Random random(seed);
    GoldenSample s = clone(below(random, 4) == 0 ? full : small);
    for (std::size_t n = below(random, 3) + 1; n > 0; --n) change_content(random, s);
    if (!write_sample(s, path)) continue;
    CAPTURE(seed);
    const auto file = GoldenFile::open(path);
    accepted += bool(file);
    REQUIRE((file ? use_fault(*file, path) : message_fault(file.status(), path)) == "");
  }
  // Otherwise the changes are too coarse or too fine to test anything.
  CHECK(accepted > files / 20);
  CHECK(accepted < files);
}
