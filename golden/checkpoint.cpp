#include "golden/checkpoint.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <new>
#include <optional>
#include <set>
#include <system_error>

#include "core/layer.hpp"
#include "golden/hf_config.hpp"
#include "golden/json.hpp"
#include "golden/mapped_file.hpp"

namespace cf::golden {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr std::string_view kLayers = "gpt_neox.layers.";

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

/// What a directory without safetensors files is told.
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

/// Reads the index: tensor name -> shard, each of them a file beside it.
Result<std::map<std::string, std::string>> read_index(const std::string& directory) {
  const std::string path = join(directory, kIndexFile);
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, path + ": " + what); };
  const Result<MappedFile> file = map_file(path);
  if (!file) return file.status();
  const Result<Json> index = parse_json_object(file->text(), path);
  if (!index) return index.status();

  if (const auto metadata = index->find("metadata"); metadata != index->end() && !metadata->is_null()) {
    if (!metadata->is_object()) return refuse("'metadata': expected an object, got " + shown(*metadata));
    const auto total = metadata->find("total_size");
    if (total != metadata->end() && !(total->is_number() && total->get<double>() >= 0))
      return refuse("'metadata.total_size': expected a number of bytes, got " + shown(*total));
  }
  const auto weight_map = index->find("weight_map");
  if (weight_map == index->end()) return refuse("'weight_map' is missing, expected an object of tensor to shard");
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

/// What the directory says of quantisation, in the files' order of precedence; what they disagree about goes to
/// `notes`.
Result<std::optional<GptqConfig>> read_gptq_config(const std::string& directory, std::vector<std::string>& notes) {
  std::optional<GptqConfig> first;
  std::string first_source;
  const auto add = [&](std::string_view text, const std::string& source) -> Status {
    const Result<GptqConfig> c = parse_gptq_config(text, source);
    if (!c) return c.status();
    if (first && *first != *c) notes.push_back(source + ": differs from " + first_source + ", which counts");
    if (!first) {
      first = *c;
      first_source = source;
    }
    return {};
  };
  for (const char* name : {"quantize_config.json", "quant_config.json"}) {
    const std::string path = join(directory, name);
    if (!is_file(path)) continue;
    const Result<MappedFile> file = map_file(path);
    if (!file) return file.status();
    CF_TRY(add(file->text(), path));
  }
  const std::string path = join(directory, "config.json");
  const Result<MappedFile> file = map_file(path);
  if (!file) return file.status();
  const Result<Json> config = parse_json_object(file->text(), path);
  if (!config) return config.status();
  if (const auto it = config->find("quantization_config"); it != config->end() && !it->is_null())
    CF_TRY(add(it->dump(), path + ": 'quantization_config'"));
  return first;
}

/// Gives each Linear that the config says is quantised such a weight, still without tensors.
void mark_quantised(const ModelConfig& m, const std::optional<GptqConfig>& gptq, LayerWeights& weights) {
  if (!gptq) return;
  for_each_linear(m, weights, [&](std::string_view module, LinearParams& l, std::int64_t, std::int64_t in, bool) {
    if (std::find(gptq->modules.begin(), gptq->modules.end(), module) != gptq->modules.end())
      l.weight = GptqWeight{.bits = gptq->bits, .group_size = gptq->group_size == -1 ? in : gptq->group_size};
  });
}

/// What is wrong with the values of a quantised matrix, as "tensor: what".
std::string gptq_fault(const GptqWeight& w) {
  const std::int64_t groups = w.scales.shape[0], out = w.scales.shape[1];
  for (std::int64_t k = 0; k < w.g_idx.size(); ++k)
    if (w.g_idx.data[k] < 0 || w.g_idx.data[k] >= groups)
      return "g_idx': element " + std::to_string(k) + ": expected 0 to " + std::to_string(groups - 1) + ", got " +
             std::to_string(w.g_idx.data[k]);
  for (std::int64_t i = 0; i < w.scales.size(); ++i)
    if (const double s = widen<double>(w.scales.data[i]); !std::isfinite(s))
      return "scales': element (" + std::to_string(i / out) + ", " + std::to_string(i % out) +
             "): expected a finite number, got " + (std::isnan(s) ? "NaN" : "infinity");
  return "";
}

/// The code that every zero is stored as, if it is one.
std::optional<std::int32_t> only_zero(const GptqWeight& w) {
  const std::int32_t first = w.qzeros.data[0] & ((1 << w.bits) - 1);
  std::uint32_t word = 0;
  for (int shift = 0; shift < 32; shift += w.bits) word |= std::uint32_t(first) << shift;
  for (std::int64_t i = 0; i < w.qzeros.size(); ++i)
    if (std::uint32_t(w.qzeros.data[i]) != word) return std::nullopt;
  return first;
}

/// The names that a GPT-NeoX checkpoint may hold, with those below gpt_neox.layers.N given once.
class KnownNames {
 public:
  KnownNames(const ModelConfig& m, const std::optional<GptqConfig>& gptq) : layers_(m.num_hidden_layers) {
    LayerWeights weights;
    mark_quantised(m, gptq, weights);
    for_each_weight(m, weights, [&](std::string_view name, auto&, auto) { in_layer_.emplace(name); });
  }
  bool contains(std::string_view name) const {
    if (!name.starts_with(kLayers))
      return name == "gpt_neox.embed_in.weight" || name == "gpt_neox.final_layer_norm.weight" ||
             name == "gpt_neox.final_layer_norm.bias" || name == "embed_out.weight";
    name.remove_prefix(kLayers.size());
    std::int64_t layer = -1;
    const auto [dot, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
    if (error != std::errc() || layer < 0 || layer >= layers_) return false;
    // Not "007": it would be another name for layer 7.
    const std::string number = std::to_string(layer) + ".";
    return name.starts_with(number) && in_layer_.contains(name.substr(number.size()));
  }

 private:
  std::int64_t layers_;
  // From the start with the buffers that old versions of transformers saved.
  std::set<std::string, std::less<>> in_layer_{"attention.bias", "attention.masked_bias",
                                               "attention.rotary_emb.inv_freq"};
};

}  // namespace

Result<Checkpoint> Checkpoint::open(const std::string& directory) {
  std::error_code none;
  const fs::file_status status = fs::status(directory, none);
  if (!fs::exists(status)) return Status::error(Code::not_found, directory + ": no such directory");
  if (!fs::is_directory(status))
    return Status::error(Code::invalid_file, directory + ": is no directory, expected a checkpoint's");
  Result<ModelConfig> config = read_hf_config(join(directory, "config.json"));
  if (!config) return config.status();

  Checkpoint c;
  c.directory_ = directory;
  c.config_ = std::move(*config);
  if (c.config_.name.empty()) {
    const fs::path path(directory);
    c.config_.name = (path.has_filename() ? path : path.parent_path()).filename().string();
  }
  Result<std::optional<GptqConfig>> gptq = read_gptq_config(directory, c.notes_);
  if (!gptq) return gptq.status();
  c.gptq_ = std::move(*gptq);
  if (is_file(join(directory, kSingleFile))) return c;
  if (!is_file(join(directory, kIndexFile))) return no_safetensors(directory);
  auto shard_of = read_index(directory);
  if (!shard_of) return shard_of.status();
  c.sharded_ = true;
  c.shard_of_ = std::move(*shard_of);
  return c;
}

Result<const SafetensorsFile*> Checkpoint::file(const std::string& name) {
  auto it = open_files_.find(name);
  if (it == open_files_.end()) {
    Result<SafetensorsFile> opened = SafetensorsFile::open(join(directory_, name));
    if (!opened) return opened.status();
    it = open_files_.emplace(name, std::move(*opened)).first;
  }
  return &it->second;
}

Result<Checkpoint::Found> Checkpoint::find(const std::string& name) {
  std::string file_name = kSingleFile;
  if (sharded_) {
    const auto it = shard_of_.find(name);
    if (it == shard_of_.end())
      return Status::error(Code::not_found, join(directory_, kIndexFile) + ": tensor " + quote(name) +
                                                " is missing, expected its shard");
    file_name = it->second;
  }
  const Result<const SafetensorsFile*> holder = file(file_name);
  if (!holder) return holder.status();
  const TensorEntry* entry = (*holder)->find(name);
  if (!entry)
    return Status::error(Code::not_found, (*holder)->path() + ": tensor " + quote(name) + " is missing" +
                                              (sharded_ ? ", expected by the index" : ""));
  return Found{*holder, entry};
}

bool Checkpoint::has(const std::string& name) {
  if (sharded_) return shard_of_.contains(name);
  const Result<const SafetensorsFile*> holder = file(kSingleFile);
  return holder && (*holder)->find(name);
}

Result<CheckpointLayer> Checkpoint::layer(std::int64_t index) {
  if (index < 0 || index >= config_.num_hidden_layers)
    return Status::error(Code::invalid_argument, directory_ + ": layer must be 0 to " +
                                                     std::to_string(config_.num_hidden_layers - 1) + ", got " +
                                                     std::to_string(index));
  CheckpointLayer layer;
  layer.notes = notes_;
  mark_quantised(config_, gptq_, layer.weights);
  const std::string prefix = std::string(kLayers) + std::to_string(index) + ".";
  std::string first;  // the tensor whose dtype all others must have
  Status status;
  const auto load = [&]<class V>(std::string_view name, V& view, auto shape) -> Status {
    const std::string full_name = prefix + std::string(name);
    const Result<Found> found = find(full_name);
    if (!found) return found.status();
    const SafetensorsFile* holder = found->file;
    const TensorEntry* entry = found->entry;
    const auto refuse = [&](const std::string& what, const std::string& got) {
      return Status::error(Code::invalid_file,
                           holder->path() + ": tensor " + quote(full_name) + ": expected " + what + ", got " + got);
    };
    const Shape expected(shape.begin(), shape.end());
    if (entry->shape != expected) return refuse("shape " + to_string(expected), to_string(entry->shape));
    auto dtype = weight_dtype(entry->stored_dtype);
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>) {
      if (!dtype) return refuse("dtype F16, BF16 or F32", entry->stored_dtype);
      if (first.empty()) {
        first = full_name;
        layer.dtype = *dtype;
      }
      if (*dtype != layer.dtype)
        return refuse("dtype " + std::string(to_string(layer.dtype)) + " as " + quote(first) + " has",
                      std::string(to_string(*dtype)));
    } else {
      const std::string_view part = V::dtype == DType::i32 ? "I32" : "F16";
      if (entry->stored_dtype != part) return refuse("dtype " + std::string(part), entry->stored_dtype);
      dtype = V::dtype;
    }

    const void* data = entry->data;
    if (reinterpret_cast<std::uintptr_t>(data) % size_bytes(*dtype)) {
      Tensor copy(*dtype, expected);
      std::memcpy(copy.data(), data, std::size_t(entry->bytes));
      data = copy.data();
      layer.copies.push_back(std::move(copy));
    }
    point(view, data, shape, *dtype);
    if (std::none_of(layer.files.begin(), layer.files.end(),
                     [&](const SafetensorsFile& f) { return f.path() == holder->path(); }))
      layer.files.push_back(*holder);
    return {};
  };
  // Of a Linear, before its tensors are asked for: sizes that give them no shape, and a tensor of the other kind.
  const auto check_kind = [&](std::string_view module, const LinearParams& l, std::int64_t out,
                              std::int64_t in) -> Status {
    const std::string name = prefix + std::string(module);
    const auto refuse = [&](const char* part, const std::string& what) {
      return Status::error(Code::invalid_file, directory_ + ": tensor " + quote(name + part) + ": " + what);
    };
    const auto* gptq = std::get_if<GptqWeight>(&l.weight);
    if (!gptq && !has(name + ".weight") && has(name + ".qweight"))
      return refuse(".weight", "expected a dense weight" +
                                   std::string(gptq_ ? " of a Linear that is not quantised" : "") + ", got qweight");
    if (!gptq) return {};
    if (!has(name + ".qweight") && has(name + ".weight"))
      return refuse(".qweight", "expected a quantised weight, got the dense weight");
    for (std::int64_t size : {in, out})
      if (size % gptq->codes_per_word())
        return refuse(".qweight", "expected sizes that are multiples of the " + std::to_string(gptq->codes_per_word()) +
                                      " codes in a word, got " + to_string(Shape{out, in}));
    return {};
  };
  // And after: its values, and what its zeros say of the format.
  const auto check_values = [&](std::string_view module, LinearParams& l) -> Status {
    auto* gptq = std::get_if<GptqWeight>(&l.weight);
    if (!gptq) return {};
    const std::string name = "tensor '" + prefix + std::string(module) + ".";
    if (const std::string fault = gptq_fault(*gptq); !fault.empty())
      return Status::error(Code::invalid_file, directory_ + ": " + name + fault);
    const std::string said = gptq_->v2 ? "'gptq_v2'" : "'gptq'";
    const auto note = [&](const std::string& what) { layer.notes.push_back(directory_ + ": " + name + what); };
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
    return {};
  };
  try {
    for_each_linear(config_, layer.weights, [&](std::string_view module, auto& l, auto out, auto in, bool) {
      if (status) status = check_kind(module, l, out, in);
    });
    for_each_weight(config_, layer.weights, [&](std::string_view name, auto& view, auto shape) {
      if (status) status = load(name, view, shape);
    });
    for_each_linear(config_, layer.weights, [&](std::string_view module, auto& l, auto...) {
      if (status) status = check_values(module, l);
    });
  } catch (const std::bad_alloc&) {
    return Status::error(Code::out_of_memory, directory_ + ": no memory for layer " + std::to_string(index));
  }
  if (!status) return status;
  return layer;
}

Status Checkpoint::check_names() {
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shard_of_) names.insert(shard);
  if (!sharded_) names.insert(kSingleFile);
  const KnownNames known(config_, gptq_);
  for (const std::string& name : names) {
    const Result<const SafetensorsFile*> shard = file(name);
    if (!shard) return shard.status();
    for (const TensorEntry& t : (*shard)->tensors()) {
      const auto refuse = [&](const std::string& what) {
        return Status::error(Code::invalid_file, (*shard)->path() + ": tensor " + quote(t.name) + what);
      };
      if (!known.contains(t.name))
        return refuse(": expected names of a GPT-NeoX model of " + std::to_string(config_.num_hidden_layers) +
                      " layers, got another");
      if (!sharded_) continue;
      const auto it = shard_of_.find(t.name);
      if (it == shard_of_.end()) return refuse(" is not in the index, expected it there");
      if (it->second != name) return refuse(" is duplicate, expected it in " + quote(it->second) + " alone");
    }
  }
  return {};
}

}  // namespace cf::golden
