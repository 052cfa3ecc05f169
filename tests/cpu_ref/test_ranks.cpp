// Ranks that share a model, on the oracle: their programs, run beside each other with a sum at each all_reduce, compute
// what the whole model computes.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/compare.hpp"
#include "core/model/passes.hpp"
#include "core/model/ranks.hpp"
#include "core/rank_choice.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/model.hpp"
#include "cpu_ref/sample.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/rank_process.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/small_model.hpp"

using namespace cf;
using namespace cf::test;

namespace {

void require_ok(const Status& s) {
  INFO(s.message());
  REQUIRE(s);
}

struct Format {
  DType weight = DType::f32;
  WeightFormat linears{};
};

/// The whole model's step, or one rank's: its weights are cut out of the whole's, and so are its caches.
std::unique_ptr<HostStep> step_of_rank(const ModelConfig& m, const HostStep& whole, std::int64_t rank,
                                       std::int64_t ranks, std::int64_t batch, std::int64_t q_len, DType activation) {
  const auto part = whole.spec.of_rank(rank, ranks);
  require_ok(part.status());
  OwnedModelWeights weights{whole.weights.weights, {}};
  for (LayerWeights& layer : weights.weights.layers) {
    auto cut = layer_of_rank(whole.spec, layer, rank, ranks);
    require_ok(cut.status());
    layer = cut->weights;
    for (Tensor& t : cut->storage) weights.storage.push_back(std::move(t));
  }
  auto step = std::make_unique<HostStep>(*part, std::move(weights), batch, q_len, activation);
  const std::int64_t heads = part->shape.num_kv_heads;
  for (std::size_t l = 0; l < step->caches.size(); ++l)
    for (const auto& [from, to] :
         {std::pair{&whole.caches[l].k, &step->caches[l].k}, {&whole.caches[l].v, &step->caches[l].v}}) {
      const std::int64_t bytes = to->bytes() / batch;
      for (std::int64_t b = 0; b < batch; ++b)
        std::memcpy(static_cast<std::byte*>(to->data) + b * bytes,
                    static_cast<const std::byte*>(from->data) +
                        (b * whole.spec.shape.num_kv_heads + rank * heads) * (bytes / heads),
                    std::size_t(bytes));
    }
  INFO(m.name);
  return step;
}

/// What goes wrong between ranks, for the mutations. By default nothing does.
struct Wire {
  std::function<bool(std::size_t node)> leaves_out = [](std::size_t) { return false; };
  std::function<std::size_t(std::size_t rank, std::size_t place)> order = [](std::size_t, std::size_t place) {
    return place;
  };
  bool is_stale = false;  // each rank reads the others' parts of the exchange before, if they were as large
};

/// Whether a call is made of all ranks together.
template <class Args>
constexpr bool is_exchange = std::is_same_v<Args, ops::AllReduce::Args> || std::is_same_v<Args, ops::AllGather::Args>;

/// Runs the ranks' programs beside each other, node by node. The wire brings each rank the parts of all.
void run_ranks(const std::vector<std::unique_ptr<HostStep>>& steps, const Wire& wire = {}) {
  std::vector<Program> programs;
  std::vector<Tensor> head_parts;
  for (const auto& s : steps) {
    Result<Program> program = s->record();
    require_ok(program.status());
    const AnyView<2> logits = s->tensors.logits;
    head_parts.emplace_back(logits.dtype, Shape{logits.shape[0], logits.shape[1] / s->spec.ranks});
    programs.push_back(with_rank_head(with_all_reduce(*std::move(program), s->spec), s->spec,
                                      std::int64_t(programs.size()), head_parts.back().view<2>()));
  }
  std::vector<std::byte> before;
  for (std::size_t n = 0; n < programs[0].nodes.size(); ++n) {
    std::vector<std::byte> parts;
    for (const Program& p : programs) {
      REQUIRE(p.nodes.size() == programs[0].nodes.size());
      std::visit(
          [&]<class Args>(const Args& args) {
            if constexpr (is_exchange<Args>) {
              const auto* x = static_cast<const std::byte*>(args.x.data);
              parts.insert(parts.end(), x, x + args.x.bytes());
            }
          },
          p.nodes[n].call);
    }
    const std::vector<std::byte> sent = parts;
    if (wire.is_stale && before.size() == parts.size()) parts = before;
    if (!sent.empty()) before = sent;
    for (std::size_t r = 0; r < programs.size(); ++r) {
      const Node& node = programs[r].nodes[n];
      const Status ran = std::visit(
          [&]<class Args>(Args args) -> Status {
            if constexpr (is_exchange<Args>) {
              if (wire.leaves_out(n)) return {};
              const std::size_t bytes = parts.size() / programs.size();
              std::vector<std::byte> received;
              for (std::size_t place = 0; place < programs.size(); ++place) {
                const std::size_t from = wire.order(r, place);
                const auto& source = from == r ? sent : parts;  // a rank's own part is never stale
                received.insert(received.end(), source.begin() + std::ptrdiff_t(from * bytes),
                                source.begin() + std::ptrdiff_t((from + 1) * bytes));
              }
              args.x.data = received.data();
              args.x.shape[0] = args.ranks;
              return cpu_ref::run(args);
            } else {
              return cpu_ref::run(args);
            }
          },
          node.call);
      INFO(node.at.name());
      require_ok(ran);
    }
  }
}

double logits_error(const HostStep& got, const HostStep& expected) {
  const auto tensor = [](const AnyView<2>& v) {
    Tensor t(v.dtype, {v.shape[0], v.shape[1]});
    std::memcpy(t.data(), v.data, std::size_t(v.bytes()));
    return t;
  };
  const auto c = compare(tensor(got.tensors.logits), tensor(expected.tensors.logits));
  require_ok(c.status());
  return c->non_finite ? 1 : c->rel_l2;
}

bool same_bits(const HostStep& a, const HostStep& b) {
  return std::memcmp(a.tensors.logits.data, b.tensors.logits.data, std::size_t(a.tensors.logits.bytes())) == 0;
}

/// The logits behind a prompt of each family's model in float32, as a rank of the group makes them. The ranks agree on
/// their bits.
Status prompt_logits(const std::shared_ptr<RankGroup>& group, std::span<const std::int32_t> ids,
                     std::vector<Tensor>& rows) {
  for (const ModelConfig& m : divisible_models()) {
    const auto weights = std::make_shared<OwnedModelWeights>(procedural_model(m.spec(), DType::f32, 1));
    CF_TRY_ASSIGN(const std::unique_ptr<cpu_ref::Model> model,
                  cpu_ref::Model::create(m, weights->weights, weights, {.capacity = 32, .group = group}));
    CF_TRY(model->prefill(0, 0, ids));
    CF_TRY_ASSIGN(Tensor row, model->logits(0));
    CF_TRY(group->agree({static_cast<const char*>(row.data()), std::size_t(row.size_bytes())}));
    rows.push_back(std::move(row));
  }
  return {};
}

/// Makes a HostStep that of one prompt, which begins at position 0.
void make_prompt(HostStep& step, std::span<const std::int32_t> ids) {
  const auto set = [](const auto& view, std::size_t i, std::int32_t value) {
    const_cast<std::int32_t*>(view.data)[i] = value;
  };
  for (std::size_t i = 0; i < ids.size(); ++i) {
    set(step.tensors.ids, i, ids[i]);
    set(step.tensors.layer.positions, i, std::int32_t(i));
  }
  set(step.tensors.layer.kv_len, 0, std::int32_t(ids.size()));
}

/// The whole step, which has run, and the ranks' steps, which have not.
struct Ranks {
  Ranks(const ModelConfig& m, std::int64_t ranks, const Format& format, std::int64_t batch, std::int64_t q_len,
        DType activation)
      : whole(m, batch, q_len, activation, format.weight, format.linears) {
    for (std::int64_t r = 0; r < ranks; ++r)
      parts.push_back(step_of_rank(m, whole, r, ranks, batch, q_len, activation));
    Result<Program> program = whole.record();
    require_ok(program.status());
    CHECK(with_all_reduce(*program, whole.spec).nodes.size() == program->nodes.size());
    require_ok(run_program(*program, [](const auto& args) { return cpu_ref::run(args); }));
  }
  HostStep whole;
  std::vector<std::unique_ptr<HostStep>> parts;
};

}  // namespace

TEST_CASE("The ranks' programs sum up to the whole model, in every family", "[ranks]") {
  const std::vector<Format> formats{{},
                                    {DType::f16, {.bits = 4, .group_size = 16}},
                                    {DType::f16, {.bits = 8, .group_size = 32}},
                                    {DType::f16, {.bits = 4, .group_size = -1}}};
  for (const ModelConfig& m : divisible_models())
    for (const std::int64_t ranks : {1, 2, 4})
      for (const Format& format : formats) {
        if (ranks == 4 && format.linears.group_size == 32) continue;  // of 16 inputs a rank
        const std::int64_t batch = ranks == 2 ? 2 : 1, q_len = ranks == 4 ? 3 : 1;
        INFO(m.name << ", " << ranks << " ranks, " << format.linears.bits << " bits, " << batch << " x " << q_len);
        Ranks r(m, ranks, format, batch, q_len, DType::f64);
        run_ranks(r.parts);
        for (const auto& part : r.parts) {
          CHECK(logits_error(*part, r.whole) < 1e-11);
          CHECK(same_bits(*part, *r.parts[0]));
        }
      }
}

TEST_CASE("A rank's program has a sum behind each product that is summed, and no others", "[ranks]") {
  for (const ModelConfig& m : divisible_models()) {
    INFO(m.name);
    const auto part = m.spec().of_rank(1, 2);
    require_ok(part.status());
    const HostStep step(*part, procedural_model(*part, DType::f16, 1), 1, 1, DType::f32);
    const Result<Program> program = step.record();
    require_ok(program.status());
    const Program summed = with_all_reduce(*program, *part);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < summed.nodes.size(); ++i) {
      const auto* sum = std::get_if<ops::AllReduce::Args>(&summed.nodes[i].call);
      if (!sum) continue;
      names.push_back(summed.nodes[i].at.name().substr(names_of(*part).layer(0).size()));
      CHECK(summed.nodes[i].reads == summed.nodes[i - 1].writes);
      CHECK(sum->ranks == 2);
    }
    const std::vector<std::string> sequential{"attention.all_reduce", "mlp.all_reduce", "attention.all_reduce",
                                              "mlp.all_reduce"};
    const bool parallel = m.spec().traits.residual == Residual::parallel;
    CHECK(names == (parallel ? std::vector<std::string>{"mlp.all_reduce", "mlp.all_reduce"} : sequential));
  }
}

TEST_CASE("A rank's head makes its rows of the vocabulary, where the ranks divide it and there is room", "[ranks]") {
  ModelConfig m = divisible_models()[0];
  const auto nodes_added = [&](std::int64_t vocab, std::int64_t rows, std::int64_t ranks) {
    m.vocab_size = vocab;
    const auto part = m.spec().of_rank(ranks - 1, ranks);
    require_ok(part.status());
    const HostStep step(*part, procedural_model(*part, DType::f16, 1), 1, 3, DType::f32);
    const Result<Program> program = step.record();
    require_ok(program.status());
    Tensor memory(DType::f32, {rows, vocab / ranks});
    return with_rank_head(*program, *part, ranks - 1, memory.view<2>()).nodes.size() - program->nodes.size();
  };
  CHECK(nodes_added(64, 3, 2) == 1);
  CHECK(nodes_added(64, 3, 1) == 0);
  CHECK(nodes_added(64, 2, 2) == 0);  // of three rows
  CHECK(nodes_added(66, 3, 4) == 0);
  CHECK(nodes_added(48, 3, 4) == 0);  // 12 ids a rank
}

namespace {

constexpr std::int32_t kNone = -1;

/// What ranks choose by one word each, where each has a part of the row: the order key of its best token.
std::int32_t chosen_by_words(std::span<const float> row, std::int64_t ranks) {
  const std::size_t width = row.size() / std::size_t(ranks);
  std::uint64_t highest = 0;
  for (std::size_t first = 0; first < row.size(); first += width) {
    std::uint64_t own = 0;
    for (std::size_t i = 0; i < width; ++i) own = std::max(own, sampling::logit_key(row[first + i], std::int32_t(i)));
    highest = std::max(highest, sampling::key_among_all(own, std::int32_t(first)));
  }
  return sampling::id_of_highest(highest, kNone);
}

/// What the sampler chooses among the whole row.
std::int32_t chosen_by_sampler(std::span<const float> row) {
  const auto id = cpu_ref::sample(row, Sampling{}, {}, 0, 0);
  return id ? *id : kNone;
}

}  // namespace

TEST_CASE("Ranks choose by one word each what the sampler chooses among all logits, in every family", "[ranks]") {
  for (const ModelConfig& m : divisible_models())
    for (const std::int64_t ranks : {2, 4}) {
      INFO(m.name << ", " << ranks << " ranks");
      Ranks r(m, ranks, {}, 2, 3, DType::f32);
      run_ranks(r.parts);
      for (const auto& part : r.parts) {
        const AnyView<2> logits = part->tensors.logits;
        for (std::int64_t row = 0; row < logits.shape[0]; ++row) {
          const auto width = std::size_t(logits.shape[1]);
          const std::span<const float> values(static_cast<const float*>(logits.data) + std::size_t(row) * width, width);
          CHECK(chosen_by_words(values, ranks) == chosen_by_sampler(values));
        }
      }
    }
}

TEST_CASE("Of equal logits on several ranks the lowest id is chosen, and none beside NaN or infinity", "[ranks]") {
  constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  constexpr std::size_t vocab = 64;
  std::vector<float> row(vocab, -1);
  const auto check = [&](std::int32_t expected) {
    CHECK(chosen_by_sampler(row) == expected);
    for (const std::int64_t ranks : {1, 2, 4, 8}) {
      INFO(ranks);
      CHECK(chosen_by_words(row, ranks) == expected);
    }
  };
  check(0);  // all are equal
  row[63] = row[40] = row[17] = 3;
  check(17);
  row[16] = 3;
  check(16);
  row[63] = 4;
  check(63);
  row.assign(vocab, -2);
  row[33] = 0, row[50] = -0.f, row[20] = -0.f;
  check(20);  // -0 is no less than 0
  row.assign(vocab, -infinity);
  check(kNone);
  row[45] = -1e30f;
  check(45);
  for (const float refused : {infinity, nan})
    for (const std::size_t at : {0, 31, 32, 63}) {
      row.assign(vocab, 5);
      row[at] = refused;
      check(kNone);
    }
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    for (float& x : row) x = float(int(random() % 9) - 4);
    check(chosen_by_sampler(row));
  }
}

TEST_CASE("What goes wrong between ranks shows", "[ranks][mutations]") {
  for (const ModelConfig& m : divisible_models()) {
    INFO(m.name);
    const auto error_of = [&](const Wire& wire, const std::function<void(HostStep&)>& change = {}) {
      Ranks r(m, 2, {}, 1, 3, DType::f64);
      if (change)
        for (auto& part : r.parts) change(*part);
      run_ranks(r.parts, wire);
      return logits_error(*r.parts[1], r.whole);
    };
    CHECK(error_of({}) < 1e-11);
    Wire without;
    std::size_t sums = 0;
    without.leaves_out = [&](std::size_t) { return sums++ / 2 == 1; };  // both ranks' second one
    CHECK(error_of(without) > 1e-3);
    CHECK(error_of({.is_stale = true}) > 1e-3);
    CHECK(error_of({}, [](HostStep& s) { s.spec.adds_residual = true; }) > 1e-3);  // biases and residual twice
    CHECK(error_of({}, [](HostStep& s) { s.spec.adds_residual = false; }) > 1e-3);
    Wire twice;
    twice.order = [](std::size_t rank, std::size_t) { return rank; };  // the own part for the other rank's
    CHECK(error_of(twice) > 1e-3);
    Wire swapped;
    swapped.order = [](std::size_t, std::size_t place) { return 1 - place; };  // the logits' halves, on both ranks
    CHECK(error_of(swapped) > 1e-3);
  }
}

TEST_CASE("The sum's order decides its bits: a rank with another order differs", "[ranks][mutations]") {
  const ModelConfig m = divisible_models()[0];
  Ranks in_order(m, 4, {}, 1, 3, DType::f32), swapped(m, 4, {}, 1, 3, DType::f32);
  run_ranks(in_order.parts);
  for (const auto& part : in_order.parts) CHECK(same_bits(*part, *in_order.parts[0]));
  Wire wire;
  wire.order = [](std::size_t rank, std::size_t place) { return (rank + place) % 4; };  // the own part first
  run_ranks(swapped.parts, wire);
  CHECK_FALSE(same_bits(*swapped.parts[1], *swapped.parts[0]));
}

const std::vector<std::int32_t> kPrompt{3, 1, 4, 1, 5, 9, 2};

TEST_CASE("A rank of a process of its own makes a prompt's logits", "[.][prompt-rank]") {
  std::vector<Tensor> rows;
  require_done(prompt_logits(join_as_torchrun_says(), kPrompt, rows));
}

TEST_CASE("Processes sum float32 to the bits of one that sums the ranks' parts in their order", "[ranks]") {
  for (const std::int64_t ranks : {2, 4}) {
    const HeldPort port;
    std::vector<std::unique_ptr<RankProcess>> others;
    for (std::int64_t r = 1; r < ranks; ++r)
      others.push_back(std::make_unique<RankProcess>("[prompt-rank]", r, ranks, port.port()));
    const auto group = join_here(0, ranks, port.port());
    require_ok(group.status());
    std::vector<Tensor> rows;
    require_ok(prompt_logits(*group, kPrompt, rows));
    for (const auto& other : others) {
      const int ended = other->wait();
      INFO(other->last_line());
      CHECK(ended == 0);
    }
    std::size_t next = 0;
    for (const ModelConfig& m : divisible_models()) {
      INFO(m.name << ", " << ranks << " ranks");
      const auto tokens = std::int64_t(kPrompt.size());
      const HostStep whole(m, 1, tokens, DType::f32, DType::f32, {});
      std::vector<std::unique_ptr<HostStep>> parts;
      for (std::int64_t r = 0; r < ranks; ++r) {
        parts.push_back(step_of_rank(m, whole, r, ranks, 1, tokens, DType::f32));
        make_prompt(*parts.back(), kPrompt);
      }
      run_ranks(parts);
      const Tensor& row = rows.at(next++);
      const AnyView<2> logits = parts[0]->tensors.logits;
      CHECK(std::memcmp(row.data(), static_cast<const std::byte*>(logits.data) + (tokens - 1) * row.size_bytes(),
                        std::size_t(row.size_bytes())) == 0);
    }
  }
}

TEST_CASE("A rank's part that cannot be cut out is refused by name", "[ranks]") {
  const auto refused = [](ModelConfig m, std::int64_t ranks, WeightFormat linears, Code code,
                          std::initializer_list<std::string_view> parts,
                          const std::function<void(LayerWeights&)>& change = {}) {
    OwnedLayerWeights layer = procedural_layer(m.spec(), DType::f16, 0, 1, linears);
    if (change) change(layer.weights);
    return refusal_fault(layer_of_rank(m.spec(), layer.weights, 0, ranks).status(), code, parts);
  };
  ModelConfig llama;
  for (const ModelConfig& m : divisible_models())
    if (m.name == "llama") llama = m;
  llama.num_key_value_heads = 4;
  CHECK(refused(llama, 8, {}, Code::invalid_argument, {"8 ranks must divide num_kv_heads, got 4"}) == "");
  CHECK(refused(llama, 3, {}, Code::invalid_argument, {"3 ranks must divide num_heads, got 8"}) == "");
  CHECK(refused(llama, 4, {.bits = 4, .group_size = 32}, Code::invalid_argument,
                {"ranks: self_attn.o_proj", "16 inputs", "group_size 32"}) == "");
  std::vector<std::int32_t> order(64);
  for (std::size_t k = 0; k < order.size(); ++k) order[k] = std::int32_t(k % 4);
  CHECK(refused(llama, 2, {.bits = 4, .group_size = 16}, Code::unimplemented, {"self_attn.o_proj", "act order"},
                [&](LayerWeights& w) { std::get<GptqWeight>(w.dense.weight).g_idx.data = order.data(); }) == "");
  CHECK(refused(llama, 2, {}, Code::unimplemented, {"mlp.down_proj", "a packed weight"},
                [](LayerWeights& w) { w.dense_4h_to_h.weight = PackedWeight{}; }) == "");
  llama.attention_head_dim = 4;
  llama.rotary_dim = 4;
  CHECK(refused(llama, 4, {.bits = 4, .group_size = -1}, Code::invalid_argument,
                {"self_attn.qkv", "expected multiples of the 8 codes in a word"}) == "");
}

TEST_CASE("A rank's outline has the shapes of its part", "[ranks]") {
  for (const ModelConfig& m : divisible_models())
    for (const WeightFormat linears : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 16}}) {
      INFO(m.name << ", " << linears.bits << " bits");
      const ModelSpec whole = m.spec();
      const auto part = whole.of_rank(1, 4);
      require_ok(part.status());
      const auto outline = outline_of_rank(whole, outline_model(whole, DType::f16, linears), 1, 4);
      require_ok(outline.status());
      CHECK(weight_bytes(*part, *outline) == weight_bytes(*part, outline_model(*part, DType::f16, linears)));
    }
}
