#include "golden/checkpoint/checkpoint.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <system_error>
#include <type_traits>
#include <utility>

#include "core/resources.hpp"
#include "golden/checkpoint/cast.hpp"
#include "golden/checkpoint/fp8_reader.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "golden/checkpoint/join_parts.hpp"
#include "golden/checkpoint/json.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSuffix = ".safetensors";
constexpr const char* kIndexSuffix = ".safetensors.index.json";

std::string join(const std::string& directory, const std::string& name) {
  return (fs::path(directory) / name).string();
}

bool is_file(const std::string& path) {
  std::error_code none;
  return fs::is_regular_file(path, none);
}

/// Whether text can be a file's name in a directory.
bool is_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

/// The refusal of a directory without a checkpoint's safetensors files, which are called by `name`.
Status no_safetensors(const std::string& directory, const std::string& name) {
  std::error_code error;
  std::string bin, other;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".bin") bin = std::max(bin, it->path().filename().string());
    if (it->path().extension() == kSuffix) other = std::max(other, it->path().filename().string());
  }
  const std::string expected = "expected " + printable(name) + kSuffix + " or " + printable(name) + kIndexSuffix;
  if (!other.empty()) return Status::error(Code::not_found, directory + ": holds " + quote(other) + ", " + expected);
  if (bin.empty()) return Status::error(Code::not_found, directory + ": holds no safetensors file, " + expected);
  return Status::error(Code::not_found,
                       directory + ": holds " + quote(bin) + " but no safetensors file, " + expected +
                           "; convert it with: python3 -c \"from transformers import AutoModelForCausalLM as M; "
                           "M.from_pretrained('" +
                           directory + "', torch_dtype='auto').save_pretrained('OUT', safe_serialization=True)\"");
}

/// Reads the index: tensor name -> shard. Every shard must be a file beside the index.
Result<std::map<std::string, std::string>> read_index(const std::string& directory, const std::string& name) {
  const std::string path = join(directory, name);
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, path + ": " + what); };
  CF_TRY_ASSIGN(const MappedFile file, map_file(path));
  CF_TRY_ASSIGN(const Json index, parse_json_object(file.text(), path));

  if (const auto metadata = index.find("metadata"); metadata != index.end() && !metadata->is_null()) {
    if (!metadata->is_object()) return refuse("'metadata': expected an object, got " + shown(*metadata));
    const auto total = metadata->find("total_size");
    if (total != metadata->end() && !(total->is_number() && total->get<double>() >= 0))
      return refuse("'metadata.total_size': expected a number of bytes, got " + shown(*total));
  }
  const auto weight_map = index.find("weight_map");
  if (weight_map == index.end()) return refuse("'weight_map' is missing, expected an object of tensor to shard");
  if (!weight_map->is_object()) return refuse("'weight_map': expected an object, got " + shown(*weight_map));
  std::map<std::string, std::string> shard_of;
  std::set<std::string> found;
  for (const auto& [tensor, value] : weight_map->items()) {
    const std::string where = "tensor " + quote(tensor) + ": ";
    if (!value.is_string()) return refuse(where + "expected a shard's file name, got " + shown(value));
    const std::string shard = value.get<std::string>();
    if (!is_file_name(shard)) return refuse(where + "expected a plain file name for its shard, got " + quote(shard));
    if (!found.contains(shard)) {
      if (!is_file(join(directory, shard)))
        return refuse(where + "expected its shard " + quote(shard) + " beside the index, got no such file");
      found.insert(shard);
    }
    shard_of.emplace(tensor, shard);
  }
  return shard_of;
}

constexpr const char* kQuantizationConfig = ": 'quantization_config'";

/// The text of a config.json's quantization_config, empty where it has none.
Result<std::string> quantization_config(std::string_view config, const std::string& source) {
  CF_TRY_ASSIGN(const Json json, parse_json_object(config, source));
  const auto it = json.find("quantization_config");
  return it == json.end() || it->is_null() ? std::string() : it->dump();
}

/// How a checkpoint's Linears are quantised: in one way or in none.
struct Quantisation {
  std::optional<GptqConfig> gptq;
  std::optional<Fp8Config> fp8;

  bool operator==(const Quantisation&) const = default;
};

Result<Quantisation> parse_quantisation(std::string_view text, const std::string& source, const ModelConfig& m) {
  Quantisation q;
  if (is_fp8_config(text)) {
    CF_TRY_ASSIGN(q.fp8, parse_fp8_config(text, source));
  } else {
    CF_TRY_ASSIGN(q.gptq, parse_gptq_config(text, source, m.model_type, m.num_hidden_layers));
  }
  return q;
}

bool is_quantised(const GptqConfig& gptq, std::string_view module) {
  return std::find(gptq.modules.begin(), gptq.modules.end(), module) != gptq.modules.end();
}

/// Makes the weight of each Linear that the config names a GptqWeight, still without tensors.
void mark_quantised(const ModelSpec& m, const std::optional<GptqConfig>& gptq, LayerWeights& weights) {
  if (!gptq) return;
  for_each_linear(m, weights, [&](const Site& site, LinearParams& l, const LinearSize& size) {
    if (is_quantised(*gptq, stored_parts(m, site, size).parts.front().module))
      l.weight = GptqWeight{.bits = gptq->bits, .group_size = gptq->group_size == -1 ? size.in : gptq->group_size};
  });
}

/// Calls f(kind) for each tensor of an fp8 Linear, by its name below the module.
template <class F>
void for_each_fp8_tensor(const Fp8Config& config, F&& f) {
  f(std::string("weight"));
  f(config.scale_name);
}

/// An element's coordinate: "(2, 5)".
std::string coordinate(std::int64_t element, const Shape& shape) {
  Shape at(shape.size());
  for (std::size_t i = shape.size(); i-- > 0; element /= shape[i]) at[i] = element % shape[i];
  return to_string(at);
}

/// What is wrong with an array that holds NaN or infinity, with the first such element and their number; otherwise "".
/// Looks at the exponents alone: all of their bits are ones in these numbers and in no other. `data` may lie anywhere,
/// as a matrix in a mapped file does.
template <class Bits>
std::string not_finite(const void* data, const Shape& shape, Bits exponent) {
  const std::int64_t size = element_count(shape);
  const auto at = [bytes = static_cast<const std::byte*>(data)](std::int64_t i) {
    Bits x;
    std::memcpy(&x, bytes + i * std::int64_t(sizeof x), sizeof x);
    return x;
  };
  const auto is_bad = [&](std::int64_t i) { return (at(i) & exponent) == exponent; };
  Bits any = 0;  // without a branch, so that the compiler vectorises the loop
  for (std::int64_t i = 0; i < size; ++i) any |= Bits(is_bad(i));
  if (!any) return "";
  std::int64_t first = -1, count = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    if (!is_bad(i)) continue;
    if (count++ == 0) first = i;
  }
  const Bits mantissa = Bits(exponent & (~exponent + 1)) - 1;
  return "element " + coordinate(first, shape) + ": expected a finite number, got " +
         (at(first) & mantissa ? "NaN" : "infinity") + "; " + std::to_string(count) + " of " + std::to_string(size) +
         " elements are not finite";
}

std::string not_finite(const void* data, DType dtype, const Shape& shape) {
  switch (dtype) {
    case DType::f16: return not_finite<std::uint16_t>(data, shape, 0x7c00);
    case DType::bf16: return not_finite<std::uint16_t>(data, shape, 0x7f80);
    case DType::f32: return not_finite<std::uint32_t>(data, shape, 0x7f800000);
    case DType::f64: return not_finite<std::uint64_t>(data, shape, 0x7ff0000000000000);
    default: return "";  // integers
  }
}

/// What is wrong with the values of a quantised matrix, as "part': what".
std::string gptq_fault(const GptqWeight& w) {
  const std::int64_t groups = w.scales.shape[0];
  for (std::int64_t k = 0; k < w.g_idx.size(); ++k)
    if (w.g_idx.data[k] < 0 || w.g_idx.data[k] >= groups)
      return "g_idx': element " + std::to_string(k) + ": expected 0 to " + std::to_string(groups - 1) + ", got " +
             std::to_string(w.g_idx.data[k]);
  const std::string fault = not_finite(w.scales.data, DType::f16, {groups, w.scales.shape[1]});
  return fault.empty() ? "" : "scales': " + fault;
}

std::string weight_of(std::string_view module) { return std::string(module) + ".weight"; }
std::string weight_of(const Site& site) { return weight_of(site.name); }

/// Whether two dense tensors are the same once both are cast to one dtype.
bool is_same(const TensorEntry& a, const TensorEntry& b, std::optional<DType> as) {
  const std::optional<DType> from = float_dtype(a.stored_dtype), other = float_dtype(b.stored_dtype);
  if (a.shape != b.shape || !from || !other) return false;
  const DType to = *from == *other ? *from : as.value_or(*from);
  constexpr std::int64_t chunk = 1 << 14;
  std::vector<double> x(chunk), y(chunk);  // room for elements of any dtype
  const std::int64_t size = element_count(a.shape);
  bool same = true;
  for (std::int64_t i = 0; same && i < size; i += chunk) {
    const std::int64_t n = std::min(chunk, size - i);
    const auto cast = [&](const TensorEntry& t, DType d, std::vector<double>& target) {
      cast_elements(d, static_cast<const char*>(t.data) + i * std::int64_t(size_bytes(d)), n, to, target.data());
    };
    cast(a, *from, x);
    cast(b, *other, y);
    same = std::memcmp(x.data(), y.data(), std::size_t(n) * size_bytes(to)) == 0;
  }
  for (const TensorEntry* t : {&a, &b}) drop_pages(t->data, std::uint64_t(t->bytes));
  return same;
}

/// The one code of qzeros, where all of them hold the same code.
std::optional<std::int32_t> only_zero(const GptqWeight& w) {
  const std::int32_t first = w.qzeros.data[0] & ((1 << w.bits) - 1);
  std::uint32_t word = 0;
  for (int shift = 0; shift < 32; shift += w.bits) word |= std::uint32_t(first) << shift;
  for (std::int64_t i = 0; i < w.qzeros.size(); ++i)
    if (std::uint32_t(w.qzeros.data[i]) != word) return std::nullopt;
  return first;
}

/// The Linears that a checkpoint stores in several modules or transposed, by their names below the layer.
class Joins {
 public:
  explicit Joins(const ModelSpec& m) : layers_(names_of(m).layers) {
    for_each_linear(m, LayerWeights{}, [&](const Site& site, const auto&, const LinearSize& size) {
      if (StoredParts stored = stored_parts(m, site, size); !stored.is_whole())
        joined_.emplace(site.name, std::move(stored));
    });
  }

  /// A tensor of a joined Linear.
  struct Tensor {
    const StoredParts* stored;
    std::string prefix;     // what the parts' names begin with: "model.layers.3."
    std::string_view kind;  // "weight", "bias", "qweight" ...

    std::string name(std::size_t part) const {
      return prefix + std::string(stored->parts[part].module) + "." + std::string(kind);
    }
    /// Whether the files' tensor is this one.
    bool is_whole() const { return stored->parts.size() == 1 && !is_transposed(); }
    bool is_transposed() const { return stored->transposed && kind == "weight"; }
  };
  /// What a tensor's name means, where it is one of a joined Linear. The result refers to `name`.
  std::optional<Tensor> find(std::string_view name) const {
    if (!name.starts_with(layers_)) return std::nullopt;
    const std::size_t module = name.find('.', layers_.size()) + 1, kind = name.rfind('.') + 1;
    if (module == 0 || kind <= module) return std::nullopt;
    const auto found = joined_.find(name.substr(module, kind - 1 - module));
    if (found == joined_.end()) return std::nullopt;
    Tensor tensor{&found->second, std::string(name.substr(0, module)), name.substr(kind)};
    if (tensor.is_whole()) return std::nullopt;
    return tensor;
  }
  /// Calls f(name) for each tensor that a checkpoint stores of the one that is called `name`.
  template <class F>
  void for_each_stored(std::string_view name, F&& f) const {
    const std::optional<Tensor> joined = find(name);
    if (!joined) return f(std::string(name));
    for (std::size_t part = 0; part < joined->stored->parts.size(); ++part) f(joined->name(part));
  }

 private:
  std::string_view layers_;
  std::map<std::string_view, StoredParts> joined_;
};

/// The names of tensors in a checkpoint.
class KnownNames {
 public:
  KnownNames(const ModelConfig& m, const std::optional<GptqConfig>& gptq, const std::optional<Fp8Config>& fp8,
             bool in_memory)
      : layers_(m.num_hidden_layers), names_(m.family().names) {
    const Joins joins(m.spec());
    for (std::string_view buffer : m.family().buffers) in_layer_.emplace(buffer);
    ModelSpec untied = m.spec();  // some checkpoints hold a tied LM head beside the embedding
    untied.traits.tied_embeddings = false;
    ModelWeights rest;
    for_each_model_weight(untied, rest, [&](const TensorSpec& t, auto&, auto) { outside_.emplace(t.name); });
    LayerWeights weights;
    mark_quantised(m.spec(), gptq, weights);
    const std::string prefix = names_.layer(0);
    const auto add = [&](const std::string& name) {
      if (in_memory) in_layer_.insert(name);
      joins.for_each_stored(prefix + name,
                            [&](const std::string& stored) { in_layer_.insert(stored.substr(prefix.size())); });
    };
    for_each_weight(m, weights, [&](const TensorSpec& t, auto&, auto) { add(std::string(t.name)); });
    if (!fp8) return;
    for_each_linear(m.spec(), weights, [&](const Site& site, const LinearParams&, const LinearSize&) {
      for_each_fp8_tensor(*fp8, [&](const std::string& kind) { add(std::string(site.name) + "." + kind); });
    });
  }
  /// Whether a file may have a tensor of that name. Names without the model's base count, and other names of the head.
  bool contains_stored(const std::string& name) const {
    return contains(name) || contains(std::string(names_.base()) + name) ||
           (!names_.other_head.empty() && name == std::string(names_.other_head) + ".weight");
  }
  bool contains(std::string_view name) const {
    if (!name.starts_with(names_.layers)) return outside_.contains(name);
    name.remove_prefix(names_.layers.size());
    std::int64_t layer = -1;
    const auto [dot, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
    if (error != std::errc() || layer < 0 || layer >= layers_) return false;
    // "007" is not a name of layer 7.
    const std::string number = std::to_string(layer) + ".";
    return name.starts_with(number) && in_layer_.contains(name.substr(number.size()));
  }

 private:
  using Names = std::set<std::string, std::less<>>;

  std::int64_t layers_;
  const ModelNames& names_;
  Names outside_;   // of the layers
  Names in_layer_;  // the weights, and the buffers that old versions of transformers saved
};

}  // namespace

Result<Checkpoint> Checkpoint::open(const std::string& directory) {
  std::error_code none;
  const fs::file_status status = fs::status(directory, none);
  if (!fs::exists(status)) return Status::error(Code::not_found, directory + ": no such directory");
  if (!fs::is_directory(status))
    return Status::error(Code::invalid_file, directory + ": is no directory, expected a checkpoint's");

  Checkpoint c;
  c.directory_ = directory;
  const std::string config_path = join(directory, "config.json");
  {
    CF_TRY_ASSIGN(const MappedFile config, map_file(config_path));
    CF_TRY(c.take_config(config.text(), config_path));
  }
  if (c.config_.name.empty()) {
    const fs::path path(directory);
    c.config_.name = (path.has_filename() ? path : path.parent_path()).filename().string();
  }
  CF_TRY(c.read_quantisation());
  const auto holds = [&] {
    return is_file(join(directory, c.name_ + kSuffix)) || is_file(join(directory, c.name_ + kIndexSuffix));
  };
  if (c.gptq_ && is_file_name(c.gptq_->file_base_name) && !holds()) c.name_ = c.gptq_->file_base_name;
  if (!holds()) return no_safetensors(directory, c.name_);
  c.sharded_ = !is_file(join(directory, c.name_ + kSuffix));
  if (c.sharded_) {
    CF_TRY_ASSIGN(c.shard_of_, read_index(directory, c.name_ + kIndexSuffix));
  }
  CF_TRY(c.compare_tied());
  return c;
}

Status Checkpoint::take_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(HfConfig read, parse_noted_hf_config(text, source));
  config_ = std::move(read.config);
  config_dtype_ = read.dtype;
  notes_ = std::move(read.notes);
  return {};
}

/// The first file that says how Linears are quantised counts. A note says where a later file differs.
Status Checkpoint::read_quantisation() {
  Quantisation first;
  std::string first_source;
  const auto add = [&](std::string_view text, const std::string& source) -> Status {
    CF_TRY_ASSIGN(Quantisation q, parse_quantisation(text, source, config_));
    if (first_source.empty()) {
      first = std::move(q);
      first_source = source;
    } else if (first != q) {
      notes_.push_back(source + ": differs from " + first_source + ", which counts");
    }
    return {};
  };
  for (const char* name : {"quantize_config.json", "quant_config.json"}) {
    const std::string path = join(directory_, name);
    if (!is_file(path)) continue;
    CF_TRY_ASSIGN(const MappedFile file, map_file(path));
    CF_TRY(add(file.text(), path));
  }
  const std::string path = join(directory_, "config.json");
  CF_TRY_ASSIGN(const MappedFile file, map_file(path));
  CF_TRY_ASSIGN(const std::string inner, quantization_config(file.text(), path));
  if (!inner.empty()) CF_TRY(add(inner, path + kQuantizationConfig));
  gptq_ = std::move(first.gptq);
  fp8_ = std::move(first.fp8);
  return {};
}

std::string Checkpoint::single_file() const { return name_ + kSuffix; }
std::string Checkpoint::index_file() const { return name_ + kIndexSuffix; }

std::vector<std::string> Checkpoint::files() const {
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shard_of_) names.insert(shard);
  if (!sharded_) names.insert(single_file());
  return {names.begin(), names.end()};
}

std::string Checkpoint::path_of(const std::string& name) const { return join(directory_, name); }

struct Checkpoint::OpenFiles {
  std::mutex mutex;
  std::map<std::string, Result<File>> files;  // a file that could not be opened is not opened again
};

Result<Checkpoint> Checkpoint::from_memory(std::string_view config, std::optional<std::string_view> gptq,
                                           std::vector<TensorEntry> tensors, std::shared_ptr<const void> owner,
                                           const std::string& source) {
  Checkpoint c;
  c.directory_ = source;
  c.in_memory_ = true;
  CF_TRY(c.take_config(config, source + ": config"));
  CF_TRY_ASSIGN(const std::string inner, quantization_config(config, source + ": config"));
  Quantisation q;
  if (gptq) {
    CF_TRY_ASSIGN(q, parse_quantisation(*gptq, source + ": gptq", c.config_));
  } else if (!inner.empty()) {
    CF_TRY_ASSIGN(q, parse_quantisation(inner, source + ": config" + kQuantizationConfig, c.config_));
  }
  if (q.fp8)
    return Status::error(Code::unimplemented,
                         source + ": fp8 weights are read from a checkpoint's files, expected dense or GPTQ ones here");
  c.gptq_ = std::move(q.gptq);
  c.open_files_->files.emplace(c.single_file(), File(std::make_shared<const SafetensorsFile>(SafetensorsFile::in_memory(
                                                    std::move(tensors), std::move(owner), source))));
  return c;
}

Checkpoint::Checkpoint() : open_files_(std::make_shared<OpenFiles>()) {}

CheckpointStorage::~CheckpointStorage() {
  for (const TensorEntry* t : mapped) drop_pages(t->data, std::uint64_t(t->bytes));
}

Status Checkpoint::check_files() const {
  const std::lock_guard lock(open_files_->mutex);
  for (const auto& [name, file] : open_files_->files)
    if (file) CF_TRY((*file)->check_file());
  return {};
}

std::vector<std::string> Checkpoint::changes() const {
  const std::lock_guard lock(open_files_->mutex);
  std::vector<std::string> notes;
  for (const auto& [name, file] : open_files_->files)
    if (file && (*file)->is_changed()) notes.push_back((*file)->path() + ": was changed while it was used");
  return notes;
}

Result<Checkpoint::File> Checkpoint::file(const std::string& name) const {
  const std::lock_guard lock(open_files_->mutex);
  const auto found = open_files_->files.find(name);
  if (found != open_files_->files.end()) return found->second;
  Result<SafetensorsFile> opened = SafetensorsFile::open(join(directory_, name));
  return open_files_->files
      .emplace(name, opened ? Result<File>(std::make_shared<const SafetensorsFile>(std::move(*opened)))
                            : Result<File>(opened.status()))
      .first->second;
}

std::vector<std::string> Checkpoint::stored_names(const std::string& name) const {
  std::vector<std::string> all{name};
  if (in_memory_) return all;
  const ModelNames& names = config_.family().names;
  if (name.starts_with(names.base())) all.push_back(name.substr(names.base().size()));
  if (!names.other_head.empty() && name == weight_of(names.embed_out)) all.push_back(weight_of(names.other_head));
  return all;
}

Result<std::optional<Checkpoint::Found>> Checkpoint::look_up(const std::string& name) const {
  std::optional<Found> found;
  for (const std::string& stored : stored_names(name)) {
    std::string file_name = single_file();
    if (sharded_) {
      const auto it = shard_of_.find(stored);
      if (it == shard_of_.end()) continue;
      file_name = it->second;
    }
    CF_TRY_ASSIGN(File holder, file(file_name));
    const TensorEntry* entry = holder->find(stored);
    if (!entry && sharded_)
      return Status::error(Code::not_found,
                           holder->path() + ": tensor " + quote(stored) + " is missing, expected by the index");
    if (!entry) continue;
    if (found)
      return Status::error(Code::invalid_file, holder->path() + ": tensors " + quote(found->entry->name) + " and " +
                                                   quote(stored) + " are the same one, expected one of them");
    found = Found{std::move(holder), entry};
  }
  const ModelNames& names = config_.family().names;
  if (!found && config_.tie_word_embeddings && name == weight_of(names.embed_in))
    return look_up(weight_of(names.embed_out));
  return found;
}

Status Checkpoint::compare_tied() {
  if (!config_.tie_word_embeddings) return {};
  const ModelNames& names = config_.family().names;
  CF_TRY_ASSIGN(const std::optional<Found> head, look_up(weight_of(names.embed_out)));
  CF_TRY_ASSIGN(const std::optional<Found> embedding, look_up(weight_of(names.embed_in)));
  if (!head || !embedding) return {};
  if (embedding->entry == head->entry || is_same(*embedding->entry, *head->entry, config_dtype_)) return {};
  config_.tie_word_embeddings = false;
  notes_.push_back(directory_ + ": 'tie_word_embeddings' is true, but tensor " + quote(head->entry->name) +
                   " differs from " + quote(embedding->entry->name) + ": the head counts, as in transformers 5");
  return {};
}

Result<Checkpoint::Found> Checkpoint::find(const std::string& name) const {
  CF_TRY_ASSIGN(std::optional<Found> found, look_up(name));
  if (found) return std::move(*found);
  if (sharded_)
    return Status::error(Code::not_found, join(directory_, index_file()) + ": tensor " + quote(name) +
                                              " is missing, expected its shard");
  CF_TRY_ASSIGN(const File holder, file(single_file()));
  return Status::error(Code::not_found, holder->path() + ": tensor " + quote(name) + " is missing");
}

bool Checkpoint::has(const std::string& name) const {
  if (sharded_) {
    const std::vector<std::string> names = stored_names(name);
    return std::any_of(names.begin(), names.end(), [&](const std::string& n) { return shard_of_.contains(n); });
  }
  const auto found = look_up(name);
  return found && *found;
}

bool Checkpoint::has_whole(const std::string& name) const { return in_memory_ && has(name); }

/// Points views to tensors: to those of the file, and of joined Linears to memory of their own. Where dense weights
/// have different dtypes, those that are not of the config's are cast to it, as Hugging Face does.
class Checkpoint::Loader {
 public:
  explicit Loader(const Checkpoint& checkpoint) : checkpoint_(checkpoint), joins_(checkpoint.config_.spec()) {}

  /// Loads every weight for which `walk` calls f(name, view, shape).
  template <class Walk>
  Status load_all(Walk&& walk) {
    CF_TRY(plan(walk));
    Status status;
    walk([&](const std::string& name, auto& view, auto shape) {
      if (status) status = load(name, view, shape);
    });
    return status;
  }
  /// Reads the fp8 Linears of layers from the one numbered `first` on, behind load_all().
  Status load_fp8(std::int64_t first, std::span<LayerWeights> layers) {
    const ModelSpec spec = checkpoint_.config_.spec();
    double bytes = 0;
    for (const LayerWeights& layer : layers)
      for_each_linear(spec, layer, [&](const Site&, const LinearParams& l, const LinearSize& size) {
        if (is_fp8(l.weight)) bytes += format_of(l.weight).bytes(size.out, size.in, DType::f32);
      });
    if (bytes == 0) return {};
    CF_TRY(check_free_memory(bytes, checkpoint_.directory_ + ": the fp8 weights need " + gigabytes(bytes)));
    const FindTensor find = [&](const std::string& name) -> Result<FoundTensor> {
      CF_TRY_ASSIGN(const Found found, checkpoint_.find(name));
      return FoundTensor{found.entry, found.file->path()};
    };
    Status status;
    for (LayerWeights& layer : layers) {
      const std::string prefix = names_of(spec).layer(first++);
      for_each_linear(spec, layer, [&](const Site& site, LinearParams& l, const LinearSize& size) {
        if (!status || !is_fp8(l.weight)) return;
        const StoredParts stored = stored_parts(spec, site, size);
        Result<OwnedFp8> read = read_fp8(*checkpoint_.fp8_, prefix, stored, size.in, find);
        status = read.status();
        if (!status) return;
        for (const StoredPart& part : stored.parts) drop(prefix + std::string(part.module) + ".weight");
        l.weight = read->weight;
        storage_->copies.push_back(std::move(read->storage));
      });
      CF_TRY(status);
    }
    return {};
  }
  DType dtype() const { return dtype_; }
  std::shared_ptr<const CheckpointStorage> storage() const { return storage_; }
  /// Appends a line that says what was cast.
  void add_notes(std::vector<std::string>& notes) const {
    if (cast_ == 0) return;
    notes.push_back(checkpoint_.directory_ + ": tensor " + quote(first_cast_.name) + " is " + first_cast_.stored +
                    ", cast to " + std::string(to_string(first_cast_.to)) + " as Hugging Face does" +
                    (cast_ > 1 ? ", like " + std::to_string(cast_ - 1) + " others" : ""));
  }

 private:
  /// Chooses the dtype of dense weights, and sees that the memory for joined and cast ones is free. Reads no tensor.
  template <class Walk>
  Status plan(Walk&& walk) {
    std::map<DType, double> elements;  // of dense weights that are not joined, by their stored dtype
    std::optional<DType> first;
    double joined_bytes = 0;
    walk([&]<class V>(const std::string& name, const V&, auto) {
      const bool in_parts = !checkpoint_.has_whole(name) && joins_.find(name);
      const auto add = [&](const std::string& stored) {
        const auto found = checkpoint_.look_up(stored);
        if (!found || !*found) return;  // load() says what is wrong
        const TensorEntry& entry = *(*found)->entry;
        if (in_parts) joined_bytes += double(entry.bytes);
        if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>)
          if (const auto dtype = float_dtype(entry.stored_dtype)) {
            if (!first) first_ = name;
            if (!first) first = dtype;
            elements[*dtype] += in_parts ? 0 : double(element_count(entry.shape));
          }
      };
      if (checkpoint_.has_whole(name))
        add(name);
      else
        joins_.for_each_stored(name, add);
    });
    dtype_ = first.value_or(DType::f16);
    if (checkpoint_.in_memory_) return {};
    if (elements.size() > 1 || dtype_ == DType::f64)
      dtype_ = checkpoint_.config_dtype_.value_or(dtype_ == DType::f64 ? DType::f32 : dtype_);
    double bytes = joined_bytes;
    for (const auto& [dtype, n] : elements)
      if (dtype != dtype_) bytes += n * double(size_bytes(dtype_));
    if (bytes == 0) return {};
    return check_free_memory(bytes, checkpoint_.directory_ + ": joining and casting weights needs " + gigabytes(bytes));
  }

  template <class V>
  Status load(const std::string& name, V& view, const std::array<std::int64_t, V::rank>& shape) {
    if (checkpoint_.has_whole(name)) return load_stored(name, view, shape);
    const std::optional<Joins::Tensor> joined = joins_.find(name);
    return joined ? join(*joined, view, shape) : load_stored(name, view, shape);
  }

  template <class V>
  Status join(const Joins::Tensor& joined, V& view, const std::array<std::int64_t, V::rank>& shape) {
    const std::vector<StoredPart>& parts = joined.stored->parts;
    const std::size_t mapped = storage_->mapped.size(), copied = storage_->copies.size();
    const int axis = V::rank == 2 && joined.kind != "weight" ? 1 : 0;
    const std::int64_t codes = joined.kind == "qzeros" ? 32 / checkpoint_.gptq_->bits : 1;
    Tensor whole;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      V part;
      std::array<std::int64_t, V::rank> part_shape = shape;
      if (joined.kind != "g_idx") part_shape[std::size_t(axis)] = parts[p].rows / codes;
      if (joined.is_transposed()) std::swap(part_shape.front(), part_shape.back());
      CF_TRY(load_stored(joined.name(p), part, part_shape));
      const auto bytes = std::size_t(part.bytes());
      if (joined.kind == "g_idx") {
        if (p > 0 && std::memcmp(part.data, view.data, bytes) != 0)
          return Status::error(Code::unimplemented,
                               checkpoint_.directory_ + ": " + joined.prefix + std::string(parts[0].module) + " and " +
                                   std::string(parts[p].module) + " have different g_idx, expected the same");
        view = part;
        continue;
      }
      if (p == 0) {
        const double needed = double(element_count(Shape(shape.begin(), shape.end()))) * double(size_bytes(part.dtype));
        const std::string what = parts.size() > 1 ? ": to join " + joined.name(0) + " with others needs "
                                                  : ": to transpose " + joined.name(0) + " needs ";
        CF_TRY(check_free_memory(needed, checkpoint_.directory_ + what + gigabytes(needed)));
        whole = Tensor(part.dtype, Shape(shape.begin(), shape.end()));
      }
      if (joined.is_transposed())
        transpose_part(*joined.stored, p, part.data, whole.data(), whole.shape().back(), size_bytes(part.dtype));
      else
        copy_part(*joined.stored, p, part.data, whole.data(), whole.shape(), axis, size_bytes(part.dtype), codes);
    }
    if (joined.kind == "g_idx") return {};
    point(view, whole.data(), shape, whole.dtype());
    // The parts are needed no more.
    storage_->copies.erase(storage_->copies.begin() + std::ptrdiff_t(copied), storage_->copies.end());
    storage_->copies.push_back(std::move(whole));
    for (; storage_->mapped.size() > mapped; storage_->mapped.pop_back())
      drop_pages(storage_->mapped.back()->data, std::uint64_t(storage_->mapped.back()->bytes));
    return {};
  }

  /// Whether a name is that of a g_idx which old files leave out: without desc_act it can only be input / group_size.
  template <class V>
  bool is_left_out(const std::string& name) const {
    return V::rank == 1 && name.ends_with(".g_idx") && checkpoint_.gptq_ && !checkpoint_.gptq_->desc_act &&
           !checkpoint_.has(name);
  }

  template <class V>
  Status load_stored(const std::string& name, V& view, const std::array<std::int64_t, V::rank>& shape) {
    const Shape expected(shape.begin(), shape.end());
    constexpr bool is_dense = std::is_void_v<std::remove_const_t<typename V::element>>;
    if constexpr (!is_dense)
      if (V::dtype == DType::i32 && is_left_out<V>(name)) {
        Tensor groups(DType::i32, expected);
        const std::int64_t size = checkpoint_.gptq_->group_size;
        for (std::int64_t k = 0; k < groups.size(); ++k)
          groups.as<std::int32_t>()[k] = size == -1 ? 0 : std::int32_t(k / size);
        point(view, groups.data(), shape, DType::i32);
        storage_->copies.push_back(std::move(groups));
        return {};
      }
    CF_TRY_ASSIGN(const Found found, checkpoint_.find(name));
    const TensorEntry& entry = *found.entry;
    const auto refuse = [&](const std::string& what, const std::string& got) {
      return Status::error(Code::invalid_file, found.file->path() + ": tensor " + quote(entry.name) + ": expected " +
                                                   what + ", got " + got);
    };
    if (entry.shape != expected) return refuse("shape " + to_string(expected), to_string(entry.shape));
    DType dtype = dtype_;
    if constexpr (!is_dense) dtype = V::dtype;
    const std::optional<DType> stored = float_dtype(entry.stored_dtype);
    if (dtype == DType::i32 ? entry.stored_dtype != "I32" : !stored)
      return refuse(dtype == DType::i32 ? "dtype I32" : "dtype F16, BF16 or F32", entry.stored_dtype);
    const bool is_cast = dtype != DType::i32 && *stored != dtype;
    if (is_cast && checkpoint_.in_memory_)
      return is_dense ? refuse("dtype " + std::string(to_string(dtype)) + " as " + quote(first_) + " has",
                               std::string(to_string(*stored)))
                      : refuse("dtype F16", entry.stored_dtype);

    const void* data = entry.data;
    if (is_cast || reinterpret_cast<std::uintptr_t>(data) % size_bytes(dtype)) {
      Tensor copy(dtype, expected);
      if (!is_cast) {
        std::memcpy(copy.data(), data, std::size_t(entry.bytes));
      } else if (const std::int64_t at = cast_elements(*stored, data, copy.size(), dtype, copy.data()); at >= 0) {
        return refuse("values within " + std::string(to_string(dtype)) + ", to which it is cast",
                      "a larger one in element " + coordinate(at, expected));
      }
      if (is_cast && cast_++ == 0) first_cast_ = {entry.name, entry.stored_dtype, dtype};
      data = copy.data();
      storage_->copies.push_back(std::move(copy));
    }
    point(view, data, shape, dtype);
    if (found.file->is_mapped()) storage_->mapped.push_back(&entry);
    if (files_.insert(found.file.get()).second) storage_->files.push_back(found.file);
    return {};
  }

  /// Takes a tensor's pages out of this process's memory.
  void drop(const std::string& name) const {
    if (const auto found = checkpoint_.look_up(name); found && *found)
      drop_pages((*found)->entry->data, std::uint64_t((*found)->entry->bytes));
  }

  struct Cast {
    std::string name, stored;
    DType to = DType::f16;
  };

  const Checkpoint& checkpoint_;
  Joins joins_;
  std::string first_;  // the first dense tensor
  DType dtype_ = DType::f16;
  std::int64_t cast_ = 0;  // tensors
  Cast first_cast_;
  std::set<const SafetensorsFile*> files_;  // those of the storage
  std::shared_ptr<CheckpointStorage> storage_ = std::make_shared<CheckpointStorage>();
};

Status Checkpoint::mark_fp8(std::int64_t layer, LayerWeights& weights) const {
  if (!fp8_) return {};
  const ModelSpec spec = config_.spec();
  Status status;
  for_each_linear(spec, weights, [&](const Site& site, LinearParams& l, const LinearSize& size) {
    const StoredParts stored = stored_parts(spec, site, size);
    std::string first;  // the first part's dtype
    for (const StoredPart& part : stored.parts) {
      if (!status) return;
      const std::string name = names_of(spec).layer(layer) + std::string(part.module) + ".weight";
      const auto refuse = [&](const std::string& what) {
        status = Status::error(Code::invalid_file, directory_ + ": tensor " + quote(name) + ": " + what);
      };
      const Result<std::optional<Found>> found = look_up(name);
      if (!found || !*found) return;  // load() says what is wrong
      const std::string& dtype = (*found)->entry->stored_dtype;
      const bool is_float8 = dtype.starts_with("F8_");
      if (first.empty()) first = dtype;
      if (is_float8 && dtype != kFp8Dtype)
        refuse(std::string("expected dtype ") + kFp8Dtype + " of an fp8 weight, got " + dtype);
      else if ((first == kFp8Dtype) != is_float8)
        refuse("expected dtype " + (is_float8 ? first : kFp8Dtype) +
               " as the Linears have that it is joined with, got " + dtype);
      else if (is_float8 && stored.transposed)
        refuse("expected a dense weight of a matrix that is stored transposed, got " + dtype);
    }
    if (first == kFp8Dtype) l.weight = fp8_outline(size.out, size.in, fp8_group_size(*fp8_, size.in));
  });
  return status;
}

Status Checkpoint::check_kinds(std::int64_t layer, LayerWeights& weights) const {
  CF_TRY(mark_fp8(layer, weights));
  const ModelSpec spec = config_.spec();
  mark_quantised(spec, gptq_, weights);
  Status status;
  const auto check = [&](std::string_view module, const GptqWeight* gptq, const LinearSize& size) {
    if (!status) return;
    const std::string name = names_of(spec).layer(layer) + std::string(module);
    const auto refuse = [&](const char* part, const std::string& what) {
      status = Status::error(Code::invalid_file, directory_ + ": tensor " + quote(name + part) + ": " + what);
    };
    if (gptq_ && is_quantised(*gptq_, module) != bool(gptq))
      return refuse(gptq ? ".qweight" : ".weight", std::string("expected in modules_in_block_to_quantize ") +
                                                       (gptq ? "as" : "no more than") +
                                                       " the Linears that it is joined with");
    if (!gptq && !has(name + ".weight") && has(name + ".qweight"))
      return refuse(".weight", "expected a dense weight" +
                                   std::string(gptq_ ? " of a Linear that is not quantised" : "") + ", got qweight");
    if (!gptq) return;
    if (!has(name + ".qweight") && has(name + ".weight"))
      return refuse(".qweight", "expected a quantised weight, got the dense weight");
    for (std::int64_t extent : {size.in, size.out})
      if (extent % gptq->codes_per_word())
        return refuse(".qweight", "expected sizes that are multiples of the " + std::to_string(gptq->codes_per_word()) +
                                      " codes in a word, got " + to_string(Shape{size.out, size.in}));
  };
  for_each_linear(spec, weights, [&](const Site& site, const LinearParams& l, const LinearSize& size) {
    for (const StoredPart& part : stored_parts(spec, site, size).parts)
      check(part.module, std::get_if<GptqWeight>(&l.weight), {part.rows, size.in, size.has_bias});
  });
  return status;
}

Status Checkpoint::check_values(std::int64_t layer, LayerWeights& weights, std::vector<std::string>& notes) const {
  Status status;
  for_each_linear(config_, weights, [&](const Site& site, LinearParams& l, auto...) {
    auto* gptq = std::get_if<GptqWeight>(&l.weight);
    if (!gptq || !status) return;
    const std::string name = "tensor '" + config_.family().names.layer(layer) + std::string(site.name) + ".";
    if (const std::string fault = gptq_fault(*gptq); !fault.empty()) {
      status = Status::error(Code::invalid_file, directory_ + ": " + name + fault);
      return;
    }
    const std::string said = gptq_->v2 ? "'gptq_v2'" : "'gptq'";
    const auto note = [&](const std::string& what) { notes.push_back(directory_ + ": " + name + what); };
    gptq->zero_offset = gptq_->v2 ? 0 : 1;
    if (gptq_->sym) {
      const std::int32_t middle = 1 << (gptq->bits - 1);
      const std::optional<std::int32_t> zero = only_zero(*gptq);
      if (zero && (*zero == middle || *zero == middle - 1)) {
        const std::int32_t offset = middle - *zero;
        if (offset != gptq->zero_offset)
          note("qzeros': all are " + std::to_string(*zero) + " with sym, which is format " +
               (offset ? "'gptq'" : "'gptq_v2'") + "; the config says " + said);
        gptq->zero_offset = offset;
      } else {
        note("qzeros': expected all " + std::to_string(middle) + " or all " + std::to_string(middle - 1) +
             " with sym, got others; read as the config's format " + said);
      }
    }
    bool ordered = true;
    for (std::int64_t k = 0; k < gptq->g_idx.size(); ++k)
      ordered = ordered && gptq->g_idx.data[k] == k / gptq->group_size;
    if (!ordered && !gptq_->desc_act)
      note("g_idx': expected input / group_size without desc_act, got others; g_idx counts");
  });
  return status;
}

Result<CheckpointLayer> Checkpoint::layer(std::int64_t index) const {
  if (index < 0 || index >= config_.num_hidden_layers)
    return Status::error(Code::invalid_argument, directory_ + ": layer must be 0 to " +
                                                     std::to_string(config_.num_hidden_layers - 1) + ", got " +
                                                     std::to_string(index));
  try {
    if (!sharded_) CF_TRY(file(single_file()).status());  // what cannot be opened lacks no tensor
    CheckpointLayer layer{.index = index, .weights = {}, .storage = {}, .notes = notes_};
    CF_TRY(check_kinds(index, layer.weights));
    Loader loader(*this);
    CF_TRY(loader.load_all([&](auto&& f) {
      for_each_weight(config_, layer.weights, [&](const TensorSpec& t, auto& view, auto shape) {
        f(config_.family().names.layer(index) + std::string(t.name), view, shape);
      });
    }));
    CF_TRY(loader.load_fp8(index, std::span(&layer.weights, 1)));
    loader.add_notes(layer.notes);
    CF_TRY(check_values(index, layer.weights, layer.notes));
    layer.dtype = loader.dtype();
    layer.storage = loader.storage();
    CF_TRY(check_files());
    return layer;
  } catch (const std::bad_alloc&) {
    return Status::error(Code::out_of_memory, directory_ + ": no memory for layer " + std::to_string(index));
  }
}

Result<CheckpointModel> Checkpoint::model() const {
  try {
    if (!sharded_) CF_TRY(file(single_file()).status());
    CheckpointModel model{.weights = {}, .storage = {}, .notes = notes_};
    std::vector<LayerWeights>& layers = model.weights.layers;
    layers.resize(std::size_t(config_.num_hidden_layers));
    for (std::size_t i = 0; i < layers.size(); ++i) CF_TRY(check_kinds(std::int64_t(i), layers[i]));
    Loader loader(*this);
    CF_TRY(loader.load_all([&](auto&& f) {
      for_each_model_weight(config_, model.weights,
                            [&](const TensorSpec& t, auto& view, auto shape) { f(std::string(t.name), view, shape); });
    }));
    CF_TRY(loader.load_fp8(0, layers));
    loader.add_notes(model.notes);
    for (std::size_t i = 0; i < layers.size(); ++i) CF_TRY(check_values(std::int64_t(i), layers[i], model.notes));
    tie_embeddings(config_, model.weights);
    model.dtype = loader.dtype();
    model.storage = loader.storage();
    CF_TRY(check_files());
    return model;
  } catch (const std::bad_alloc&) {
    return Status::error(Code::out_of_memory, directory_ + ": no memory for the model");
  }
}

template <class V>
Status Checkpoint::check_finite(const std::string& name, const V& view, DType dtype) const {
  if (not_finite(view.data, dtype_of_view<V>(dtype), Shape(view.shape.begin(), view.shape.end())).empty()) return {};
  // The element is named as the file has it.
  Status status;
  const auto check = [&](const std::string& part) {
    if (!status) return;
    const Result<Found> found = find(part);
    status = found.status();
    if (!found) return;
    const DType stored = float_dtype(found->entry->stored_dtype).value_or(DType::i32);
    if (const std::string fault = not_finite(found->entry->data, stored, found->entry->shape); !fault.empty())
      status = Status::error(Code::invalid_file,
                             found->file->path() + ": tensor " + quote(found->entry->name) + ": " + fault);
  };
  if (has_whole(name))
    check(name);
  else
    Joins(config_.spec()).for_each_stored(name, check);
  return status;
}

Status Checkpoint::check_dense_whole() const {
  const Joins joins(config_.spec());
  ModelWeights weights;
  weights.layers.resize(std::size_t(config_.num_hidden_layers));
  for (LayerWeights& layer : weights.layers) mark_quantised(config_.spec(), gptq_, layer);
  Status status;
  for_each_model_weight(config_, weights, [&]<class V>(const TensorSpec& t, const V&, auto) {
    const std::string name(t.name);
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>)
      if (status && joins.find(name) && !has_whole(name))
        status = Status::error(Code::invalid_argument, directory_ + ": tensor " + quote(name) +
                                                           " is missing, expected it whole: its parts are not joined");
  });
  return status;
}

Status Checkpoint::check_finite(const CheckpointLayer& layer) const {
  Status status;
  for_each_weight(config_, layer.weights, [&](const TensorSpec& t, const auto& view, auto) {
    if (status)
      status = check_finite(config_.family().names.layer(layer.index) + std::string(t.name), view, layer.dtype);
  });
  CF_TRY(check_files());
  return status;
}

Status Checkpoint::check_finite(const CheckpointModel& model, const WeightsProgress& progress) const {
  Status status;
  const std::int64_t all_bytes = weight_bytes(config_, model.weights);
  std::int64_t bytes = 0;
  for_each_model_weight(config_, model.weights, [&](const TensorSpec& t, const auto& view, auto) {
    if (status) status = check_finite(std::string(t.name), view, model.dtype);
    bytes += view.bytes();
    if (status && progress) status = progress(bytes, all_bytes);
  });
  CF_TRY(check_files());
  return status;
}

Status Checkpoint::check_names() const {
  const KnownNames known(config_, gptq_, fp8_, in_memory_);
  for (const std::string& name : files()) {
    CF_TRY_ASSIGN(const File shard, file(name));
    for (const TensorEntry& t : shard->tensors()) {
      const auto refuse = [&](const std::string& what) {
        return Status::error(Code::invalid_file, shard->path() + ": tensor " + quote(t.name) + what);
      };
      if (!(in_memory_ ? known.contains(t.name) : known.contains_stored(t.name)))
        return refuse(": expected names of a " + std::string(to_string(config_.model_type)) + " model of " +
                      std::to_string(config_.num_hidden_layers) + " layers, got another");
      if (!sharded_) continue;
      const auto it = shard_of_.find(t.name);
      if (it == shard_of_.end()) return refuse(" is not in the index, expected it there");
      if (it->second != name) return refuse(" is duplicate, expected it in " + quote(it->second) + " alone");
    }
  }
  return {};
}

}  // namespace cf::checkpoint
