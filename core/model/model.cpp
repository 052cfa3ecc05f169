#include "core/model/model.hpp"

#include "core/contract.hpp"

namespace cf {

std::string ModelSite::name() const {
  if (layer < 0) return std::string(site.name);
  return "gpt_neox.layers." + std::to_string(layer) + "." + std::string(site.name);
}

std::string ModelSite::tap() const {
  if (layer < 0) return std::string(site.tap);
  return "layers." + std::to_string(layer) + "." + std::string(site.tap);
}

Status check_model_weights(const ModelSpec& m, const ModelWeights& w) {
  CF_TRY(check_model(m));
  if (std::int64_t(w.layers.size()) != m.shape.num_layers)
    return Status::error(Code::invalid_argument, "model: expected weights of " + std::to_string(m.shape.num_layers) +
                                                     " layers, got " + std::to_string(w.layers.size()));
  TensorCheck check("model");
  for_each_model_weight(m, w, check);
  return check.status();
}

}  // namespace cf
