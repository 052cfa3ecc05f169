#include "cuda/model/decode_layer.hpp"

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

Status prepare_layer(const ops::DecodeLayer::Args& a, const TokenRows& rows, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  return for_each_op_of_rows(layer_ops(launches.arch(), a.model, a.weights, a.t), a, rows,
                             [&](const auto& args, const LaunchMode&, const char* label) {
                               launches.set_label(label);
                               return prepare(args, launches);
                             });
}

}  // namespace cf::cuda
