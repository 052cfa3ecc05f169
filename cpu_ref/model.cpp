#include "cpu_ref/model.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/cache_view.hpp"
#include "core/model/score.hpp"
#include "core/model/taps.hpp"
#include "core/ops/rope.hpp"
#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/chain.hpp"
#include "cpu_ref/ops/parallel.hpp"
#include "cpu_ref/sample.hpp"

namespace cf::cpu_ref {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "model: " + std::move(what)); }

/// Whether a tensor is among the activations of the walk that are made for each call and kept by no one.
bool is_made(const TensorSpec& spec) { return spec.role == Role::output && spec.name != "output"; }

/// Row `row` of a matrix.
AnyView<2> row_of(Tensor& matrix, std::int64_t row, std::int64_t rows = 1) {
  AnyView<2> v = matrix.view<2>();
  v.data = static_cast<char*>(v.data) + row * v.shape[1] * std::int64_t(size_bytes(v.dtype));
  v.shape[0] = rows;
  return v;
}

}  // namespace

Result<std::unique_ptr<Model>> Model::create(const ModelSpec& model, ModelWeights weights,
                                             std::shared_ptr<const void> owner, const Options& o) {
  CF_TRY(check_model_weights(model, weights));
  constexpr std::int64_t most = std::int64_t(1) << 31;
  CF_TRY(check_sizes({{"slots", o.slots, most}, {"capacity", o.capacity, most - 1}, {"chunk", o.chunk, most}}));
  if (o.activation != DType::f32 && o.activation != DType::f64)
    return refused("expected activations of float32 or float64, got " + std::string(to_string(o.activation)));
  CF_TRY(check_memory("model", model, o));
  return std::unique_ptr<Model>(new Model(model, std::move(weights), std::move(owner), o));
}

template <class F>
void Model::for_each_tensor(const ModelSpec& m, const Options& o, F&& f) {
  const ModelShape& s = m.shape;
  const std::int64_t tokens = std::max(o.slots, std::min(o.chunk, o.capacity));
  for (std::int64_t i = 0; i < s.num_layers; ++i)
    for (auto caches : {&Model::k_caches_, &Model::v_caches_})
      f(caches, o.activation, Shape{o.slots, s.num_kv_heads, o.capacity, s.head_dim});
  LayerTensors views;
  for_each_activation(
      s, {.batch = tokens},
      [&](const TensorSpec& spec, auto&, const auto& shape) {
        if (is_made(spec)) f(&Model::activations_, o.activation, Shape(shape.begin(), shape.end()));
      },
      views);
  for (int i = 0; i < 2; ++i) f(&Model::hidden_, o.activation, Shape{tokens, s.hidden_size});
  f(&Model::final_norm_, o.activation, Shape{tokens, s.hidden_size});
  for (auto logits : {&Model::logits_, &Model::step_logits_}) f(logits, o.activation, Shape{o.slots, s.vocab_size});
  for (auto table : {&Model::cos_, &Model::sin_}) f(table, DType::f32, Shape{o.capacity, s.rotary_dim / 2});
}

ModelBytes Model::bytes(const ModelSpec& m, const Options& o) {
  ModelBytes b;
  for_each_tensor(m, o, [&]<class Member>(Member member, DType dtype, const Shape& shape) {
    double bytes = double(size_bytes(dtype));
    for (std::int64_t d : shape) bytes *= double(d);
    bool is_cache = false;
    if constexpr (std::is_same_v<Member, std::vector<Tensor> Model::*>)
      is_cache = member == &Model::k_caches_ || member == &Model::v_caches_;
    (is_cache ? b.cache : b.workspace) += bytes;
  });
  return b;
}

Status Model::check_memory(const std::string& name, const ModelSpec& m, const Options& o) {
  const ModelBytes b = bytes(m, o);
  return check_free_memory(b.cache + b.workspace, name + ": " + std::to_string(o.slots) + " slots of " +
                                                      std::to_string(o.capacity) + " entries need " +
                                                      gigabytes(b.cache) + " for the cache and " +
                                                      gigabytes(b.workspace) + " for activations");
}

Model::Model(const ModelSpec& model, ModelWeights weights, std::shared_ptr<const void> owner, const Options& o)
    : spec_(model),
      options_(o),
      weights_(std::move(weights)),
      owner_(std::move(owner)),
      lengths_(o.slots, model, o.capacity),
      last_ids_(std::size_t(o.slots)) {
  for_each_tensor(spec_, o, [&]<class Member>(Member member, DType dtype, const Shape& shape) {
    if constexpr (std::is_same_v<Member, Tensor Model::*>)
      this->*member = Tensor(dtype, shape);
    else
      (this->*member).emplace_back(dtype, shape);
  });
  ops::rope_table({cos_.as<float>(), cos_.view<2>().shape}, {sin_.as<float>(), sin_.view<2>().shape},
                  spec_.traits.rope_theta, spec_.traits.rope_scaling);
}

Status Model::set_rope_table(View<const float, 2> cos, View<const float, 2> sin) {
  const std::array<std::int64_t, 2> own = cos_.view<2>().shape;
  if (cos.shape != sin.shape || cos.shape[1] != own[1] || cos.shape[0] > capacity())
    return refused("RoPE table: expected up to " + std::to_string(capacity()) + " rows of " + std::to_string(own[1]) +
                   " each for cos and sin, got " + to_string(Shape(cos.shape.begin(), cos.shape.end())) + " and " +
                   to_string(Shape(sin.shape.begin(), sin.shape.end())));
  std::copy_n(cos.data, cos.size(), cos_.as<float>());
  std::copy_n(sin.data, sin.size(), sin_.as<float>());
  return {};
}

Status Model::pass(std::int64_t slot, std::span<const std::int32_t> ids, std::span<const std::int32_t> kv_len,
                   AnyView<2> logits, const Visit& visit) {
  const ModelShape& s = spec_.shape;
  const auto batch = std::int64_t(kv_len.size()), tokens = std::int64_t(ids.size()), q_len = tokens / batch;
  std::vector<std::int32_t> positions;
  for (std::int32_t n : kv_len)
    for (std::int64_t i = 0; i < q_len; ++i)
      positions.push_back(n == kIdleLength ? 0 : std::int32_t(n - q_len + i));  // an idle row needs some valid position

  ModelTensors t;
  t.ids = {ids.data(), {tokens}};
  for (std::size_t i = 0; i < 2; ++i) t.hidden[i] = row_of(hidden_[i], 0, tokens);
  std::size_t next = 0;
  for_each_activation(
      s, {.batch = batch, .q_len = q_len, .table_rows = capacity(), .capacity = capacity()},
      [&](const TensorSpec& spec, auto& view, auto shape) {
        if (is_made(spec)) point(view, activations_[next++].data(), shape, options_.activation);
      },
      t.layer);
  t.layer.positions = {positions.data(), {tokens}};
  t.layer.kv_len = {kv_len.data(), {batch}};
  if (s.rotary_dim > 0) {
    t.layer.cos = {cos_.as<float>(), cos_.view<2>().shape};
    t.layer.sin = {sin_.as<float>(), sin_.view<2>().shape};
  }
  t.layer.max_kv_len = *std::max_element(kv_len.begin(), kv_len.end());
  std::vector<LayerCache> caches;
  for (std::size_t i = 0; i < k_caches_.size(); ++i)
    caches.push_back({cache_of(k_caches_[i].view<4>(), slot, batch), cache_of(v_caches_[i].view<4>(), slot, batch)});
  t.caches = caches;
  t.logits = logits;
  t.final_norm = row_of(final_norm_, 0, logits.shape[0]);
  const Checks checks(check_);
  CF_TRY(for_each_model_site(spec_, weights_, t, [&](const ModelSite& site, const auto& args) -> Status {
    if (const Status status = cpu_ref::run(args); !status) {
      if (check_) CF_TRY(check_());  // what it says is not the site's fault
      return Status::error(status.code(), site.name() + ": " + status.message());
    }
    if (condition_) CF_TRY(add_part(args, *condition_));
    return visit ? visit(site, tensors_of(args)) : Status{};
  }));
  return check_ ? check_() : Status();
}

Status Model::run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) {
  CF_TRY(check_step(*this, lengths_, runs, ids, logits));
  if (logits.stream)
    return Status::error(Code::unimplemented, "model: logits: expected memory of the host, got a device's");
  std::vector<StepPart> decoding;
  for (const StepPart& part : parts_of(runs, ids, logits)) {
    if (part.decodes)
      decoding.push_back(part);
    else
      CF_TRY(read(part, logits.own));
  }
  return decode(decoding);
}

Status Model::read(const StepPart& prompt, bool own) {
  const std::int64_t slot = prompt.run.sequence;
  const AnyView<2> own_row = row_of(logits_, slot), logits = own && prompt.rows.shape[0] == 0 ? own_row : prompt.rows;
  std::span<const std::int32_t> ids = prompt.ids;
  std::int64_t first = prompt.run.first_position, rows_left = logits.shape[0];
  while (!ids.empty()) {
    const std::span<const std::int32_t> chunk = ids.first(std::min(ids.size(), std::size_t(options_.chunk)));
    ids = ids.subspan(chunk.size());
    const auto kv_len = std::int32_t(first + std::int64_t(chunk.size()));
    // The chunk's tokens that are among the last rows of the call.
    AnyView<2> rows = logits;
    rows.data = static_cast<char*>(logits.data) +
                (logits.shape[0] - rows_left) * logits.shape[1] * std::int64_t(size_bytes(logits.dtype));
    rows.shape[0] = std::max<std::int64_t>(0, rows_left - std::int64_t(ids.size()));
    rows_left -= rows.shape[0];
    CF_TRY(pass(slot, chunk, std::span(&kv_len, 1), rows, visit_));
    lengths_.set(slot, kv_len);
    first = kv_len;
    last_ids_[std::size_t(slot)] = chunk.back();
  }
  if (own && logits.data != own_row.data)
    std::memcpy(own_row.data, static_cast<char*>(logits.data) + logits.bytes() - own_row.bytes(),
                std::size_t(own_row.bytes()));
  return {};
}

Status Model::decode(std::span<const StepPart> parts) {
  if (parts.empty()) return {};
  // Every slot has a row, so that what a row is given does not depend on the number of runs; the rest are idle.
  const auto rows = static_cast<std::size_t>(slots());
  std::vector<std::int32_t> ids(rows), kv_len(rows, kIdleLength);
  for (const StepPart& p : parts) {
    ids[std::size_t(p.run.sequence)] = p.ids[0];
    kv_len[std::size_t(p.run.sequence)] = std::int32_t(p.run.first_position + 1);
  }
  CF_TRY(pass(0, ids, kv_len, step_logits_.view<2>(), visit_));
  for (const StepPart& p : parts) {
    const std::int64_t slot = p.run.sequence;
    lengths_.set(slot, p.run.first_position + 1);
    last_ids_[std::size_t(slot)] = p.ids[0];
    const AnyView<2> from = row_of(step_logits_, slot), to = row_of(logits_, slot);
    std::memcpy(to.data, from.data, std::size_t(from.bytes()));
    if (p.rows.shape[0] > 0) std::memcpy(p.rows.data, from.data, std::size_t(from.bytes()));
  }
  return {};
}

Result<std::vector<RowScore>> Model::score(std::span<const Run> runs, std::span<const std::int32_t> ids,
                                           const ScoreRequest& request) {
  const Checks checks(check_);
  return score_on_host(*this, runs, ids, request, [](std::int64_t rows, const std::function<void(std::int64_t)>& f) {
    return parallel_for(rows, f);
  });
}

std::string Model::first_nan(std::int64_t slot) {
  std::string found;
  const std::int32_t id = last_ids_[std::size_t(slot)], kv_len = std::int32_t(length(slot));
  const Status ended = pass(slot, std::span(&id, 1), std::span(&kv_len, 1), row_of(logits_, slot),
                            [&](const ModelSite& site, std::span<const SiteTensor> tensors) -> Status {
                              for (const SiteTensor& t : tensors)
                                if (found.empty() && t.role == Role::output && has_nan(t)) found = site.name();
                              return {};
                            });
  return ended ? found : "";
}

std::vector<Result<std::int32_t>> Model::choose(std::span<const Draw> draws) {
  std::vector<Result<std::int32_t>> ids;
  for (const Draw& d : draws) {
    const auto choose_from = [&](auto* row) {
      return sample(std::span(row, std::size_t(spec_.shape.vocab_size)), d.sampling, d.history, d.sequence, d.position);
    };
    const AnyView<2> row = row_of(logits_, d.slot);
    Result<std::int32_t> id = options_.activation == DType::f64 ? choose_from(row.as<const double>().data)
                                                                : choose_from(row.as<const float>().data);
    if (!id)
      if (const std::string site = first_nan(d.slot); !site.empty())
        id = Status::error(id.status().code(),
                           id.status().message() + "; the first NaN of this token is made by " + site);
    ids.push_back(std::move(id));
  }
  return ids;
}

Status Model::fetch(const SiteTensor& tensor, void* to) {
  std::memcpy(to, tensor.data, std::size_t(tensor.bytes()));
  return {};
}

Result<Tensor> Model::logits(std::int64_t slot) {
  CF_TRY(lengths_.check(slot, 0, 1));
  Tensor row(options_.activation, {spec_.shape.vocab_size});
  std::memcpy(row.data(), row_of(logits_, slot).data, std::size_t(row.size_bytes()));
  return row;
}

}  // namespace cf::cpu_ref
