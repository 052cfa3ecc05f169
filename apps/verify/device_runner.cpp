#include "apps/verify/device_runner.hpp"

#include <utility>

#include "cuda/serve/model.hpp"

namespace cf::apps {

Result<std::unique_ptr<ModelRunner>> make_device_runner(const std::string& name, const ModelSpec& model,
                                                        const ModelWeights& weights, std::int64_t capacity,
                                                        std::int64_t chunk) {
  CF_TRY_ASSIGN(const cuda::Context context, cuda::Context::create(0));
  CF_TRY_ASSIGN(std::unique_ptr<cuda::Model> made,
                cuda::Model::create(context, name, model, weights, {.capacity = capacity, .chunk = chunk, .impl = {}}));
  return std::unique_ptr<ModelRunner>(std::move(made));
}

}  // namespace cf::apps
