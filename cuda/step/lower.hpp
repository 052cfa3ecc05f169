#pragma once
// A program for the persistent kernel. Private to cuda.
#include <vector>

#include "core/model/program.hpp"
#include "cuda/persistent/persistent_kernel.hpp"

namespace cf::cuda {

/// The layers of a program as the persistent kernel takes them: what its phases need of each node. Nodes outside the
/// layers are left out: they are the ends of a whole model. Code::unimplemented names the first node that no phase
/// makes, and why.
Result<std::vector<PersistentLayer>> lower(const Program& program);

}  // namespace cf::cuda
