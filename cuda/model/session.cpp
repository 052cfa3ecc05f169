#include "cuda/model/session.hpp"

#include <string>
#include <utility>
#include <vector>

#include "core/contract.hpp"

namespace cf::cuda {

Session::Session(const Context& context, std::int64_t q_len, ResidentWeights w, KvCache c, Workspace s)
    : weights(std::move(w)),
      cache(std::move(c)),
      workspace(std::move(s)),
      context_(context),
      q_len_(q_len),
      executors_{Executor(context, Impl::unfused), Executor(context, Impl::graph), Executor(context, Impl::split),
                 Executor(context, Impl::layer), Executor(context, Impl::persistent)} {}

Result<Session> Session::create(const Context& context, const ModelSpec& model, LayerRange layers, const Workload& load,
                                DType activation, DType weights_dtype, const LayerWeights& like) {
  const std::int64_t capacity = load.cache_capacity();
  if (load.q_len < 1 || load.q_len > capacity)
    return bad_argument(
        "session", "q_len must be 1 to capacity " + std::to_string(capacity) + ", got " + std::to_string(load.q_len));
  CF_TRY_ASSIGN(ResidentWeights weights, ResidentWeights::create(context, model, weights_dtype, layers, like));
  CF_TRY_ASSIGN(KvCache cache, KvCache::create(context, model, activation, layers, load.batch, capacity));
  bool quantised = false;
  for_each_linear(model, like, [&](const Site&, const LinearParams& l, auto...) {
    quantised = quantised || std::holds_alternative<GptqWeight>(l.weight);
  });
  CF_TRY_ASSIGN(Workspace workspace, Workspace::create(context, model, activation, load.tokens(), capacity, quantised));
  Session session(context, load.q_len, std::move(weights), std::move(cache), std::move(workspace));
  const std::vector<std::int32_t> kv_len(std::size_t(load.batch), std::int32_t(load.q_len));
  CF_TRY(session.set_kv_len(kv_len));
  return session;
}

Status Session::synchronize() {
  for (Executor& e : executors_) CF_TRY(e.synchronize(context_.stream()));
  return {};
}

}  // namespace cf::cuda
