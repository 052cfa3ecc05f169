#include "cuda/serve/ranked_model.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/contract.hpp"
#include "core/model/ranks.hpp"
#include "core/model/score.hpp"
#include "cuda/comm/communicator.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/serve/rank_threads.hpp"

namespace cf::cuda {
namespace {

/// Makes a device the calling thread's for as long as this object lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    (void)cudaGetDevice(&before_);
    if (before_ != device) (void)cudaSetDevice(device);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { (void)cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

/// The most bytes of a rank's part that a step sums, a hidden state of each of its tokens; or, of all ranks together, that
/// it gathers, the logits of its slots.
std::int64_t part_bytes(const ModelSpec& m, const ModelWeights& w, const Model::Options& o) {
  const std::int64_t sums = std::max(o.slots, o.chunk) * m.shape.hidden_size,
                     logits = std::min(o.slots, Model::kRankHeadRows) * m.shape.vocab_size;
  return std::max(sums, logits) * std::int64_t(size_bytes(w.embed_in.dtype));
}

/// What a step of the persistent kernel takes besides.
std::int64_t area_bytes(std::int64_t ranks, const Model::Options& o) {
  return o.impl == Impl::persistent ? PersistentKernel::rank_area_bytes(ranks) : 0;
}

std::string rank_name(std::size_t rank, std::span<const int> devices) {
  return "rank " + std::to_string(rank) + " on GPU " + std::to_string(devices[rank]);
}

}  // namespace

struct RankedModel::State {
  State(std::span<const int> d, const ModelSpec& m)
      : spec(m),
        devices(d.begin(), d.end()),
        models(d.size()),
        meetings(d.size()),
        decided(d.size(), 0),
        rows(d.size()),
        threads(int(d.size()), [this](int rank) { (void)cudaSetDevice(devices[std::size_t(rank)]); }) {}
  ~State() {
    on_all([&](int rank) { models[std::size_t(rank)].reset(); });
  }

  /// Runs work(rank) for all ranks at the same time, each with its device as the thread's.
  void on_all(const RankThreads::Work& work) {
    threads.each([&](int rank) {
      if (rank > 0) return work(rank);
      const OnDevice here(devices[0]);
      work(0);
    });
  }

  /// Asks all ranks at the same time. The first rank's Status, where all are ok or all refuse: then nothing has
  /// happened. What only some ranks refuse has made them differ, and later calls are refused.
  template <class Ask>
  Status each(Ask&& ask) {
    CF_TRY(broken);
    std::vector<Status> answers(models.size());
    decisions.begin();
    std::fill(decided.begin(), decided.end(), 0);
    meetings.begin();
    on_all([&](int rank) {
      answers[std::size_t(rank)] = ask(*models[std::size_t(rank)], std::size_t(rank));
      if (rank == 0) decisions.end();
      meetings.end(std::size_t(rank));
    });
    const auto failed = std::ranges::find_if(answers, [](const Status& s) { return !s; });
    const bool differ = std::ranges::any_of(answers, [&](const Status& s) { return bool(s) != bool(answers[0]); });
    if (const Status exchanged = communicator->status(); !exchanged)
      broken = exchanged;
    else if (differ)
      broken = Status::error(failed->code(),
                             rank_name(std::size_t(failed - answers.begin()), devices) + ": " + failed->message());
    CF_TRY(broken);
    return answers[0];
  }

  Model& first() { return *models[0]; }

  ModelSpec spec;
  std::vector<int> devices;
  std::unique_ptr<Communicator> communicator;
  std::vector<std::unique_ptr<Model>> models;
  ModelBytes taken{};  // by a rank
  Status broken;       // what failed first
  bool is_watched = false;
  Check check;
  Decisions decisions;
  Meetings meetings;
  std::vector<std::size_t> decided;          // by rank: the decisions that it has seen in this call
  std::vector<std::vector<std::byte>> rows;  // by rank: logits that go to no caller
  RankThreads threads;                       // ends first
};

RankedModel::RankedModel(std::unique_ptr<State> state) : state_(std::move(state)) {}
RankedModel::~RankedModel() = default;

Result<std::unique_ptr<RankedModel>> RankedModel::create(std::span<const int> devices, const std::string& name,
                                                         const ModelSpec& spec, const ModelWeights& weights,
                                                         const Model::Options& options,
                                                         const Model::LayerOf& layer_of) {
  CF_TRY(layer_of ? check_outer_weights(spec, weights) : check_model_weights(spec, weights));
  CF_TRY(bytes(std::int64_t(devices.size()), spec, weights, options).status());
  CF_TRY_ASSIGN(std::unique_ptr<Communicator> communicator,
                Communicator::create(devices, {.part_bytes = part_bytes(spec, weights, options),
                                               .area_bytes = area_bytes(std::int64_t(devices.size()), options)}));
  auto state = std::make_unique<State>(devices, spec);
  State& s = *state;
  s.communicator = std::move(communicator);
  s.communicator->set_meetings([&s](int rank) { return s.meetings.meet(std::size_t(rank)); });
  std::vector<Status> made(devices.size());
  s.on_all([&](int rank) {
    Result<std::unique_ptr<Model>> model =
        Model::create(s.communicator->context(rank), name, spec, weights, options, layer_of);
    made[std::size_t(rank)] = model.status();
    if (model) s.models[std::size_t(rank)] = std::move(*model);
    s.meetings.end(std::size_t(rank));
  });
  for (std::size_t rank = 0; rank < made.size(); ++rank) {
    if (made[rank]) continue;
    const bool alike = std::ranges::all_of(made, [&](const Status& m) { return m.message() == made[0].message(); });
    return alike ? made[0] : Status::error(made[rank].code(), rank_name(rank, devices) + ": " + made[rank].message());
  }
  s.taken = s.first().bytes();
  s.taken.workspace += double(s.communicator->device_bytes());
  return std::unique_ptr<RankedModel>(new RankedModel(std::move(state)));
}

Result<ModelBytes> RankedModel::bytes(std::int64_t ranks, const ModelSpec& spec, const ModelWeights& weights,
                                      const Model::Options& options) {
  CF_TRY_ASSIGN(const ModelSpec part, spec.of_rank(0, ranks));
  CF_TRY_ASSIGN(const ModelWeights outline, outline_of_rank(spec, weights, 0, ranks));
  ModelBytes all = Model::bytes(part, outline, options);
  all.workspace += Communicator::bytes(ranks, part_bytes(spec, weights, options), area_bytes(ranks, options));
  return all;
}

Status RankedModel::check_memory(std::span<const int> devices, const std::string& name, const ModelSpec& spec,
                                 const ModelWeights& weights, const Model::Options& options) {
  const auto ranks = std::int64_t(devices.size());
  CF_TRY_ASSIGN(const ModelSpec part, spec.of_rank(0, ranks));
  CF_TRY_ASSIGN(const ModelWeights outline, outline_of_rank(spec, weights, 0, ranks));
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    const OnDevice there(devices[rank]);
    if (const Status s = Model::check_memory(name, part, outline, options); !s)
      return Status::error(s.code(), rank_name(rank, devices) + ": " + s.message());
  }
  return {};
}

std::int64_t RankedModel::ranks() const { return std::int64_t(state_->models.size()); }
Impl RankedModel::impl() const { return state_->first().impl(); }
const ModelBytes& RankedModel::bytes() const { return state_->taken; }
const ModelSpec& RankedModel::model() const { return state_->spec; }
std::int64_t RankedModel::slots() const { return state_->first().slots(); }
std::int64_t RankedModel::capacity() const { return state_->first().capacity(); }
EntryLimit RankedModel::limit() const { return state_->first().limit(); }
DType RankedModel::activation() const { return state_->first().activation(); }
std::int64_t RankedModel::length(std::int64_t slot) const { return state_->first().length(slot); }
std::int64_t RankedModel::pass_tokens() const { return state_->first().pass_tokens(); }
std::int64_t RankedModel::preferred_step_tokens() const { return state_->first().preferred_step_tokens(); }
std::int64_t RankedModel::page_entries() const { return state_->first().page_entries(); }
std::int64_t RankedModel::free_pages() const { return state_->first().free_pages(); }
Status RankedModel::check_room(std::span<const Run> runs) const { return state_->first().check_room(runs); }
bool RankedModel::runs_ahead(std::span<const Run> runs, std::span<const std::int32_t> ids) const {
  return state_->first().runs_ahead(runs, ids);
}
ScoreSizes RankedModel::score_sizes(std::int64_t slots, std::int64_t top) const {
  return state_->first().score_sizes(slots, top);
}

Status RankedModel::run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) {
  State& s = *state_;
  if (s.is_watched)
    return Status::error(Code::unimplemented, "model: expected no visitor of sites: each of several GPUs has a part");
  if (logits.stream)
    return Status::error(Code::unimplemented,
                         "model: expected the host's memory for logits, got a GPU's stream: a "
                         "model on several GPUs is of none");
  return s.each([&](Model& m, std::size_t rank) {
    StepLogits own = logits;
    if (rank > 0 && logits.to.data) {
      s.rows[rank].resize(std::size_t(std::max<std::int64_t>(0, logits.to.bytes())));
      own.to.data = s.rows[rank].data();
    }
    return m.run(runs, ids, own);
  });
}

Result<std::vector<RowScore>> RankedModel::score(std::span<const Run> runs, std::span<const std::int32_t> ids,
                                                 const ScoreRequest& request) {
  std::vector<RowScore> scores;
  CF_TRY(state_->each([&](Model& m, std::size_t rank) -> Status {
    CF_TRY_ASSIGN(std::vector<RowScore> of_rank, m.score(runs, ids, request));
    if (rank == 0) scores = std::move(of_rank);
    return {};
  }));
  return scores;
}

std::vector<Result<std::int32_t>> RankedModel::choose(std::span<const Draw> draws) {
  // A choice that fails does so on every rank: the logits have the same bits.
  std::vector<Result<std::int32_t>> ids;
  const Status asked = state_->each([&](Model& m, std::size_t rank) {
    std::vector<Result<std::int32_t>> of_rank = m.choose(draws);
    if (rank == 0) ids = std::move(of_rank);
    return Status();
  });
  if (asked) return ids;
  return std::vector<Result<std::int32_t>>(draws.size(), asked);
}

Result<Tensor> RankedModel::logits(std::int64_t slot) {
  Tensor row;
  CF_TRY(state_->each([&](Model& m, std::size_t rank) -> Status {
    CF_TRY_ASSIGN(Tensor of_rank, m.logits(slot));
    if (rank == 0) row = std::move(of_rank);
    return {};
  }));
  return row;
}

void RankedModel::release(std::int64_t slot) {
  (void)state_->each([&](Model& m, std::size_t) {
    m.release(slot);
    return Status();
  });
}

Status RankedModel::fork(std::int64_t from, std::int64_t to, std::int64_t n) {
  return state_->each([&](Model& m, std::size_t) { return m.fork(from, to, n); });
}

void RankedModel::watch(Visit visit) { state_->is_watched = bool(visit); }

void RankedModel::check_between(Check check) {
  State& s = *state_;
  s.check = std::move(check);
  if (!s.check) {
    for (auto& m : s.models) m->check_between({});
    return;
  }
  for (std::size_t rank = 0; rank < s.models.size(); ++rank)
    s.models[rank]->check_between([&s, rank]() -> Status {
      if (rank > 0) return s.decisions.wait(s.decided[rank]++);
      Status decision = s.check();
      s.decisions.make(decision);
      return decision;
    });
}

Status RankedModel::fetch(const SiteTensor&, void*) {
  return Status::error(Code::unimplemented, "model: expected no visitor of sites: each of several GPUs has a part");
}

}  // namespace cf::cuda
