#include "cuda/step/impl.hpp"

namespace cf::cuda {

std::string_view to_string(Impl impl) {
  switch (impl) {
    case Impl::unfused: return "unfused";
    case Impl::graph: return "graph";
    case Impl::split: return "split";
    case Impl::layer: return "layer";
    case Impl::persistent: return "persistent";
  }
  return "?";
}

std::optional<Impl> impl_from_string(std::string_view name) {
  for (Impl impl : kImpls)
    if (to_string(impl) == name) return impl;
  return std::nullopt;
}

}  // namespace cf::cuda
