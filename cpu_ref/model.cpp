#include "cpu_ref/model.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "core/cache_tensors.hpp"
#include "core/model/ranks.hpp"
#include "core/model/score.hpp"
#include "core/model/streams.hpp"
#include "core/model/taps.hpp"
#include "core/ops/rope.hpp"
#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/chain.hpp"
#include "cpu_ref/ops/invariant.hpp"
#include "cpu_ref/ops/parallel.hpp"
#include "cpu_ref/sample.hpp"

namespace cf::cpu_ref {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "model: " + std::move(what)); }

/// Whether a tensor is among the activations of the walk that are made for each call and kept by no one.
bool is_made(const TensorSpec& spec) { return spec.role == Role::output && spec.name != "output"; }

/// The options, with a stream's capacity: room for the tokens of a pass beside what the first of them sees.
Model::Options with_capacity(Model::Options o) {
  if (o.window > 0) o.capacity = stream_entries(o.stream(), std::max(o.chunk, o.slots));
  return o;
}

/// The part of a model that a process holds; without a group, or where create() refuses the group, the whole.
ModelSpec part_of(const ModelSpec& whole, const Model::Options& o) {
  Result<ModelSpec> part = o.group ? whole.of_rank(o.group->rank(), o.group->ranks()) : whole;
  return part ? *std::move(part) : whole;
}

/// The weights of a process's part, which keep alive what they are cut out of.
struct PartWeights {
  ModelWeights weights;
  std::shared_ptr<const void> owner;
};
Result<PartWeights> cut(const ModelSpec& whole, ModelWeights weights, std::shared_ptr<const void> owner,
                        const Model::Options& o) {
  if (!o.group) return PartWeights{std::move(weights), std::move(owner)};
  struct Owned {
    std::shared_ptr<const void> whole;
    std::vector<Tensor> copies;
  };
  auto owned = std::make_shared<Owned>();
  for (LayerWeights& layer : weights.layers) {
    CF_TRY_ASSIGN(OwnedLayerWeights part, layer_of_rank(whole, layer, o.group->rank(), o.group->ranks()));
    layer = part.weights;
    std::ranges::move(part.storage, std::back_inserter(owned->copies));
  }
  owned->whole = std::move(owner);
  return PartWeights{std::move(weights), std::move(owned)};
}

/// What ops are told of a slot's length.
std::int32_t kv_len_of(std::int64_t length, const Model::Options& o) {
  return o.window > 0 ? stream_length(length, o.capacity, o.sinks) : std::int32_t(length);
}

/// Rows [first, first + count) of a matrix.
AnyView<2> rows_of(AnyView<2> matrix, std::int64_t first, std::int64_t count = 1) {
  matrix.data = static_cast<char*>(matrix.data) + first * matrix.shape[1] * std::int64_t(size_bytes(matrix.dtype));
  matrix.shape[0] = count;
  return matrix;
}

}  // namespace

Result<std::unique_ptr<Model>> Model::create(const ModelSpec& model, ModelWeights weights,
                                             std::shared_ptr<const void> owner, const Options& options) {
  Result<std::unique_ptr<Model>> made = create_alone(model, std::move(weights), std::move(owner), options);
  if (!made && options.group) options.group->fail(made.status());  // the others would wait for this rank
  return made;
}

Result<std::unique_ptr<Model>> Model::create_alone(const ModelSpec& model, ModelWeights weights,
                                                   std::shared_ptr<const void> owner, const Options& options) {
  CF_TRY(check_model_weights(model, weights));
  constexpr std::int64_t most = std::int64_t(1) << 31;
  CF_TRY(check_sizes({{"slots", options.slots, most}, {"chunk", options.chunk, most}}));
  CF_TRY(check_stream(model, options.stream()));
  const Options o = with_capacity(options);
  CF_TRY(check_sizes({{"capacity", o.capacity, most - 1}}));
  if (o.activation != DType::f32 && o.activation != DType::f64)
    return refused("expected activations of float32 or float64, got " + std::string(to_string(o.activation)));
  CF_TRY(SlotPages::check(o.pool(), o.capacity, o.stream()));
  if (o.invariant && o.activation != DType::f32)
    return refused("invariant: expected activations of float32, got " + std::string(to_string(o.activation)));
  if (o.group) CF_TRY(o.group->agree(identity(model, weights, o)));
  CF_TRY_ASSIGN(PartWeights part, cut(model, std::move(weights), std::move(owner), o));
  CF_TRY(check_memory("model", model, o));
  return std::unique_ptr<Model>(new Model(model, part_of(model, o), std::move(part.weights), std::move(part.owner), o));
}

std::string Model::identity(const ModelSpec& whole, const ModelWeights& weights, const Options& o) {
  std::string text = identity_of(whole, weights);
  for (const auto& [name, value] : {std::pair{"slots", o.slots},
                                    {"capacity", o.capacity},
                                    {"chunk", o.chunk},
                                    {"invariant", std::int64_t(o.invariant)},
                                    {"window", o.window},
                                    {"sinks", o.sinks},
                                    {"pages", o.pages},
                                    {"page_entries", o.page_entries}})
    text += "\n" + std::string(name) + " " + std::to_string(value);
  text += "\nactivation " + std::string(to_string(o.activation));
  // Other instructions have another order of sums: the ranks' logits would differ, and with them their choices.
  return text + "\nvector instructions " + std::string(instruction_set());
}

template <class F>
void Model::for_each_tensor(const ModelSpec& m, const Options& o, F&& f) {
  const ModelShape& s = m.shape;
  const std::int64_t tokens = std::max(o.slots, std::min(o.chunk, o.capacity));
  for (std::int64_t i = 0; i < s.num_layers; ++i)
    for (auto caches : {&Model::k_caches_, &Model::v_caches_})
      f(caches, o.activation,
        o.pages > 0 ? Shape{o.pages, s.num_kv_heads, o.page_entries, s.head_dim}
                    : Shape{o.slots, s.num_kv_heads, o.capacity, s.head_dim});
  LayerTensors views;
  for_each_activation(
      s, {.batch = tokens, .sinks = o.sinks > 0},
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

ModelBytes Model::bytes(const ModelSpec& whole, const Options& options) {
  const Options o = with_capacity(options);
  const ModelSpec m = part_of(whole, o);
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
  CF_TRY(check_stream(m, options.stream()));
  const Options o = with_capacity(options);
  const ModelBytes b = bytes(m, o);
  const std::string cache = o.pages > 0 ? std::to_string(o.pages) + " pages of " + std::to_string(o.page_entries)
                                        : std::to_string(o.slots) + " slots of " + std::to_string(o.capacity);
  return check_free_memory(b.cache + b.workspace, name + ": " + cache + " entries need " + gigabytes(b.cache) +
                                                      " for the cache and " + gigabytes(b.workspace) +
                                                      " for activations");
}

Model::Model(const ModelSpec& whole, const ModelSpec& part, ModelWeights weights, std::shared_ptr<const void> owner,
             const Options& o)
    : whole_(whole),
      spec_(part),
      options_(o),
      weights_(std::move(weights)),
      owner_(std::move(owner)),
      lengths_(o.slots, o.capacity, limit_of(part, o)),
      pages_(o.slots, o.capacity, o.pool()),
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

std::int64_t Model::most_tokens() const { return hidden_[0].shape()[0]; }

std::vector<std::vector<Model::Piece>> Model::passes_of(std::span<const StepPart> parts, bool own) const {
  std::vector<std::vector<Piece>> passes;
  std::vector<Piece> decoding;
  std::int64_t room = 0;  // of the last pass
  for (const StepPart& part : parts) {
    const auto& [sequence, first_position, count] = part.run;
    if (part.decodes && !options_.invariant) {
      // Every slot has a row, so that what a row is given does not depend on the number of runs.
      for (std::int64_t slot = std::int64_t(decoding.size()); slot < slots(); ++slot)
        decoding.push_back({.run = {.sequence = slot}, .is_idle = true});
      decoding[std::size_t(sequence)] = {.run = part.run, .ids = part.ids, .rows = part.rows, .own = true};
      continue;
    }
    const std::int64_t first_row = count - part.rows.shape[0];
    for (std::int64_t first = 0, n; first < count; first += n) {
      if (room == 0) {
        passes.emplace_back();
        room = options_.invariant ? std::min(options_.chunk, most_tokens()) : options_.chunk;
      }
      n = std::min(count - first, room);
      // The piece's tokens that are among the run's last rows.
      const std::int64_t begin = std::max(first, first_row), rows = std::max<std::int64_t>(0, first + n - begin);
      passes.back().push_back({.run = {sequence, first_position + first, n},
                               .ids = part.ids.subspan(std::size_t(first), std::size_t(n)),
                               .rows = rows > 0 ? rows_of(part.rows, begin - first_row, rows) : AnyView<2>(),
                               .own = own && first + n == count});
      room = options_.invariant ? room - n : 0;
    }
  }
  if (!decoding.empty()) passes.push_back(std::move(decoding));
  return passes;
}

std::int64_t Model::exact_run_tokens() const {
  if (options_.activation != DType::f32 || options_.group) return 0;
  if (!options_.invariant && slots() > kFewTokens) return 0;
  const std::int64_t most = options_.invariant ? capacity() : kFewTokens;
  // A stream's cache lets it go back by as much as a chunk.
  return options_.stream() ? std::min(most, options_.chunk) : most;
}

Status Model::pass(std::span<const Piece> pieces, bool norm_alone, const Visit& visit) {
  const ModelShape& s = spec_.shape;
  std::vector<RowRun> table;
  const KeyWindow stream = options_.stream();
  std::vector<std::int32_t> ids, positions, sink_positions, kv_len(std::size_t(slots()), kIdleLength);
  std::vector<std::int64_t> row_positions;
  std::int64_t q_len = 0, max_kv_len = 0;
  for (const Piece& p : pieces) {
    table.push_back({.sequence = p.run.sequence, .first_row = std::int64_t(ids.size()), .count = p.run.count});
    q_len = std::max(q_len, p.run.count);
    if (p.is_idle) {
      ids.push_back(0);
      row_positions.push_back(0);
      continue;
    }
    ids.insert(ids.end(), p.ids.begin(), p.ids.end());
    for (std::int64_t i = 0; i < p.run.count; ++i) row_positions.push_back(p.run.first_position + i);
    const std::int32_t length = kv_len_of(p.run.first_position + p.run.count, options_);
    kv_len[std::size_t(p.run.sequence)] = length;
    max_kv_len = std::max<std::int64_t>(max_kv_len, length);
  }
  const auto tokens = std::int64_t(ids.size());
  if (stream) {
    // A row of the table for each token, and one for its query's position within the cache, which the sinks see.
    for (std::int64_t i = 0; i < tokens; ++i) {
      positions.push_back(std::int32_t(i));
      sink_positions.push_back(std::int32_t(tokens + i));
      row_positions.push_back(position_in_cache(stream, row_positions[std::size_t(i)]));
    }
    ops::rope_rows({cos_.as<float>(), cos_.view<2>().shape}, {sin_.as<float>(), sin_.view<2>().shape}, row_positions,
                   spec_.traits.rope_theta, spec_.traits.rope_scaling);
  } else {
    positions.assign(row_positions.begin(), row_positions.end());
  }

  ModelTensors t;
  t.ids = {ids.data(), {tokens}};
  for (std::size_t i = 0; i < 2; ++i) t.hidden[i] = rows_of(hidden_[i].view<2>(), 0, tokens);
  std::size_t next = 0;
  for_each_activation(
      s,
      {.batch = slots(),
       .q_len = q_len,
       .table_rows = cos_.view<2>().shape[0],
       .capacity = pages_ ? pages_.slot_pages() * page_entries() : capacity(),
       .mixed = tokens,
       .pool = pages_ ? pages_.sizes() : PageSizes{},
       .sinks = stream.sinks > 0},
      [&](const TensorSpec& spec, auto& view, auto shape) {
        if (is_made(spec)) point(view, activations_[next++].data(), shape, options_.activation);
      },
      t.layer);
  t.layer.positions = {positions.data(), {tokens}};
  t.layer.kv_len = {kv_len.data(), {slots()}};
  t.layer.page_table = pages_.table();
  t.layer.stream = stream;
  if (stream.sinks > 0) t.layer.sink_positions = {sink_positions.data(), {tokens}};
  if (s.rotary_dim > 0) {
    t.layer.cos = {cos_.as<float>(), cos_.view<2>().shape};
    t.layer.sin = {sin_.as<float>(), sin_.view<2>().shape};
  }
  t.layer.max_kv_len = max_kv_len;
  t.layer.runs = table;
  std::vector<LayerCache> caches;
  for (std::size_t i = 0; i < k_caches_.size(); ++i) caches.push_back({k_caches_[i].view<4>(), v_caches_[i].view<4>()});
  t.caches = caches;
  const Checks checks(check_);
  const Invariant invariant(options_.invariant);
  const auto run_site = [&](const ModelSite& site, const auto& args) -> Status {
    if (norm_alone && site.site.id == SiteId::embed_out) return {};
    if (const Status status = cpu_ref::run(args); !status) {
      if (check_) CF_TRY(check_());  // what it says is not the site's fault
      return Status::error(status.code(), site.name() + ": " + status.message());
    }
    if (condition_) CF_TRY(add_part(args, *condition_));
    if constexpr (std::is_same_v<decltype(args), const ops::Linear::Args&>)
      if (makes_part(spec_, site.site.id)) CF_TRY(sum_over_ranks(args.y));
    return visit ? visit(site, tensors_of(args)) : Status{};
  };
  CF_TRY(for_each_model_site(spec_, weights_, t, run_site));

  // The head: of the last rows of a piece for whoever asks for them, and of the last row of any other piece that makes
  // its slot's logits. These rows are put together.
  const std::size_t last_layer = weights_.layers.size() % 2;
  const AnyView<2> made = t.hidden[last_layer], together = hidden_[1 - last_layer].view<2>();
  const auto copy = [](const AnyView<2>& from, const AnyView<2>& to) {
    std::memcpy(to.data, from.data, std::size_t(from.bytes()));
  };
  const auto head = [&](const AnyView<2>& hidden, const AnyView<2>& logits) {
    return for_each_head_site(spec_, weights_, hidden, rows_of(final_norm_.view<2>(), 0, hidden.shape[0]), logits,
                              run_site);
  };
  std::vector<const Piece*> with_own;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i];
    const std::int64_t end = table[i].first_row + table[i].count, rows = p.rows.shape[0];
    if (rows > 1 || (rows == 1 && !p.own)) {
      CF_TRY(head(rows_of(made, end - rows, rows), p.rows));
      if (p.own) copy(rows_of(p.rows, rows - 1), rows_of(logits_.view<2>(), p.run.sequence));
    } else if (p.own || p.is_idle) {
      copy(rows_of(made, end - 1), rows_of(together, std::int64_t(with_own.size())));
      with_own.push_back(&p);
    }
  }
  if (const auto n = std::int64_t(with_own.size()); n > 0) {
    const AnyView<2> logits = rows_of(step_logits_.view<2>(), 0, n);
    CF_TRY(head(rows_of(together, 0, n), logits));
    for (std::int64_t i = 0; i < n; ++i) {
      const Piece& p = *with_own[std::size_t(i)];
      if (p.is_idle) continue;
      copy(rows_of(logits, i), rows_of(logits_.view<2>(), p.run.sequence));
      if (p.rows.shape[0] > 0) copy(rows_of(logits, i), p.rows);
    }
  }
  if (check_) CF_TRY(check_());
  return {};
}

Status Model::sum_over_ranks(const AnyView<2>& part) {
  RankGroup& group = *options_.group;
  const auto bytes = std::size_t(part.bytes());
  parts_.resize(bytes * std::size_t(group.ranks()));
  CF_TRY(group.gather({static_cast<const std::byte*>(part.data), bytes}, parts_));
  const std::array<std::int64_t, 3> shape{group.ranks(), part.shape[0], part.shape[1]};
  return cpu_ref::run(ops::AllReduce::Args{.x = {parts_.data(), shape, part.dtype}, .y = part, .ranks = group.ranks()});
}

Status Model::run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) {
  if (options_.group && visit_)
    return Status::error(Code::unimplemented,
                         "model: expected no visitor of sites: each of several processes has a part");
  CF_TRY(check_step(*this, lengths_, runs, ids, logits));
  CF_TRY(check_rewinds(options_.stream(), capacity(), lengths_, runs));
  if (logits.stream)
    return Status::error(Code::unimplemented, "model: logits: expected memory of the host, got a device's");
  CF_TRY(reserve(runs));
  for (const std::vector<Piece>& pieces : passes_of(parts_of(runs, ids, logits), logits.own)) {
    if (const Status passed = pass(pieces, logits.norm_alone, visit_); !passed) {
      if (options_.group) options_.group->fail(passed);  // the others wait for this rank's part
      return passed;
    }
    for (const Piece& p : pieces) {
      if (p.is_idle) continue;
      lengths_.set(p.run.sequence, p.run.first_position + p.run.count);
      last_ids_[std::size_t(p.run.sequence)] = p.ids.back();
    }
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

Status Model::swap_weights(const ModelSpec& model, const ModelWeights& weights, std::shared_ptr<const void> owner) {
  CF_TRY(check_model_weights(model, weights));
  CF_TRY_ASSIGN(PartWeights part, cut(model, weights, std::move(owner), options_));
  CF_TRY(check_swap(spec_, weights_, part_of(model, options_), part.weights));
  if (options_.group) CF_TRY(options_.group->agree(identity(model, weights, options_)));
  for (std::int64_t slot = 0; slot < slots(); ++slot) release(slot);
  weights_ = std::move(part.weights);
  owner_ = std::move(part.owner);
  return {};
}

Status Model::check_room(std::span<const Run> runs) const { return pages_.check(runs); }

Status Model::reserve(std::span<const Run> runs) {
  if (!pages_) return {};
  CF_TRY_ASSIGN(const std::vector<PagePool::Copy> copies, pages_.reserve(runs));
  const CacheView pages(k_caches_[0].view<4>());
  const auto element = std::int64_t(size_bytes(options_.activation));
  for (const PagePool::Copy& c : copies)
    for (auto* caches : {&k_caches_, &v_caches_})
      for (Tensor& cache : *caches)
        for (std::int64_t head = 0; head < pages.heads(); ++head) {
          char* const data = static_cast<char*>(cache.data());
          std::memcpy(data + pages.entry(c.to, head, 0) * element, data + pages.entry(c.from, head, 0) * element,
                      std::size_t(c.entries * pages.head_dim() * element));
        }
  // New entries are valid once they are made.
  for (const Run& r : runs) lengths_.set(r.sequence, r.first_position);
  return {};
}

void Model::release(std::int64_t slot) {
  lengths_.set(slot, 0);
  pages_.release(slot);
}

Status Model::fork(std::int64_t from, std::int64_t to, std::int64_t n) {
  if (!pages_) return ModelRunner::fork(from, to, n);
  CF_TRY(pages_.fork(from, to, n));
  lengths_.set(to, n);
  return {};
}

std::string Model::first_nan(std::int64_t slot) {
  std::string found;
  const Piece last{.run = {.sequence = slot, .first_position = length(slot) - 1},
                   .ids = std::span(&last_ids_[std::size_t(slot)], 1),
                   .own = true};
  if (!reserve(std::span(&last.run, 1))) return found;
  lengths_.set(slot, last.run.first_position + 1);
  const Status ended =
      pass(std::span(&last, 1), false, [&](const ModelSite& site, std::span<const SiteTensor> tensors) -> Status {
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
    const AnyView<2> row = rows_of(logits_.view<2>(), d.slot);
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
  std::memcpy(row.data(), rows_of(logits_.view<2>(), slot).data, std::size_t(row.size_bytes()));
  return row;
}

}  // namespace cf::cpu_ref
