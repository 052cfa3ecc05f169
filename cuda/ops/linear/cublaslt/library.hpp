#pragma once
// Products of matrices by cuBLASLt, which is loaded at its first use: libcublasLt.so.13, .12 or without a number, as
// the dynamic linker finds them, or the file alone that the environment variable CF_CUBLASLT names.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/status.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/tuning/tuning.hpp"

namespace cf::cuda {

/// y[t,o] = sum_k x[t,k] * W[o,k] + bias[o] + residual[t,o], in float32 and rounded once. Tensors lie at multiples of
/// 16 bytes.
struct Gemm {
  std::int64_t tokens, in, out;
  StepClass step_class;  // that `tokens` belong to
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
///   The algorithm depends on the device, the class of the step, in and out, the dtypes and on whether there is a bias
/// and a residual, and on nothing else: it is asked for once, for step_class.planned_as tokens, and then kept. One block
/// makes a whole sum: no algorithm divides the columns (split-k). So the same inputs give the same bits, and a row has
/// the same bits in all steps of a class. Code::unimplemented where that algorithm takes other tokens of the class alone.
Result<LaunchList::Call> make_gemm(const Gemm& gemm, int device);

/// An algorithm that was chosen, by cuBLASLt's numbers. `planned_as` are the tokens that it was asked for.
struct GemmAlgorithm {
  int device;
  std::int64_t planned_as, in, out;
  DType dtype, output;
  bool bias, residual;
  int id, tile, stages, split_k;
  std::size_t workspace_bytes;
};
/// All that this process has chosen so far.
std::vector<GemmAlgorithm> gemm_algorithms();

/// The library's name and version. Code::unimplemented says in one line why there is none.
Result<std::string> gemm_library();

}  // namespace cf::cuda
