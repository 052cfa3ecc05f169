#include "core/ops/decode_layer.hpp"

#include "cuda/ops/run.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {

Status prepare(const ops::DecodeLayer::Args& a, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  return for_each_site(a.model, a.weights, a.t, [&](const Site& site, const auto& args) {
    launches.set_label(site.name.data());  // a literal, which ends in a zero byte
    return prepare(args, launches);
  });
}

}  // namespace cf::cuda
