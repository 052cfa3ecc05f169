#include "cpu_ref/model.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/cache_tensors.hpp"
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

/// The options with the capacity that streams need: a prompt's chunk must leave what its first token sees.
Model::Options with_capacity(Model::Options o) {
  if (o.window > 0) o.capacity = stream_entries(o.stream(), o.chunk);
  return o;
}

/// Refuses streams of a model for which they have no meaning.
Status check_stream(const ModelSpec& m, const KeyWindow& stream) {
  CF_TRY(check_window("model", stream));
  if (!stream) return {};
  if (m.traits.positions == Positions::learned || m.shape.rotary_dim == 0)
    return refused("window, sinks: expected a model with RoPE, got one without");
  if (m.traits.window > 0 && stream.keys + stream.sinks > m.traits.window)
    return refused("window, sinks: expected at most the config's sliding_window " + std::to_string(m.traits.window) +
                   " in all, got " + std::to_string(stream.keys + stream.sinks));
  return {};
}

/// What ops are told of a slot's length.
std::int32_t kv_len_of(std::int64_t length, const Model::Options& o) {
  return o.window > 0 ? stream_length(length, o.capacity, o.sinks) : std::int32_t(length);
}

/// Row `row` of a matrix.
AnyView<2> row_of(Tensor& matrix, std::int64_t row, std::int64_t rows = 1) {
  AnyView<2> v = matrix.view<2>();
  v.data = static_cast<char*>(v.data) + row * v.shape[1] * std::int64_t(size_bytes(v.dtype));
  v.shape[0] = rows;
  return v;
}

}  // namespace

Result<std::unique_ptr<Model>> Model::create(const ModelSpec& model, ModelWeights weights,
                                             std::shared_ptr<const void> owner, const Options& options) {
  CF_TRY(check_model_weights(model, weights));
  constexpr std::int64_t most = std::int64_t(1) << 31;
  CF_TRY(check_sizes({{"chunk", options.chunk, most}}));
  CF_TRY(check_stream(model, options.stream()));
  const Options o = with_capacity(options);
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
  const bool sinks = o.sinks > 0;
  for (std::int64_t i = 0; i < s.num_layers; ++i)
    for (auto caches : {&Model::k_caches_, &Model::v_caches_})
      f(caches, o.activation, Shape{o.slots, s.num_kv_heads, o.capacity, s.head_dim});
  LayerTensors views;
  for_each_activation(
      s, {.batch = tokens, .sinks = sinks},
      [&](const TensorSpec& spec, auto&, const auto& shape) {
        if (is_made(spec)) f(&Model::activations_, o.activation, Shape(shape.begin(), shape.end()));
      },
      views);
  for (int i = 0; i < 2; ++i) f(&Model::hidden_, o.activation, Shape{tokens, s.hidden_size});
  f(&Model::final_norm_, o.activation, Shape{tokens, s.hidden_size});
  for (auto logits : {&Model::logits_, &Model::step_logits_}) f(logits, o.activation, Shape{o.slots, s.vocab_size});
  const std::int64_t table_rows = o.window > 0 ? 2 * tokens : o.capacity;
  for (auto table : {&Model::cos_, &Model::sin_}) f(table, DType::f32, Shape{table_rows, s.rotary_dim / 2});
}

ModelBytes Model::bytes(const ModelSpec& m, const Options& options) {
  const Options o = with_capacity(options);
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

Status Model::check_memory(const std::string& name, const ModelSpec& m, const Options& options) {
  const Options o = with_capacity(options);
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
      lengths_(o.slots, o.capacity, limit_of(model, o)),
      last_ids_(std::size_t(o.slots)) {
  for_each_tensor(spec_, o, [&]<class Member>(Member member, DType dtype, const Shape& shape) {
    if constexpr (std::is_same_v<Member, Tensor Model::*>)
      this->*member = Tensor(dtype, shape);
    else
      (this->*member).emplace_back(dtype, shape);
  });
  if (!o.stream())
    ops::rope_table({cos_.as<float>(), cos_.view<2>().shape}, {sin_.as<float>(), sin_.view<2>().shape},
                    spec_.traits.rope_theta, spec_.traits.rope_scaling);
}

EntryLimit Model::limit_of(const ModelSpec& model, const Options& o) {
  if (o.stream()) return {std::int64_t(1) << 62, "the largest number of a position"};
  return entry_limit(model, o.capacity, true);
}

Status Model::set_rope_table(View<const float, 2> cos, View<const float, 2> sin) {
  if (options_.stream())
    return refused("RoPE table: expected none for streams, whose positions have no bound, got one");
  const std::array<std::int64_t, 2> own = cos_.view<2>().shape;
  if (cos.shape != sin.shape || cos.shape[1] != own[1] || cos.shape[0] > capacity())
    return refused("RoPE table: expected up to " + std::to_string(capacity()) + " rows of " + std::to_string(own[1]) +
                   " each for cos and sin, got " + to_string(Shape(cos.shape.begin(), cos.shape.end())) + " and " +
                   to_string(Shape(sin.shape.begin(), sin.shape.end())));
  std::copy_n(cos.data, cos.size(), cos_.as<float>());
  std::copy_n(sin.data, sin.size(), sin_.as<float>());
  return {};
}

Status Model::pass(std::int64_t slot, std::span<const std::int32_t> ids, std::span<const std::int64_t> lengths,
                   AnyView<2> logits, const Visit& visit) {
  const ModelShape& s = spec_.shape;
  const KeyWindow stream = options_.stream();
  const auto batch = std::int64_t(lengths.size()), tokens = std::int64_t(ids.size()), q_len = tokens / batch;
  std::vector<std::int32_t> positions, sink_positions, kv_len;
  std::vector<std::int64_t> stream_positions;
  for (std::int64_t n : lengths) {
    kv_len.push_back(kv_len_of(n, options_));
    // An idle row needs some valid position.
    for (std::int64_t i = 0; i < q_len; ++i) stream_positions.push_back(n == kIdleLength ? 0 : n - q_len + i);
  }
  if (stream) {
    // A row of the table for each token, and one for the place that its query has in the cache, which the sinks see.
    for (std::int64_t i = 0; i < tokens; ++i) {
      positions.push_back(std::int32_t(i));
      sink_positions.push_back(std::int32_t(tokens + i));
      stream_positions.push_back(std::min(stream_positions[std::size_t(i)], stream.sinks + stream.keys - 1));
    }
    ops::rope_rows({cos_.as<float>(), cos_.view<2>().shape}, {sin_.as<float>(), sin_.view<2>().shape}, stream_positions,
                   spec_.traits.rope_theta, spec_.traits.rope_scaling);
  } else {
    positions.assign(stream_positions.begin(), stream_positions.end());
  }

  ModelTensors t;
  t.ids = {ids.data(), {tokens}};
  for (std::size_t i = 0; i < 2; ++i) t.hidden[i] = row_of(hidden_[i], 0, tokens);
  std::size_t next = 0;
  for_each_activation(
      s,
      {.batch = batch,
       .q_len = q_len,
       .table_rows = cos_.view<2>().shape[0],
       .capacity = capacity(),
       .sinks = stream.sinks > 0},
      [&](const TensorSpec& spec, auto& view, auto shape) {
        if (is_made(spec)) point(view, activations_[next++].data(), shape, options_.activation);
      },
      t.layer);
  t.layer.positions = {positions.data(), {tokens}};
  t.layer.kv_len = {kv_len.data(), {batch}};
  t.layer.stream = stream;
  if (stream.sinks > 0) t.layer.sink_positions = {sink_positions.data(), {tokens}};
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
  CF_TRY(check_streams(runs));
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

Status Model::check_streams(std::span<const Run> runs) const {
  const KeyWindow stream = options_.stream();
  if (!stream) return {};
  for (const Run& r : runs) {
    // The oldest key behind the sinks that the first token sees beside its own.
    const std::int64_t oldest = stream.first(r.first_position + 1);
    const std::int64_t kept = length(r.sequence) - (capacity() - stream.sinks);
    if (oldest < r.first_position && oldest < kept)
      return refused("slot " + std::to_string(r.sequence) + ": expected a first position of 0 or of " +
                     std::to_string(kept + stream.keys - 1) + " to " + std::to_string(length(r.sequence)) +
                     ", whose window the stream still has, got " + std::to_string(r.first_position));
  }
  return {};
}

Status Model::read(const StepPart& prompt, bool own) {
  const std::int64_t slot = prompt.run.sequence;
  const AnyView<2> own_row = row_of(logits_, slot), logits = own && prompt.rows.shape[0] == 0 ? own_row : prompt.rows;
  std::span<const std::int32_t> ids = prompt.ids;
  std::int64_t first = prompt.run.first_position, rows_left = logits.shape[0];
  while (!ids.empty()) {
    const std::span<const std::int32_t> chunk = ids.first(std::min(ids.size(), std::size_t(options_.chunk)));
    ids = ids.subspan(chunk.size());
    const std::int64_t end = first + std::int64_t(chunk.size());
    // The chunk's tokens that are among the last rows of the call.
    AnyView<2> rows = logits;
    rows.data = static_cast<char*>(logits.data) +
                (logits.shape[0] - rows_left) * logits.shape[1] * std::int64_t(size_bytes(logits.dtype));
    rows.shape[0] = std::max<std::int64_t>(0, rows_left - std::int64_t(ids.size()));
    rows_left -= rows.shape[0];
    CF_TRY(pass(slot, chunk, std::span(&end, 1), rows, visit_));
    lengths_.set(slot, end);
    first = end;
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
  std::vector<std::int32_t> ids(rows);
  std::vector<std::int64_t> lengths(rows, kIdleLength);
  for (const StepPart& p : parts) {
    ids[std::size_t(p.run.sequence)] = p.ids[0];
    lengths[std::size_t(p.run.sequence)] = p.run.first_position + 1;
  }
  CF_TRY(pass(0, ids, lengths, step_logits_.view<2>(), visit_));
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

std::string Model::first_nan(std::int64_t slot) {
  std::string found;
  const std::int32_t id = last_ids_[std::size_t(slot)];
  const std::int64_t end = length(slot);
  const Status ended = pass(slot, std::span(&id, 1), std::span(&end, 1), row_of(logits_, slot),
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
