#pragma once
// A program for the persistent kernel. Private to cuda.
#include <optional>
#include <vector>

#include "core/model/program.hpp"
#include "cuda/persistent/persistent_kernel.hpp"

namespace cf::cuda {

/// A program as PersistentKernel::create() takes it.
struct LoweredProgram {
  std::vector<PersistentLayer> layers;
  /// Of a whole model: its embedding, final norm and LM head. The views that the kernel also writes are left empty, since
  /// a program only reads them: `ids`, `positions`, `kv_len` and `chosen`.
  std::optional<PersistentEnds> ends;
};

/// What the persistent kernel needs of each node of a program: the nodes of layers, and those of a whole model's ends
/// or of none of them. Code::unimplemented names the first node that the kernel does not make, and why.
Result<LoweredProgram> lower(const Program& program);

}  // namespace cf::cuda
