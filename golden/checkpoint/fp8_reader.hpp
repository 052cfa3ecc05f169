#pragma once
// Private to the checkpoint library: fp8 Linears from the tensors that files have of them.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include "core/fp8.hpp"
#include "core/model/weights.hpp"
#include "golden/checkpoint/fp8_config.hpp"
#include "golden/checkpoint/safetensors.hpp"

namespace cf::checkpoint {

/// How safetensors files spell the dtype of fp8 weights.
inline constexpr const char* kFp8Dtype = "F8_E4M3";

/// The inputs that share a scale in a Linear's Fp8Weight.
inline std::int64_t fp8_group_size(const Fp8Config& config, std::int64_t in) {
  return config.scales == Fp8Scales::block ? std::min(kFp8Block, in) : in;
}

/// Finds a tensor by its name, which must be there, and the path of its file.
struct FoundTensor {
  const TensorEntry* entry;
  std::string file;
};
using FindTensor = std::function<Result<FoundTensor>(const std::string& name)>;

/// Reads a Linear of `in` inputs, whose modules' names stand behind `prefix`. Refuses, naming file and tensor: what
/// find() refuses; codes or scales of another shape or dtype; a code that is NaN; a scale that is not finite.
Result<OwnedFp8> read_fp8(const Fp8Config& config, const std::string& prefix, const StoredParts& stored,
                          std::int64_t in, const FindTensor& find);

}  // namespace cf::checkpoint
