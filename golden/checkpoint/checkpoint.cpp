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

#include "core/resources.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "golden/checkpoint/json.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

/// The dtypes that a weight may have, as files spell them.
std::optional<DType> weight_dtype(std::string_view stored) {
  if (stored == "F16") return DType::f16;
  if (stored == "BF16") return DType::bf16;
  if (stored == "F32") return DType::f32;
  return std::nullopt;
}

std::string join(const std::string& directory, const std::string& name) {
  return (fs::path(directory) / name).string();
}

bool is_file(const std::string& path) {
  std::error_code none;
  return fs::is_regular_file(path, none);
}

/// The refusal of a directory without safetensors files.
Status no_safetensors(const std::string& directory) {
  std::error_code error;
  std::string bin;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    if (it->path().extension() == ".bin") bin = std::max(bin, it->path().filename().string());
  const std::string expected = std::string("expected ") + kSingleFile + " or " + kIndexFile;
  if (bin.empty()) return Status::error(Code::not_found, directory + ": holds no safetensors file, " + expected);
  return Status::error(Code::not_found,
                       directory + ": holds " + quote(bin) + " but no safetensors file, " + expected +
                           "; convert it with: python3 -c \"from transformers import AutoModelForCausalLM as M; "
                           "M.from_pretrained('" +
                           directory + "', torch_dtype='auto').save_pretrained('OUT', safe_serialization=True)\"");
}

/// Reads the index: tensor name -> shard. Every shard must be a file beside the index.
Result<std::map<std::string, std::string>> read_index(const std::string& directory) {
  const std::string path = join(directory, kIndexFile);
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
    if (shard.empty() || shard == "." || shard == ".." ||
        shard.find_first_of(std::string_view("/\\\0", 3)) != shard.npos)
      return refuse(where + "expected a plain file name for its shard, got " + quote(shard));
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

/// The directory's GPTQ config: that of the first file which has one. A note says where a later file differs.
Result<std::optional<GptqConfig>> read_gptq_config(const std::string& directory, ModelFamily family,
                                                   std::vector<std::string>& notes) {
  std::optional<GptqConfig> first;
  std::string first_source;
  const auto add = [&](std::string_view text, const std::string& source) -> Status {
    CF_TRY_ASSIGN(GptqConfig c, parse_gptq_config(text, source, family));
    if (first && *first != c) notes.push_back(source + ": differs from " + first_source + ", which counts");
    if (!first) {
      first = std::move(c);
      first_source = source;
    }
    return {};
  };
  for (const char* name : {"quantize_config.json", "quant_config.json"}) {
    const std::string path = join(directory, name);
    if (!is_file(path)) continue;
    CF_TRY_ASSIGN(const MappedFile file, map_file(path));
    CF_TRY(add(file.text(), path));
  }
  const std::string path = join(directory, "config.json");
  CF_TRY_ASSIGN(const MappedFile file, map_file(path));
  CF_TRY_ASSIGN(const std::string inner, quantization_config(file.text(), path));
  if (!inner.empty()) CF_TRY(add(inner, path + kQuantizationConfig));
  return first;
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

/// The one code of qzeros, where all of them hold the same code.
std::optional<std::int32_t> only_zero(const GptqWeight& w) {
  const std::int32_t first = w.qzeros.data[0] & ((1 << w.bits) - 1);
  std::uint32_t word = 0;
  for (int shift = 0; shift < 32; shift += w.bits) word |= std::uint32_t(first) << shift;
  for (std::int64_t i = 0; i < w.qzeros.size(); ++i)
    if (std::uint32_t(w.qzeros.data[i]) != word) return std::nullopt;
  return first;
}

/// The Linears that a checkpoint stores in several modules, by their names below the layer.
class Joins {
 public:
  explicit Joins(const ModelSpec& m) : layers_(names_of(m).layers) {
    for_each_linear(m, LayerWeights{}, [&](const Site& site, const auto&, const LinearSize& size) {
      if (StoredParts stored = stored_parts(m, site, size); stored.parts.size() > 1)
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
  };
  /// What a tensor's name means, where it is one of a joined Linear. The result refers to `name`.
  std::optional<Tensor> find(std::string_view name) const {
    if (!name.starts_with(layers_)) return std::nullopt;
    const std::size_t module = name.find('.', layers_.size()) + 1, kind = name.rfind('.') + 1;
    if (module == 0 || kind <= module) return std::nullopt;
    const auto found = joined_.find(name.substr(module, kind - 1 - module));
    if (found == joined_.end()) return std::nullopt;
    return Tensor{&found->second, std::string(name.substr(0, module)), name.substr(kind)};
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

/// Copies a part's elements along `axis` (0 or 1) of a tensor to their places in the joined tensor. A word of packed
/// codes counts as `codes` places of `32 / codes` bits.
void copy_part(const StoredParts& stored, std::size_t part, const void* from, void* to, const Shape& whole, int axis,
               std::size_t element_bytes, std::int64_t codes) {
  const std::int64_t rows = stored.parts[part].rows, all_rows = whole[std::size_t(axis)] * codes;
  const std::int64_t outer = axis == 1 ? whole[0] : 1;
  const std::size_t row_bytes = element_bytes * std::size_t(axis == 0 && whole.size() == 2 ? whole[1] : 1);
  for (std::int64_t o = 0; o < outer; ++o)
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t source = o * rows + r, target = o * all_rows + stored.place(part, r);
      if (codes == 1) {
        std::memcpy(static_cast<char*>(to) + std::size_t(target) * row_bytes,
                    static_cast<const char*>(from) + std::size_t(source) * row_bytes, row_bytes);
        continue;
      }
      const std::int64_t bits = 32 / codes;
      const std::uint32_t mask = (1u << bits) - 1;
      const auto word = std::uint32_t(static_cast<const std::int32_t*>(from)[source / codes]);
      auto& joined = static_cast<std::uint32_t*>(to)[target / codes];
      joined |= (word >> (source % codes * bits) & mask) << (target % codes * bits);
    }
}

/// The names of tensors in a checkpoint.
class KnownNames {
 public:
  KnownNames(const ModelConfig& m, const std::optional<GptqConfig>& gptq, bool in_memory)
      : layers_(m.num_hidden_layers), names_(names_of(m.family())) {
    const Joins joins(m.spec());
    for (std::string_view buffer : names_.buffers)
      if (!buffer.empty()) in_layer_.emplace(buffer);
    ModelSpec untied = m.spec();  // some checkpoints hold a tied LM head beside the embedding
    untied.traits.tied_embeddings = false;
    ModelWeights rest;
    for_each_model_weight(untied, rest, [&](const TensorSpec& t, auto&, auto) { outside_.emplace(t.name); });
    LayerWeights weights;
    mark_quantised(m.spec(), gptq, weights);
    const std::string prefix = names_.layer(0);
    for_each_weight(m, weights, [&](const TensorSpec& t, auto&, auto) {
      if (in_memory) in_layer_.emplace(t.name);
      joins.for_each_stored(prefix + std::string(t.name),
                            [&](const std::string& name) { in_layer_.insert(name.substr(prefix.size())); });
    });
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
  CF_TRY_ASSIGN(c.config_, read_hf_config(join(directory, "config.json")));
  if (c.config_.name.empty()) {
    const fs::path path(directory);
    c.config_.name = (path.has_filename() ? path : path.parent_path()).filename().string();
  }
  CF_TRY_ASSIGN(c.gptq_, read_gptq_config(directory, c.config_.family(), c.notes_));
  if (is_file(join(directory, kSingleFile))) return c;
  if (!is_file(join(directory, kIndexFile))) return no_safetensors(directory);
  c.sharded_ = true;
  CF_TRY_ASSIGN(c.shard_of_, read_index(directory));
  return c;
}

struct Checkpoint::OpenFiles {
  std::mutex mutex;
  std::map<std::string, File> files;
};

Result<Checkpoint> Checkpoint::from_memory(std::string_view config, std::optional<std::string_view> gptq,
                                           std::vector<TensorEntry> tensors, std::shared_ptr<const void> owner,
                                           const std::string& source) {
  Checkpoint c;
  c.directory_ = source;
  c.in_memory_ = true;
  CF_TRY_ASSIGN(c.config_, parse_hf_config(config, source + ": config"));
  CF_TRY_ASSIGN(const std::string inner, quantization_config(config, source + ": config"));
  if (gptq) {
    CF_TRY_ASSIGN(c.gptq_, parse_gptq_config(*gptq, source + ": gptq", c.config_.family()));
  } else if (!inner.empty()) {
    CF_TRY_ASSIGN(c.gptq_, parse_gptq_config(inner, source + ": config" + kQuantizationConfig, c.config_.family()));
  }
  c.open_files_->files[kSingleFile] =
      std::make_shared<const SafetensorsFile>(SafetensorsFile::in_memory(std::move(tensors), std::move(owner), source));
  return c;
}

Checkpoint::Checkpoint() : open_files_(std::make_shared<OpenFiles>()) {}

CheckpointStorage::~CheckpointStorage() {
  for (const TensorEntry* t : mapped) drop_pages(t->data, std::uint64_t(t->bytes));
}

Status Checkpoint::check_files() const {
  const std::lock_guard lock(open_files_->mutex);
  for (const auto& [name, file] : open_files_->files)
    if (file) CF_TRY(file->check_file());
  return {};
}

std::vector<std::string> Checkpoint::changes() const {
  const std::lock_guard lock(open_files_->mutex);
  std::vector<std::string> notes;
  for (const auto& [name, file] : open_files_->files)
    if (file && file->is_changed()) notes.push_back(file->path() + ": was changed while it was used");
  return notes;
}

Result<Checkpoint::File> Checkpoint::file(const std::string& name) const {
  const std::lock_guard lock(open_files_->mutex);
  File& file = open_files_->files[name];
  if (!file) {
    CF_TRY_ASSIGN(SafetensorsFile opened, SafetensorsFile::open(join(directory_, name)));
    file = std::make_shared<const SafetensorsFile>(std::move(opened));
  }
  return file;
}

Result<Checkpoint::Found> Checkpoint::find(const std::string& name) const {
  std::string file_name = kSingleFile;
  if (sharded_) {
    const auto it = shard_of_.find(name);
    if (it == shard_of_.end())
      return Status::error(Code::not_found, join(directory_, kIndexFile) + ": tensor " + quote(name) +
                                                " is missing, expected its shard");
    file_name = it->second;
  }
  CF_TRY_ASSIGN(File holder, file(file_name));
  const TensorEntry* entry = holder->find(name);
  if (!entry)
    return Status::error(Code::not_found, holder->path() + ": tensor " + quote(name) + " is missing" +
                                              (sharded_ ? ", expected by the index" : ""));
  return Found{std::move(holder), entry};
}

bool Checkpoint::has(const std::string& name) const {
  if (sharded_) return shard_of_.contains(name);
  const Result<File> holder = file(kSingleFile);
  return holder && (*holder)->find(name);
}

bool Checkpoint::has_whole(const std::string& name) const { return in_memory_ && has(name); }

/// Points views to tensors: to those of the file, and of joined Linears to memory of their own. All that are not
/// quantised have the dtype of the first.
class Checkpoint::Loader {
 public:
  explicit Loader(const Checkpoint& checkpoint) : checkpoint_(checkpoint), joins_(checkpoint.config_.spec()) {}

  template <class V>
  Status load(const std::string& name, V& view, const std::array<std::int64_t, V::rank>& shape) {
    if (checkpoint_.has_whole(name)) return load_stored(name, view, shape);
    const std::optional<Joins::Tensor> joined = joins_.find(name);
    return joined ? join(*joined, view, shape) : load_stored(name, view, shape);
  }
  DType dtype() const { return dtype_; }
  std::shared_ptr<const CheckpointStorage> storage() const { return storage_; }

 private:
  template <class V>
  Status join(const Joins::Tensor& joined, V& view, const std::array<std::int64_t, V::rank>& shape) {
    const std::vector<StoredPart>& parts = joined.stored->parts;
    const std::size_t mapped = storage_->mapped.size();
    const int axis = V::rank == 2 && joined.kind != "weight" ? 1 : 0;
    const std::int64_t codes = joined.kind == "qzeros" ? 32 / checkpoint_.gptq_->bits : 1;
    Tensor whole;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      V part;
      std::array<std::int64_t, V::rank> part_shape = shape;
      if (joined.kind != "g_idx") part_shape[std::size_t(axis)] = parts[p].rows / codes;
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
        CF_TRY(check_free_memory(needed, checkpoint_.directory_ + ": to join " + joined.name(0) +
                                             " with others needs " + gigabytes(needed)));
        whole = Tensor(part.dtype, Shape(shape.begin(), shape.end()));
      }
      copy_part(*joined.stored, p, part.data, whole.data(), whole.shape(), axis, size_bytes(part.dtype), codes);
    }
    if (joined.kind == "g_idx") return {};
    point(view, whole.data(), shape, whole.dtype());
    storage_->copies.push_back(std::move(whole));
    for (; storage_->mapped.size() > mapped; storage_->mapped.pop_back())
      drop_pages(storage_->mapped.back()->data, std::uint64_t(storage_->mapped.back()->bytes));
    return {};
  }

  template <class V>
  Status load_stored(const std::string& name, V& view, const std::array<std::int64_t, V::rank>& shape) {
    CF_TRY_ASSIGN(const Found found, checkpoint_.find(name));
    const TensorEntry& entry = *found.entry;
    const auto refuse = [&](const std::string& what, const std::string& got) {
      return Status::error(Code::invalid_file,
                           found.file->path() + ": tensor " + quote(name) + ": expected " + what + ", got " + got);
    };
    const Shape expected(shape.begin(), shape.end());
    if (entry.shape != expected) return refuse("shape " + to_string(expected), to_string(entry.shape));
    auto dtype = weight_dtype(entry.stored_dtype);
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>) {
      if (!dtype) return refuse("dtype F16, BF16 or F32", entry.stored_dtype);
      if (first_.empty()) {
        first_ = name;
        dtype_ = *dtype;
      }
      if (*dtype != dtype_)
        return refuse("dtype " + std::string(to_string(dtype_)) + " as " + quote(first_) + " has",
                      std::string(to_string(*dtype)));
    } else {
      const std::string_view part = V::dtype == DType::i32 ? "I32" : "F16";
      if (entry.stored_dtype != part) return refuse("dtype " + std::string(part), entry.stored_dtype);
      dtype = V::dtype;
    }

    const void* data = entry.data;
    if (reinterpret_cast<std::uintptr_t>(data) % size_bytes(*dtype)) {
      Tensor copy(*dtype, expected);
      std::memcpy(copy.data(), data, std::size_t(entry.bytes));
      data = copy.data();
      storage_->copies.push_back(std::move(copy));
    }
    point(view, data, shape, *dtype);
    if (found.file->is_mapped()) storage_->mapped.push_back(&entry);
    if (std::find(storage_->files.begin(), storage_->files.end(), found.file) == storage_->files.end())
      storage_->files.push_back(found.file);
    return {};
  }

  const Checkpoint& checkpoint_;
  Joins joins_;
  std::string first_;  // the tensor with which all others must share the dtype
  DType dtype_ = DType::f16;
  std::shared_ptr<CheckpointStorage> storage_ = std::make_shared<CheckpointStorage>();
};

Status Checkpoint::check_kinds(std::int64_t layer, LayerWeights& weights) const {
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
    const std::string name = "tensor '" + names_of(config_.family()).layer(layer) + std::string(site.name) + ".";
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
    CheckpointLayer layer{.index = index, .weights = {}, .storage = {}, .notes = notes_};
    CF_TRY(check_kinds(index, layer.weights));
    Loader loader(*this);
    Status status;
    for_each_weight(config_, layer.weights, [&](const TensorSpec& t, auto& view, auto shape) {
      if (status) status = loader.load(names_of(config_.family()).layer(index) + std::string(t.name), view, shape);
    });
    CF_TRY(status);
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
    CheckpointModel model{.weights = {}, .storage = {}, .notes = notes_};
    std::vector<LayerWeights>& layers = model.weights.layers;
    layers.resize(std::size_t(config_.num_hidden_layers));
    for (std::size_t i = 0; i < layers.size(); ++i) CF_TRY(check_kinds(std::int64_t(i), layers[i]));
    Loader loader(*this);
    Status status;
    for_each_model_weight(config_, model.weights, [&](const TensorSpec& t, auto& view, auto shape) {
      if (status) status = loader.load(std::string(t.name), view, shape);
    });
    CF_TRY(status);
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
  const DType stored = dtype_of_view<V>(dtype);
  if (not_finite(view.data, stored, Shape(view.shape.begin(), view.shape.end())).empty()) return {};
  // The element is named as the file has it.
  Status status;
  const auto check = [&](const std::string& part) {
    if (!status) return;
    const Result<Found> found = find(part);
    status = found.status();
    if (!found) return;
    if (const std::string fault = not_finite(found->entry->data, stored, found->entry->shape); !fault.empty())
      status = Status::error(Code::invalid_file, found->file->path() + ": tensor " + quote(part) + ": " + fault);
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
      status = check_finite(names_of(config_.family()).layer(layer.index) + std::string(t.name), view, layer.dtype);
  });
  CF_TRY(check_files());
  return status;
}

Status Checkpoint::check_finite(const CheckpointModel& model) const {
  Status status;
  for_each_model_weight(config_, model.weights, [&](const TensorSpec& t, const auto& view, auto) {
    if (status) status = check_finite(std::string(t.name), view, model.dtype);
  });
  CF_TRY(check_files());
  return status;
}

Status Checkpoint::check_names() const {
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shard_of_) names.insert(shard);
  if (!sharded_) names.insert(kSingleFile);
  const KnownNames known(config_, gptq_, in_memory_);
  for (const std::string& name : names) {
    CF_TRY_ASSIGN(const File shard, file(name));
    for (const TensorEntry& t : shard->tensors()) {
      const auto refuse = [&](const std::string& what) {
        return Status::error(Code::invalid_file, shard->path() + ": tensor " + quote(t.name) + what);
      };
      if (!known.contains(t.name))
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
