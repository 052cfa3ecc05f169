#pragma once
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/layer.hpp"
#include "core/tensor.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "tests/support/temp_dir.hpp"

namespace cf::test {

/// What git-lfs leaves in the place of a file that it has not fetched.
inline std::string lfs_pointer(std::uint64_t bytes) {
  return "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, 'a') + "\nsize " +
         std::to_string(bytes) + "\n";
}

/// A tensor for a file. Without data it is a hole of zeros that takes no room on the disk.
struct StoredTensor {
  std::string name, dtype;
  Shape shape;
  std::int64_t bytes = 0;
  const void* data = nullptr;
};

inline std::string stored_dtype(DType d) {
  return d == DType::f16    ? "F16"
         : d == DType::bf16 ? "BF16"
         : d == DType::f32  ? "F32"
         : d == DType::f64  ? "F64"
                            : "I32";
}

/// The header's member of one tensor.
inline std::string header_member(const std::string& name, const std::string& dtype, const std::string& shape,
                                 std::int64_t begin, std::int64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

/// The header of tensors that lie one behind the other.
inline std::string safetensors_header(const std::vector<StoredTensor>& tensors) {
  std::string json = "{\"__metadata__\":{\"format\":\"pt\"}";
  std::int64_t begin = 0;
  for (const StoredTensor& t : tensors) {
    std::string shape;
    for (std::int64_t d : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    json += "," + header_member(t.name, t.dtype, shape, begin, begin + t.bytes);
    begin += t.bytes;
  }
  return json + "}";
}

/// A header as files begin: its length and its text.
inline std::string with_length(std::string_view header, std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += char(length >> (8 * i) & 255);
  return bytes.append(header);
}
inline std::string with_length(std::string_view header) { return with_length(header, header.size()); }

/// Writes a safetensors file whose buffer begins at a multiple of 8 bytes plus `shift`.
inline void write_safetensors(const std::string& path, const std::vector<StoredTensor>& tensors,
                              std::size_t shift = 0) {
  std::string header = safetensors_header(tensors);
  header.resize((header.size() + 7) / 8 * 8 + shift, ' ');
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const std::string start = with_length(header);
  file.write(start.data(), std::streamsize(start.size()));
  std::int64_t end = std::int64_t(start.size());
  for (const StoredTensor& t : tensors) {
    if (t.data) {
      file.seekp(end);
      file.write(static_cast<const char*>(t.data), t.bytes);
    }
    end += t.bytes;
  }
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
  std::filesystem::resize_file(path, std::uintmax_t(end));
}

/// A layer's tensors by their full names, without data where `weights` is empty. The views must outlive the result.
inline std::vector<StoredTensor> layer_tensors(const ModelConfig& m, std::int64_t layer,
                                               const LayerWeights& weights = {}) {
  std::vector<StoredTensor> tensors;
  for_each_weight(m, weights, [&](const TensorSpec& spec, const auto& view, auto shape) {
    const DType dtype = dtype_of_view<std::remove_cvref_t<decltype(view)>>(m.dtype);
    StoredTensor t{m.family().names.layer(layer) + std::string(spec.name), stored_dtype(dtype),
                   Shape(shape.begin(), shape.end()), 0, view.data};
    t.bytes = element_count(t.shape) * std::int64_t(size_bytes(dtype));
    tensors.push_back(std::move(t));
  });
  return tensors;
}

/// Shard i of n as save_pretrained names it, i from 0.
inline std::string shard_name(std::size_t i, std::size_t n) {
  const auto five = [](std::size_t v) {
    const std::string s = std::to_string(v);
    return std::string(5 - s.size(), '0') + s;
  };
  return "model-" + five(i + 1) + "-of-" + five(n) + ".safetensors";
}

/// Writes a checkpoint directory: config.json, and model.safetensors where there is one shard, else the shards and
/// their index.
inline void write_checkpoint(const std::string& directory, const ModelConfig& m,
                             const std::vector<std::vector<StoredTensor>>& shards, std::size_t shift = 0) {
  write_file(directory + "/config.json", checkpoint::to_hf_json(m));
  if (shards.size() == 1) return write_safetensors(directory + "/model.safetensors", shards[0], shift);
  std::string map;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    write_safetensors(directory + "/" + name, shards[i], shift);
    for (const StoredTensor& t : shards[i]) {
      map += (map.empty() ? "\"" : ",\"") + t.name + "\":\"" + name + "\"";
      bytes += t.bytes;
    }
  }
  write_file(directory + "/model.safetensors.index.json",
             "{\"metadata\":{\"total_size\":" + std::to_string(bytes) + "},\"weight_map\":{" + map + "}}");
}

}  // namespace cf::test
