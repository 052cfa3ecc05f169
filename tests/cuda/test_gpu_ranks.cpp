// Ranks that share a model, on several GPUs; and their exchanges on one GPU, too, through the same code.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/sample.hpp"
#include "cuda/comm/communicator.hpp"
#include "cuda/ops/ranks/choose.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/stream.hpp"
#include "cuda/serve/ranked_model.hpp"
#include "tests/cuda/gpus.hpp"
#include "tests/cuda/occupy.hpp"
#include "tests/cuda/small_model.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;
using cuda::Communicator;
using cuda::RankedModel;

namespace {

/// A rank's part and its sum, on its GPU, and a stream to launch on.
struct RankPart {
  RankPart(const cuda::Context& c, std::int64_t most_bytes) : context(c) {
    require_cuda(cudaSetDevice(c.device()));
    x = taken(cuda::DeviceMemory::create(c, std::size_t(most_bytes), "part"));
    y = taken(cuda::DeviceMemory::create(c, std::size_t(most_bytes), "sum"));
    stream = taken(cuda::make_stream());
  }
  cuda::Context context;
  cuda::DeviceMemory x, y;
  cuda::Stream stream;
};

/// The ranks of a communicator, each with a part.
struct Parts {
  Parts(std::span<const int> devices, std::int64_t most_bytes, double patience_s = 10)
      : communicator(taken(Communicator::create(devices, {.part_bytes = most_bytes, .patience_s = patience_s}))) {
    for (int r = 0; r < communicator->ranks(); ++r) ranks.emplace_back(communicator->context(r), most_bytes);
  }
  ~Parts() {
    synchronize();
    (void)cudaSetDevice(0);
  }
  /// The call of a rank, for `tokens` tokens of that width.
  ops::AllReduce::Args call(RankPart& r, DType dtype, std::int64_t tokens, std::int64_t width, bool in_place = false) {
    return {.x = {r.x.data(), {1, tokens, width}, dtype},
            .y = {in_place ? r.x.data() : r.y.data(), {tokens, width}, dtype},
            .ranks = communicator->ranks()};
  }
  void launch(RankPart& r, const ops::AllReduce::Args& args) {
    require_cuda(cudaSetDevice(r.context.device()));
    cuda::LaunchList launches(r.context);
    require_ok(cuda::prepare(args, launches));
    require_ok(launches.submit(r.stream.get(), {.early = r.context.overlap()}));
  }
  void synchronize() {
    for (RankPart& r : ranks) {
      (void)cudaSetDevice(r.context.device());
      (void)cudaStreamSynchronize(r.stream.get());
    }
  }
  std::unique_ptr<Communicator> communicator;
  std::vector<RankPart> ranks;
};

Tensor fetch_sum(RankPart& r, const ops::AllReduce::Args& args) {
  require_cuda(cudaSetDevice(r.context.device()));
  Tensor t(args.y.dtype, {args.y.shape[0], args.y.shape[1]});
  require_cuda(cudaMemcpy(t.data(), args.y.data, std::size_t(t.size_bytes()), cudaMemcpyDeviceToHost));
  return t;
}

/// Gives each rank a part, and returns all parts, (ranks, tokens, width).
Tensor fill(Parts& p, DType dtype, std::int64_t tokens, std::int64_t width, std::uint64_t seed) {
  const auto ranks = std::int64_t(p.ranks.size());
  Tensor all(dtype, {ranks, tokens, width});
  fill_procedural(all.data(), dtype, 0, all.size(), ProceduralKind::activation, seed, "parts");
  const std::int64_t bytes = all.size_bytes() / ranks;
  for (std::int64_t r = 0; r < ranks; ++r) {
    RankPart& rank = p.ranks[std::size_t(r)];
    require_ok(cuda::copy_to_device(rank.context, rank.x.data(), static_cast<const std::byte*>(all.data()) + r * bytes,
                                    std::size_t(bytes)));
  }
  return all;
}

void check_exchanges(int ranks, bool on_one) {
  if (!on_one && lacks_gpus(ranks)) return;
  Parts p(devices_of(ranks, on_one), 4096 * 5120 * 2);
  std::uint64_t seed = 1;
  for (DType dtype : {DType::f16, DType::bf16, DType::f32})
    for (const auto& [tokens, width] : {std::pair{1, 8}, {1, 2560}, {3, 5120}, {64, 4096}, {129, 4096}, {1025, 5120}})
      for (bool in_place : {false, true}) {
        if (tokens > 1000 && (dtype != DType::f16 || in_place)) continue;  // the oracle takes its time
        if (tokens > 1000 && on_one && ranks > 2) continue;                // more blocks than fit
        CAPTURE(ranks, on_one, to_string(dtype), tokens, width, in_place);
        const Tensor parts = fill(p, dtype, tokens, width, seed++);
        for (RankPart& r : p.ranks) p.launch(r, p.call(r, dtype, tokens, width, in_place));
        p.synchronize();
        require_ok(p.communicator->status());
        const Tensor exact = parts.converted(DType::f64);
        Tensor sum(DType::f64, {tokens, width});
        const ops::AllReduce::Args oracle{.x = exact.view<3>(), .y = sum.view<2>(), .ranks = ranks};
        require_ok(cpu_ref::run(oracle));
        const Condition condition = taken(cpu_ref::condition(oracle));
        const Budget budget = ops::AllReduce::budget(ops::AllReduce::dims(oracle), {DType::f32, dtype}, condition);
        const Tensor first = fetch_sum(p.ranks[0], p.call(p.ranks[0], dtype, tokens, width, in_place));
        const auto error = compare(first, sum);
        REQUIRE(error);
        CAPTURE(error->rel_l2, budget.rel_l2, error->rel_max, budget.rel_max);
        CHECK(error->non_finite == 0);
        CHECK(error->within(budget));
        for (RankPart& r : p.ranks) CHECK(same_bits(fetch_sum(r, p.call(r, dtype, tokens, width, in_place)), first));
      }
}

void check_gathers(int ranks, bool on_one) {
  if (!on_one && lacks_gpus(ranks)) return;
  Parts p(devices_of(ranks, on_one), std::int64_t(64) * 64128 * 2 * ranks);
  std::uint64_t seed = 1;
  for (DType dtype : {DType::f16, DType::f32})
    for (const auto& [tokens, width] : {std::pair{1, 8}, {1, 25152}, {3, 25152}, {64, 4096}, {40, 64128}}) {
      if (dtype == DType::f32 && width > 30000) continue;
      CAPTURE(ranks, on_one, to_string(dtype), tokens, width);
      const Tensor parts = fill(p, dtype, tokens, width, seed++);
      std::vector<cuda::DeviceMemory> all;
      for (RankPart& r : p.ranks) {
        require_cuda(cudaSetDevice(r.context.device()));
        all.push_back(taken(cuda::DeviceMemory::create(r.context, std::size_t(parts.size_bytes()), "gathered")));
        cuda::LaunchList launches(r.context);
        require_ok(cuda::prepare(ops::AllGather::Args{.x = {r.x.data(), {1, tokens, width}, dtype},
                                                      .y = {all.back().data(), {tokens, ranks * width}, dtype},
                                                      .ranks = ranks},
                                 launches));
        for (int i = 0; i < 3; ++i) require_ok(launches.submit(r.stream.get()));
      }
      p.synchronize();
      require_ok(p.communicator->status());
      Tensor expected(dtype, {tokens, ranks * width});
      require_ok(cpu_ref::run(ops::AllGather::Args{.x = parts.view<3>(), .y = expected.view<2>(), .ranks = ranks}));
      for (std::size_t r = 0; r < p.ranks.size(); ++r) {
        require_cuda(cudaSetDevice(p.ranks[r].context.device()));
        Tensor got(dtype, expected.shape());
        require_cuda(cudaMemcpy(got.data(), all[r].data(), std::size_t(got.size_bytes()), cudaMemcpyDeviceToHost));
        CHECK(same_bits(got, expected));
      }
    }
}

/// Rows of logits with equal highest ones on several ranks, and what no id can be chosen among.
Tensor hostile_logits(DType dtype, std::int64_t slots, std::int64_t vocab, std::uint64_t seed) {
  Tensor t(DType::f32, {slots, vocab});
  fill_procedural(t.data(), DType::f32, 0, t.size(), ProceduralKind::activation, seed, "logits");
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::mt19937_64 random(seed);
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    float* const row = t.as<float>() + slot * vocab;
    const auto anywhere = [&]() -> float& { return row[random() % std::uint64_t(vocab)]; };
    switch (random() % 8) {
      case 0: anywhere() = infinity; break;
      case 1: anywhere() = std::numeric_limits<float>::quiet_NaN(); break;
      case 2: std::fill_n(row, vocab, -infinity); break;
      case 3: std::fill_n(row, vocab, -infinity), anywhere() = -3; break;
      case 4: std::fill_n(row, vocab, -1.f), anywhere() = 0.f, anywhere() = -0.f; break;
      case 5: row[vocab - 1] = 40; break;
      default:
        for (int i = 0; i < 4; ++i) anywhere() = 20;
    }
  }
  return t.converted(dtype);
}

/// How slots choose in turn: the highest logit, draws, with a penalty, and not at all.
Sampling sampling_of(std::int64_t slot, std::uint64_t seed) {
  switch ((std::uint64_t(slot) + seed) % 5) {
    case 0: return {.temperature = 0.8, .top_k = 5, .seed = seed};
    case 1: return {.temperature = 1.3, .top_p = 0.9, .min_p = 0.01, .seed = seed};
    case 2: return {.repetition_penalty = 1.3};
    default: return {};
  }
}

void check_choices(int ranks, bool on_one) {
  if (!on_one && lacks_gpus(ranks)) return;
  constexpr std::int64_t most_slots = 64, most_width = 16032;
  Parts p(devices_of(ranks, on_one), most_slots * most_width * ranks * 4);
  std::uint64_t seed = 1;
  for (DType dtype : {DType::f16, DType::bf16, DType::f32})
    for (const auto& [slots, width] : {std::pair{1, 8}, {1, 16032}, {5, 176}, {64, 1000}, {64, 16032}}) {
      const std::int64_t vocab = ranks * width, words = cuda::seen_words(vocab);
      if (on_one && ranks * slots > 128) continue;  // more blocks than fit, one an SM
      CAPTURE(ranks, on_one, to_string(dtype), slots, width, ++seed);
      const Tensor logits = hostile_logits(dtype, slots, vocab, seed);
      const Ids history = {0, std::int32_t(width - 1), std::int32_t(vocab - 1)};
      std::vector<cuda::SlotSampling> settings;
      std::vector<std::uint32_t> seen(std::size_t(slots * words), 0);
      std::vector<std::int32_t> positions, expected;
      for (std::int64_t slot = 0; slot < slots; ++slot) {
        const Sampling s = sampling_of(slot, seed);
        const bool idle = (std::uint64_t(slot) + seed) % 5 == 4 && slots > 1;
        settings.push_back({.rule = s.rule(),
                            .sequence = std::uint64_t(slot) * 7,
                            .chooses = idle ? 0 : 1,
                            .penalises = s.repetition_penalty != 1 ? 1 : 0});
        positions.push_back(std::int32_t(slot == 3 ? -1 : 11 * slot));
        for (const std::int32_t id : history) seen[std::size_t(slot * words + id / 32)] |= 1u << id % 32;
        std::vector<float> row;
        for (std::int64_t i = 0; i < vocab; ++i)
          row.push_back(float(load_element(logits.data(), dtype, slot * vocab + i)));
        const auto id = cpu_ref::sample(std::span<const float>(row), s, history, std::uint64_t(slot) * 7,
                                        std::max(0, positions.back()));
        expected.push_back(idle ? -77 : id && positions.back() >= 0 ? *id : cuda::kNoToken);
      }
      struct OnRank {
        cuda::DeviceMemory part, logits, settings, positions, seen, chosen;
      };
      std::vector<OnRank> on;
      const auto copied = [](const cuda::Context& c, const void* from, std::size_t bytes) {
        cuda::DeviceMemory memory = taken(cuda::DeviceMemory::create(c, bytes, "test"));
        require_ok(cuda::copy_to_device(c, memory.data(), from, bytes));
        return memory;
      };
      const std::int64_t row_bytes = width * std::int64_t(size_bytes(dtype));
      const std::vector<std::int32_t> untouched(std::size_t(slots), -77);
      const std::vector<std::byte> nothing(std::size_t(logits.size_bytes()), std::byte(0xff));
      for (std::size_t rank = 0; rank < p.ranks.size(); ++rank) {
        const RankPart& r = p.ranks[rank];
        require_cuda(cudaSetDevice(r.context.device()));
        std::vector<std::byte> part;
        for (std::int64_t slot = 0; slot < slots; ++slot) {
          const auto* from =
              static_cast<const std::byte*>(logits.data()) + (slot * ranks + std::int64_t(rank)) * row_bytes;
          part.insert(part.end(), from, from + row_bytes);
        }
        on.push_back({copied(r.context, part.data(), part.size()), copied(r.context, nothing.data(), nothing.size()),
                      copied(r.context, settings.data(), settings.size() * sizeof settings[0]),
                      copied(r.context, positions.data(), positions.size() * 4),
                      copied(r.context, seen.data(), seen.size() * 4),
                      copied(r.context, untouched.data(), untouched.size() * 4)});
      }
      for (std::size_t rank = 0; rank < p.ranks.size(); ++rank) {
        RankPart& r = p.ranks[rank];
        const OnRank& m = on[rank];
        require_cuda(cudaSetDevice(r.context.device()));
        cuda::LaunchList launches(r.context);
        require_ok(cuda::prepare(
            cuda::RankChoiceArgs{.choice = {.logits = {},
                                            .settings = reinterpret_cast<const cuda::SlotSampling*>(m.settings.data()),
                                            .positions = reinterpret_cast<const std::int32_t*>(m.positions.data()),
                                            .seen = reinterpret_cast<std::uint32_t*>(m.seen.data()),
                                            .chosen = reinterpret_cast<std::int32_t*>(m.chosen.data())},
                                 .part = {m.part.data(), {slots, width}, dtype},
                                 .logits = {m.logits.data(), {slots, vocab}, dtype}},
            launches));
        require_ok(launches.submit(r.stream.get(), {.early = r.context.overlap()}));
      }
      p.synchronize();
      require_ok(p.communicator->status());
      for (std::size_t rank = 0; rank < p.ranks.size(); ++rank) {
        require_cuda(cudaSetDevice(p.ranks[rank].context.device()));
        std::vector<std::int32_t> chosen(static_cast<std::size_t>(slots));
        require_cuda(cudaMemcpy(chosen.data(), on[rank].chosen.data(), chosen.size() * 4, cudaMemcpyDeviceToHost));
        CHECK(chosen == expected);
        std::vector<std::uint32_t> marked(seen.size());
        require_cuda(cudaMemcpy(marked.data(), on[rank].seen.data(), marked.size() * 4, cudaMemcpyDeviceToHost));
        std::vector<std::uint32_t> should = seen;
        for (std::size_t slot = 0; slot < settings.size(); ++slot)
          if (settings[slot].penalises && expected[slot] >= 0)
            should[slot * std::size_t(words) + std::size_t(expected[slot]) / 32] |= 1u << expected[slot] % 32;
        CHECK(marked == should);
        std::vector<std::byte> rows(nothing.size());
        require_cuda(cudaMemcpy(rows.data(), on[rank].logits.data(), rows.size(), cudaMemcpyDeviceToHost));
        for (std::size_t slot = 0; slot < settings.size(); ++slot) {
          const std::size_t bytes = std::size_t(row_bytes * ranks), at = slot * bytes;
          const bool by_word = settings[slot].chooses == 0 || cuda::takes_highest(settings[slot]);
          const void* const whole = by_word ? nothing.data() : static_cast<const std::byte*>(logits.data()) + at;
          CHECK(std::memcmp(rows.data() + at, whole, bytes) == 0);
        }
      }
    }
}

void check_delays(int ranks, bool on_one, int runs) {
  if (!on_one && lacks_gpus(ranks)) return;
  constexpr std::int64_t most = 257 * 5120 * 2;
  Parts p(devices_of(ranks, on_one), most);
  fill(p, DType::f16, 257, 5120, 3);
  std::mt19937 random(1);
  std::map<std::int64_t, Tensor> expected;
  for (int run = 0; run < runs; ++run) {
    const std::int64_t tokens = std::array{1, 2, 8, 64, 257}[random() % 5];
    CAPTURE(run, tokens);
    for (RankPart& r : p.ranks) {
      require_cuda(cudaSetDevice(r.context.device()));
      require_cuda(cudaMemsetAsync(r.y.data(), 0xff, std::size_t(most), r.stream.get()));
      if (run % 50 == 0 && random() % 2) enqueue_occupy(r.stream.get(), 4, 1 + int(random() % 3));
      p.launch(r, p.call(r, DType::f16, tokens, 5120));
    }
    p.synchronize();
    require_ok(p.communicator->status());
    for (RankPart& r : p.ranks) {
      Tensor sum = fetch_sum(r, p.call(r, DType::f16, tokens, 5120));
      if (!expected.contains(tokens)) expected.emplace(tokens, sum.clone());
      REQUIRE(same_bits(sum, expected.at(tokens)));
    }
  }
}

/// A small model on ranks beside the oracle, and its decoder beside one GPU's.
void check_model(const Small& small, int ranks, const Model::Options& options) {
  if (lacks_gpus(ranks)) return;
  const std::vector<int> devices = devices_of(ranks, false);
  const auto model =
      taken(RankedModel::create(devices, small.config.name, small.config, small.weights->weights, options));
  CHECK(model->ranks() == ranks);
  const Ids ids = ids_of(41, 1);
  const Reference reference = reference_of(small, ids);
  Tensor logits(model->activation(), {41, kVocab});
  require_ok(model->forward(0, 0, ids, logits.view<2>()));
  check_rows(logits, reference, 0);
  model->release(0);
  // A prompt, and then single tokens.
  require_ok(model->prefill(0, 0, std::span(ids).first(20)));
  check_rows(row_of(*model, 0), reference, 19);
  for (std::size_t i = 20; i < ids.size(); ++i) {
    const ModelRunner::Token token{0, ids[i], std::int64_t(i)};
    require_ok(model->step(std::span(&token, 1)));
    check_rows(row_of(*model, 0), reference, std::int64_t(i));
  }
}

}  // namespace

TEST_CASE("all_reduce between ranks on one GPU is the oracle's sum within the budget, alike on all ranks",
          "[gpu][ranks][small]") {
  check_exchanges(2, true);
  check_exchanges(4, true);
}

TEST_CASE("all_reduce between GPUs is the oracle's sum within the budget, alike on all ranks", "[gpu][ranks]") {
  check_exchanges(2, false);
  check_exchanges(4, false);
}

TEST_CASE("all_gather between ranks copies every rank's part", "[gpu][ranks]") {
  check_gathers(2, true);
  check_gathers(2, false);
  check_gathers(4, false);
}

TEST_CASE("Ranks that each have a part of the logits choose what one GPU chooses among all", "[gpu][ranks][small]") {
  check_choices(2, true);
  check_choices(4, true);
  check_choices(2, false);
  check_choices(4, false);
}

TEST_CASE("Ranks refuse to choose among parts that are not theirs", "[gpu][ranks]") {
  Parts p(devices_of(2, true), 1 << 16);
  RankPart& r = p.ranks[0];
  const auto refused = [&](const cuda::Context& context, std::int64_t slots, std::int64_t width, std::int64_t vocab) {
    auto* const words = reinterpret_cast<std::int32_t*>(r.y.data());
    cuda::LaunchList launches(context);
    return cuda::prepare(
        cuda::RankChoiceArgs{.choice = {.logits = {},
                                        .settings = reinterpret_cast<const cuda::SlotSampling*>(r.y.data()),
                                        .positions = words,
                                        .seen = reinterpret_cast<std::uint32_t*>(words),
                                        .chosen = words},
                             .part = {r.x.data(), {slots, width}, DType::f16},
                             .logits = {r.y.data(), {slots, vocab}, DType::f16}},
        launches);
  };
  constexpr Code bad = Code::invalid_argument;
  require_ok(refused(r.context, 2, 64, 128));
  CHECK(refusal_fault(refused(taken(cuda::Context::create(0)), 2, 64, 128), bad, {"expected a rank's context"}) == "");
  CHECK(refusal_fault(refused(r.context, 2, 64, 129), bad, {"2 ranks must divide vocab, got 129"}) == "");
  CHECK(refusal_fault(refused(r.context, 2, 72, 128), bad, {"choose: 'part' has shape"}) == "");
  CHECK(refusal_fault(refused(r.context, 2, 60, 120), Code::unimplemented,
                      {"rows of a multiple of 16 bytes, got 120"}) == "");
  CHECK(refusal_fault(refused(r.context, 129, 64, 128), bad, {"the 128 slots whose logits the ranks can exchange"}) ==
        "");
}

TEST_CASE("all_reduce makes the same bits a thousand times, whichever rank is late", "[gpu][ranks]") {
  check_delays(2, true, 200);
  check_delays(2, false, 1000);
  check_delays(4, false, 200);
}

TEST_CASE("A rank that does not come is named, and the others end", "[gpu][ranks]") {
  Parts p(devices_of(2, gpu_count() < 2), 1 << 16, 0.05);
  fill(p, DType::f16, 1, 2560, 3);
  for (int i = 0; i < 3; ++i) p.launch(p.ranks[1], p.call(p.ranks[1], DType::f16, 1, 2560));
  p.synchronize();
  CHECK(refusal_fault(p.communicator->status(), Code::device_error, {"rank 1 has waited 50 ms for rank 0"}) == "");
}

TEST_CASE("Ranks that cannot be are refused by name", "[gpu][ranks]") {
  const auto refused = [](std::vector<int> devices, std::int64_t bytes, std::string_view what) {
    return refusal_fault(Communicator::create(devices, {.part_bytes = bytes}).status(),
                         what.starts_with("no CUDA") ? Code::device_error : Code::invalid_argument, {what});
  };
  CHECK(refused({0}, 16, "ranks: expected 2 to 8 GPUs, got 1") == "");
  CHECK(refused({0, 0}, 0, "ranks: part_bytes must be at least 1, got 0") == "");
  CHECK(refused({0, 99}, 16, "no CUDA device 99") == "");
  const Small small;
  const auto create = [&](std::vector<int> devices, const Model::Options& o) {
    return RankedModel::create(devices, "small", small.config, small.weights->weights, o).status();
  };
  CHECK(refusal_fault(create({0, 0, 0}, {}), Code::invalid_argument, {"3 ranks must divide num_heads, got 4"}) == "");
  CHECK(refusal_fault(create({0, 0}, {.impl = Impl::layer}), Code::unimplemented,
                      {"several GPUs takes the impls unfused, graph and persistent, got layer"}) == "");
  Parts p(devices_of(2, true), 1 << 12);
  cuda::LaunchList launches(p.ranks[0].context);
  CHECK(refusal_fault(cuda::prepare(p.call(p.ranks[0], DType::f16, 64, 2560), launches), Code::invalid_argument,
                      {"what the ranks can exchange"}) == "");
  auto call = p.call(p.ranks[0], DType::f16, 1, 64);
  call.ranks = 3;
  CHECK(refusal_fault(cuda::prepare(call, launches), Code::invalid_argument,
                      {"expected the 2 of the context, got 3"}) == "");
}

TEST_CASE("A model on several GPUs: its logits are the oracle's within the budget", "[gpu][ranks]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  check_model(Small(dtype), 2, {.capacity = 96});
  check_model(Small(dtype), 4, {.capacity = 96, .chunk = 7});
  check_model(Small(dtype, {.bits = 4, .group_size = 64}), 2, {.capacity = 96});
  check_model(Small(dtype, {}, gated_config()), 2, {.capacity = 96, .impl = Impl::unfused});
  check_model(Small(dtype, {.bits = 4, .group_size = 32}, gated_config(ModelType::qwen2)), 2, {.capacity = 96});
  check_model(Small(dtype), 2, {.slots = 3, .capacity = 128, .pages = 8});
  check_model(Small(dtype), 2, {.capacity = 96, .impl = Impl::persistent});
  check_model(Small(dtype), 2, {.slots = 3, .capacity = 128, .impl = Impl::persistent});
  check_model(Small(dtype, {}, gated_config()), 2, {.capacity = 96, .impl = Impl::persistent});
}

TEST_CASE("Ranks that divide the LM head give the oracle's logits within the budget", "[gpu][ranks]") {
  if (lacks_gpus(2)) return;
  const Impl impl = GENERATE(Impl::unfused, Impl::graph);
  ModelConfig m = small_config();
  m.vocab_size = 336;
  const Small small(DType::f16, {}, m);
  const auto model = taken(RankedModel::create(devices_of(2, false), "small", small.config, small.weights->weights,
                                               {.slots = 3, .capacity = 96, .impl = impl}));
  const auto oracle = taken(cpu_ref::Model::create(small.config, small.weights->weights, small.weights,
                                                   {.slots = 3, .capacity = 96, .activation = DType::f64}));
  Condition condition{0, 0};
  oracle->measure(&condition);
  for (std::int64_t slot = 0; slot < 3; ++slot)
    for (ModelRunner* runner : {static_cast<ModelRunner*>(model.get()), static_cast<ModelRunner*>(oracle.get())})
      require_ok(runner->prefill(slot, 0, ids_of(7 + slot, std::uint64_t(slot))));
  for (std::int64_t i = 0; i < 4; ++i) {
    const Ids next = ids_of(3, 50 + std::uint64_t(i));
    std::vector<ModelRunner::Token> tokens;
    for (std::int64_t slot = 0; slot < 3; ++slot) tokens.push_back({slot, next[std::size_t(slot)], 7 + slot + i});
    require_ok(model->step(tokens));
    require_ok(oracle->step(tokens));
    for (std::int64_t slot = 0; slot < 3; ++slot) {
      const auto error = compare(taken(model->logits(slot)), taken(oracle->logits(slot)));
      REQUIRE(error);
      const Budget budget = model_budget(small.config, DType::f16, condition);
      CAPTURE(slot, i, error->rel_l2, budget.rel_l2, error->rel_max, budget.rel_max);
      CHECK(error->within(budget));
    }
  }
}

TEST_CASE("Ranks that divide the LM head choose what the sampler chooses among their logits", "[gpu][ranks]") {
  const int ranks = GENERATE(2, 4);
  if (lacks_gpus(ranks)) return;
  const Impl impl = GENERATE(Impl::unfused, Impl::graph);
  CAPTURE(ranks, to_string(impl));
  ModelConfig m = small_config();
  m.vocab_size = 352;
  const Small small(DType::f16, {}, m);
  const auto model = taken(RankedModel::create(devices_of(ranks, false), "small", small.config, small.weights->weights,
                                               {.slots = 4, .capacity = 96, .impl = impl}));
  std::vector<Ids> ids;
  for (std::int64_t slot = 0; slot < 4; ++slot) {
    ids.push_back(ids_of(5 + slot, std::uint64_t(slot)));
    require_ok(model->prefill(slot, 0, ids.back()));
  }
  const auto expected_of = [&](const ModelRunner::Draw& d) {
    const Tensor row = taken(model->logits(d.slot)).converted(DType::f32);
    return taken(cpu_ref::sample(std::span<const float>(row.as<float>(), std::size_t(row.size())), d.sampling,
                                 d.history, d.sequence, d.position));
  };
  for (int i = 0; i < 20; ++i) {
    CAPTURE(i);
    // Slot 1 waits at times: its logits are kept while others go on.
    std::vector<ModelRunner::Draw> draws;
    for (std::int64_t slot = 0; slot < 4; ++slot) {
      const bool draws_drawn = i / 5 % 2 == 1;  // greedy steps and drawn ones in turn
      const Ids& history = ids[std::size_t(slot)];
      if (slot != 1 || i % 3 == 2)
        draws.push_back({.slot = slot,
                         .sampling = draws_drawn ? sampling_of(slot, std::uint64_t(i)) : Sampling{},
                         .sequence = std::uint64_t(slot),
                         .position = std::int64_t(history.size()),
                         .history = history});
    }
    std::vector<std::int32_t> expected, chosen;
    if (i % 2)
      for (const auto& d : draws) expected.push_back(expected_of(d));
    for (Result<std::int32_t>& id : model->choose(draws)) chosen.push_back(taken(std::move(id)));
    if (i % 2 == 0)
      for (const auto& d : draws) expected.push_back(expected_of(d));
    CHECK(chosen == expected);
    std::vector<ModelRunner::Token> tokens;
    for (std::size_t d = 0; d < draws.size(); ++d) tokens.push_back({draws[d].slot, chosen[d], draws[d].position});
    for (std::size_t d = 0; d < draws.size(); ++d) ids[std::size_t(draws[d].slot)].push_back(chosen[d]);
    require_ok(model->step(tokens));
  }
}

TEST_CASE("A decoder of many slots on ranks gives the same ids on every run, sampled ones too", "[gpu][ranks]") {
  if (lacks_gpus(2)) return;
  const Small small(DType::f16);
  const auto run = [&] {
    Decoder d(taken(RankedModel::create(devices_of(2, false), "small", small.config, small.weights->weights,
                                        {.slots = 4, .capacity = 96})));
    std::vector<Decoder::Sequence> sequences;
    for (std::uint64_t i = 0; i < 6; ++i) {
      SequenceOptions o;
      o.id = i;
      o.max_new_tokens = 12;
      if (i % 2) o.sampling = {.temperature = 0.8f, .top_k = 20, .seed = i};
      sequences.push_back(taken(d.add(ids_of(std::int64_t(5 + 7 * i), i), o)));
    }
    while (d.active()) taken(d.decode(4));
    std::vector<Ids> ids;
    for (Decoder::Sequence s : sequences) {
      CHECK(taken(d.finish(s)) != Finish::failed);
      ids.push_back(taken(d.ids(s)));
    }
    return ids;
  };
  const std::vector<Ids> first = run();
  for (int i = 0; i < 3; ++i) CHECK(run() == first);
}

TEST_CASE("Layers that are made one by one give the same bits as weights that lie on the host", "[gpu][ranks]") {
  const WeightFormat linears = GENERATE(WeightFormat{}, WeightFormat{.bits = 4, .group_size = 64});
  const Small small(DType::f16, linears);
  const OwnedModelWeights outer = procedural_outer(small.config, DType::f16, 7, linears);
  const Model::LayerOf layer_of = [&](std::int64_t layer) -> Result<OwnedLayerWeights> {
    return procedural_layer(small.config, DType::f16, layer, 7, linears, 2);
  };
  const auto logits_of = [](ModelRunner& model) {
    require_ok(model.prefill(0, 0, ids_of(9, 1)));
    return row_of(model, 0);
  };
  const Model::Options options{.capacity = 96};
  const auto made = taken(Model::create(context(), "small", small.config, outer.weights, options, layer_of));
  CHECK(same_bits(logits_of(*made), logits_of(*small.model())));
  const Status lacking = Model::create(context(), "small", small.config, outer.weights, options).status();
  CHECK(lacking.code() == Code::invalid_argument);
  if (lacks_gpus(2)) return;
  const auto ranked = [&](const ModelWeights& weights, const Model::LayerOf& layers) {
    return taken(RankedModel::create(devices_of(2, false), "small", small.config, weights, options, layers));
  };
  CHECK(same_bits(logits_of(*ranked(outer.weights, layer_of)), logits_of(*ranked(small.weights->weights, {}))));
  const Status failed =
      RankedModel::create(devices_of(2, false), "small", small.config, outer.weights, options, [](std::int64_t layer) {
        return Result<OwnedLayerWeights>(Status::error(Code::io_error, "layer " + std::to_string(layer) + " is lost"));
      }).status();
  CHECK(refusal_fault(failed, Code::io_error, {"layer 0 is lost"}) == "");
}

TEST_CASE("A model on ranks gives all memory back, and takes what it says", "[gpu][ranks][alone]") {
  if (lacks_gpus(2)) return;
  const Small small(DType::f16);
  const auto free_bytes = [] {
    std::size_t free = 0, all = 0;
    require_cuda(cudaMemGetInfo(&free, &all));
    return free;
  };
  const auto make = [&] {
    const auto model = taken(RankedModel::create(devices_of(2, false), "small", small.config, small.weights->weights,
                                                 {.slots = 2, .capacity = 96}));
    const Ids ids = ids_of(9, 1);
    require_ok(model->prefill(0, 0, ids));
    return model->bytes();
  };
  make();  // loads the kernels
  const std::size_t before = free_bytes();
  const cuda::ModelBytes took = make();
  CHECK(free_bytes() == before);
  const cuda::ModelBytes said =
      taken(RankedModel::bytes(2, small.config, small.weights->weights, {.slots = 2, .capacity = 96}));
  CHECK(std::abs(took.total() - said.total()) < 0.01 * said.total());
}
