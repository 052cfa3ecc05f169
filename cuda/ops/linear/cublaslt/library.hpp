#pragma once
// Products of matrices by cuBLASLt, which is loaded at its first use: libcublasLt.so.13, .12 or without a number, as
// the dynamic linker finds them, or the file alone that the environment variable CF_CUBLASLT names.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/status.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// y[t,o] = sum_k x[t,k] * W[o,k] + bias[o] + residual[t,o], in float32 and rounded once. Tensors lie at multiples of
/// 16 bytes.
struct Gemm {
  std::int64_t tokens, in, out;
  DType dtype;           // of x, weight, bias and residual: float16 or bfloat16
  DType output;          // of y: dtype; or float32, then without bias and residual
  const void* x;         // (tokens, in)
  const void* weight;    // (out, in)
  const void* bias;      // (out), or null
  const void* residual;  // (tokens, out), or null
  void* y;               // (tokens, out)
  std::byte* workspace;  // kGemmWorkspaceBytes
};

/// The product as a call for a LaunchList of this device. Empty where there is no library, and where the library has no
/// algorithm for the product.
///   The algorithm depends on the device, the sizes, the dtypes and on whether there is a bias and a residual, and on
/// nothing else: it is asked for once for each of kGemmTokens and then kept. So the same inputs give the same bits.
///   A row has the same bits whatever the number of tokens. No algorithm divides the columns (split-k), and whatever is
/// chosen beside the algorithm for the most tokens gave a product of random numbers that algorithm's bits. An algorithm
/// with another order of sums is passed over.
Result<LaunchList::Call> make_gemm(const Gemm& gemm, int device);

/// The numbers of tokens that an algorithm is asked for. A product has that of the first number which its tokens do not
/// exceed, or of the last.
inline constexpr std::array<std::int64_t, 12> kGemmTokens{16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048};
constexpr std::size_t gemm_tokens_index(std::int64_t tokens) {
  std::size_t i = 0;
  while (i + 1 < kGemmTokens.size() && tokens > kGemmTokens[i]) ++i;
  return i;
}

/// An algorithm that a product has, by cuBLASLt's numbers. `tokens` is one of kGemmTokens.
struct GemmAlgorithm {
  int device;
  std::int64_t tokens, in, out;
  DType dtype, output;
  bool bias, residual;
  int id, tile, stages, split_k;
  std::size_t workspace_bytes;
};
/// All that products of this process have had so far.
std::vector<GemmAlgorithm> gemm_algorithms();

/// The library's name and version. Code::unimplemented says in one line why there is none.
Result<std::string> gemm_library();

}  // namespace cf::cuda
