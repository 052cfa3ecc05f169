#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.hpp"

namespace cf::checkpoint {

/// Which elements of a stored fp8 matrix share a scale.
enum class Fp8Scales : std::uint8_t {
  tensor,   // all of them
  channel,  // those of a row
  block,    // those of a block of kFp8Block rows and columns; the last blocks may be smaller
};

inline constexpr std::int64_t kFp8Block = 128;

/// A checkpoint's description of its fp8 weights. Which Linears are fp8 is said by the dtypes of the files' tensors.
struct Fp8Config {
  Fp8Scales scales = Fp8Scales::block;
  std::string scale_name = "weight_scale_inv";  // the tensor of the scales, below the module's name

  bool operator==(const Fp8Config&) const = default;
};

/// Whether a quantization_config's quant_method is one of parse_fp8_config()'s. False for what is no JSON object.
bool is_fp8_config(std::string_view text);

/// Reads a quantization_config's text:
///   quant_method "fp8" (DeepSeek-V3, Qwen3-FP8)  weight_block_size [128, 128], scales in weight_scale_inv; fmt "e4m3"
///   "fbgemm_fp8" (Llama-3.1)                     one scale a channel, in weight_scale
///   "compressed-tensors", format "float-quantized" or "naive-quantized" (vLLM's llm-compressor)
///                                                in weight_scale, by the one config group's weights.strategy "tensor",
///                                                "channel" or "block" with block_structure [128, 128]
/// Fields that say how activations are quantised at run time (dynamic ones) do not count: this library quantises none.
/// Refuses, naming `source` and the field: static activation scales; a fmt other than e4m3 and weights of another type
/// or of other than 8 bits; other sizes of blocks, strategies and formats; weights that are not symmetric; several
/// groups of Linears; quantised outputs and caches; sparse and transformed weights; a field of the wrong type.
Result<Fp8Config> parse_fp8_config(std::string_view text, const std::string& source);

/// In words: "fp8 (e4m3), a scale a channel".
std::string describe_fp8(const Fp8Config& config);

}  // namespace cf::checkpoint
