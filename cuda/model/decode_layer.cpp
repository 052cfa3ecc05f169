#include "cuda/model/decode_layer.hpp"

namespace cf::cuda {

Status prepare(const ops::DecodeLayer::Args& a, LaunchList& launches) {
  return prepare_layer(a, launches, [&](const ops::KvAppend::Args& append) { return prepare(append, launches); });
}

}  // namespace cf::cuda
