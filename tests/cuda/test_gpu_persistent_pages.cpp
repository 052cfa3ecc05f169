// The persistent kernel with caches in pages: the bits of contiguous caches, whatever the order and the size of pages.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>
#include <vector>

#include "cuda/ops/any_cache.hpp"
#include "tests/cuda/paged_layers.hpp"
#include "tests/cuda/persistent_setups.hpp"
#include "tests/cuda/persistent_taps.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// What a step has made beside its caches: taps and output.
std::vector<Tensor> taps_of(const DeviceLayers& on, const ModelConfig& m) {
  std::vector<Tensor> all;
  LayerTensors t = on.tensors(0);
  for_each_activation(
      m.spec().shape, {},
      [&]<class V>(const TensorSpec& spec, const V& view, auto) {
        if constexpr (std::is_same_v<V, AnyView<V::rank>>)
          if (spec.role == Role::output && view.data) all.push_back(fetch<V::rank>(view));
      },
      t);
  return all;
}
void scrub_taps(const DeviceLayers& on, const ModelConfig& m) {
  LayerTensors t = on.tensors(0);
  for_each_activation(
      m.spec().shape, {},
      [&](const TensorSpec& spec, const auto& view, auto) {
        if (spec.role == Role::output && view.data)
          require_cuda(
              cudaMemset(const_cast<void*>(static_cast<const void*>(view.data)), 0xff, std::size_t(view.bytes())));
      },
      t);
}

struct PageSetup {
  ModelConfig model;
  Linears linears = Linears::dense;
  std::int64_t batch = 1, page_entries = 64;
  cuda::PersistentChoices choices{};
};

/// Steps of caches in pages and of contiguous ones: the same taps, outputs and entries, and nothing else is written.
void check_pages(Plans plans, const PageSetup& s, std::initializer_list<int> kv_lens) {
  const std::int64_t longest = std::max(kv_lens), pages = (longest + s.page_entries - 1) / s.page_entries;
  const Workload load{.batch = s.batch, .capacity = pages * s.page_entries};
  const HostLayers host = host_layers(s.model, load, s.linears);
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  PersistentKernel contiguous = kernel_of(plans, c, on, s.choices);
  require_ok(contiguous.set_probe({.taps = on.tensors(0)}));
  for (int kv_len : kv_lens) {
    CAPTURE(to_string(plans), s.model.name, to_string(s.model.dtype), to_string(s.linears), s.batch, s.page_entries,
            kv_len, to_string(contiguous.plan()));
    const std::vector<std::int32_t> n = lengths(load, kv_len);
    on.set_kv_len(n);
    on.reset();
    scrub_taps(on, s.model);
    require_ok(run(contiguous, c, on));
    const std::vector<Tensor> taps = taps_of(on, s.model);
    std::vector<Tensor> caches = on.results();
    caches.erase(caches.begin());  // the output, a tap

    PagedLayers paged(c, on, host, s.page_entries, n, std::uint64_t(kv_len));
    PersistentKernel kernel = kernel_of(plans, c, on, s.choices, 0, paged.layers);
    require_ok(kernel.set_probe({.taps = on.tensors(0)}));
    for (Launches launches : {Launches::persistent, Launches::layer, Launches::split}) {
      CAPTURE(to_string(launches));
      paged.reset();
      on.reset();
      scrub_taps(on, s.model);
      require_ok(run(kernel, c, on, launches));
      CHECK(same_bits(taps_of(on, s.model), taps));
      CHECK(same_bits(paged.caches(), caches));
      CHECK(paged.kept_others());
    }
    require_ok(kernel.take_report());
  }
}

}  // namespace

CF_FOR_PLANS_AND_DTYPES("persistent: caches in pages give the bits of contiguous ones", "[gpu][persistent][pages]") {
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  for (Linears linears : kLinears)
    for (std::int64_t batch : {1, 4, 8})
      for (std::int64_t page_entries : {64, 128, 1024}) {
        const int page = int(page_entries);
        check_pages(plans, {small_model(dtype, 2, kind), linears, batch, page_entries}, {1, page - 1, page, page + 1});
      }
}

TEST_CASE("persistent: a cache in pages - small", "[gpu][persistent][pages][small]") {
  for (Kind kind : {Kind::parallel, Kind::gated})
    check_pages(Plans::own, {small_model(DType::f16, 1, kind), Linears::dense, 2, 64}, {65});
}

TEST_CASE("persistent: so they do whichever way keys are split, shared and brought", "[gpu][persistent][pages]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const std::int64_t page_entries = GENERATE(64, 192);
  using enum ModelType;
  // Heads of all tiles; row products; norms of heads; GQA tiles of 4 and of 8 heads; a stage that has keys of several
  // pages.
  std::set<int> stage_keys;
  for (const ModelConfig& m :
       {model_of(32, 80, 20, 2560), model_of(4, 64, 16, 512), model_of(8, 16, 4, 10240), model_of(4, 96, 24, 1536),
        model_of(2, 256, 64, 1024), gated_model_of(llama, 16, 4, 64, 1024, 1024),
        gated_model_of(llama, 8, 1, 128, 1024, 2048), gated_model_of(qwen3, 16, 2, 128, 1024, 3072)}) {
    check_pages(plans, {m, Linears::dense, 1, page_entries}, {129, 193, 300});
    check_pages(plans, {m, Linears::dense, 1, page_entries, {.attention_splits = 1}}, {385});
    if (m.hidden_size <= 1024 && m.intermediate_size <= 1024)
      check_pages(plans, {m, Linears::dense, 3, page_entries, {.blocks = 12, .attention_splits = 4}}, {321});
    const auto plan = cuda::plan_persistent(planned(plans).arch(), cuda::persistent_model(m, m.dtype), 1);
    REQUIRE(plan);
    stage_keys.insert(plan->stage_keys);
  }
  CHECK(*stage_keys.rbegin() > 2 * cuda::kPageUnit);
}

TEST_CASE("persistent: caches of 2048 entries in pages give the bits of contiguous ones", "[gpu][persistent][pages]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  for (ModelConfig m : {model_of(32, 80, 20, 10240), gated_model_of(ModelType::llama, 32, 8, 64, 2048, 8192)}) {
    m.num_hidden_layers = 1;
    for (std::int64_t page_entries : {64, 1024}) {
      check_pages(plans, {m, Linears::dense, 1, page_entries}, {1023, 1025, 2047, 2048});
      check_pages(plans, {m, Linears::packed, 1, page_entries}, {2048});
      if (plans == Plans::own) check_pages(plans, {m, Linears::dense, 4, page_entries}, {2048});
    }
  }
}

TEST_CASE(
    "persistent: many tokens of one launch go on from page to page, as those of one launch each and of contiguous "
    "caches do, with delayed blocks too",
    "[gpu][persistent][pages][tokens]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const std::int64_t batch = GENERATE(1, 4, 8);
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const Linears linears = GENERATE(Linears::dense, Linears::packed);
  CAPTURE(to_string(plans), to_string(kind), batch, to_string(dtype), to_string(linears));
  constexpr std::int64_t tokens = 12, page_entries = 64;
  const Workload load{.batch = batch, .capacity = 2 * page_entries};
  const HostLayers host = host_layers(small_model(dtype, 2, kind), load, linears);
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  DeviceEnds ends(c, host, on);
  const std::vector<std::int32_t> first = lengths(load, 62);
  // The last sequence ends after two tokens, before it needs a second page.
  std::vector<cuda::PersistentEnd> limits(static_cast<std::size_t>(batch));
  if (batch > 1) limits.back().tokens = 2;
  const auto length = [&](std::int64_t b, std::int64_t done) {
    return first[std::size_t(b)] + std::int32_t(batch > 1 && b + 1 == batch ? std::min<std::int64_t>(done, 1) : done);
  };
  std::vector<std::int32_t> last;
  for (std::int64_t b = 0; b < batch; ++b) last.push_back(length(b, tokens - 1));
  std::vector<std::int32_t> ids(static_cast<std::size_t>(batch));
  std::iota(ids.begin(), ids.end(), 5);
  const auto launch = [&](PersistentKernel& kernel) {
    on.set_kv_len(first);
    ends.set_ids(ids);
    const auto number = kernel.enqueue_tokens(c.stream(), tokens, ends.logits, limits);
    require_ok(number.status());
    require_cuda(cudaDeviceSynchronize());
    require_ok(kernel.take_report());
    std::vector<std::int32_t> made;
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t b = 0; b < batch; ++b)
        if (batch == 1 || b + 1 < batch || t < 2) made.push_back(kernel.made(*number + unsigned(t), b).value());
    return made;
  };
  PersistentKernel contiguous = kernel_of_tokens(plans, c, on, ends);
  const std::vector<std::int32_t> expected = launch(contiguous);
  const Tensor logits = fetch<2>(ends.logits);
  std::vector<Tensor> caches = on.results();
  caches.erase(caches.begin());

  PagedLayers paged(c, on, host, page_entries, last);
  PersistentKernel kernel = kernel_of_tokens(plans, c, on, ends, paged.layers);
  for (unsigned seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    paged.reset();
    require_ok(kernel.set_probe({.delay_seed = seed}));
    CHECK(launch(kernel) == expected);
    if (batch == 1) CHECK(test::same_bits(fetch<2>(ends.logits), logits));
    CHECK(same_bits(paged.caches(), caches));
    CHECK(paged.kept_others());
  }
  // One launch a token, with a table that has the pages of that token alone.
  if (batch > 1) return;
  paged.reset();
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<std::int32_t> table = paged.table;
    if (length(0, t) <= page_entries) table[1] = paged.foreign();
    paged.set_table(table);
    on.set_kv_len({length(0, t)});
    if (t > 0) ends.set_ids({expected[std::size_t(t) - 1]});
    if (t == 0) ends.set_ids(ids);
    require_ok(kernel.enqueue_token(c.stream(), ends.logits));
    require_cuda(cudaDeviceSynchronize());
  }
  CHECK(test::same_bits(fetch<2>(ends.logits), logits));
  CHECK(same_bits(paged.caches(), caches));
}

TEST_CASE("persistent: a fault in the table of pages changes the output", "[gpu][persistent][pages]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const Workload load{.batch = 2, .capacity = 256};
  const HostLayers host(small_model(DType::f16, 1, kind), load);
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  const std::vector<std::int32_t> n{200, 190};
  on.set_kv_len(n);
  PagedLayers paged(c, on, host, 64, n);
  PersistentKernel kernel = kernel_of(plans, c, on, {}, 0, paged.layers);
  const auto outputs = [&](const std::vector<std::int32_t>& table) {
    paged.reset();
    paged.set_table(table);
    on.scrub_output();
    require_ok(run(kernel, c, on));
    return fetch<2>(on.tensors(0).output);
  };
  const Tensor sound = outputs(paged.table);
  CHECK(test::same_bits(outputs(paged.table), sound));
  const auto is_found = [&](std::size_t sequence, const std::vector<std::int32_t>& table) {
    const Tensor faulty = outputs(table);
    const std::size_t row = std::size_t(sound.size_bytes()) / 2;
    const auto of = [&](const Tensor& t) { return static_cast<const char*>(t.data()) + sequence * row; };
    // The other sequence keeps its bits.
    const auto other = [&](const Tensor& t) { return static_cast<const char*>(t.data()) + (1 - sequence) * row; };
    CHECK(std::memcmp(other(faulty), other(sound), row) == 0);
    return std::memcmp(of(faulty), of(sound), row) != 0;
  };
  for (std::size_t b : {0u, 1u})
    for (std::size_t i : {0u, 1u, 2u}) {
      CAPTURE(to_string(plans), to_string(kind), b, i);
      std::vector<std::int32_t> stale = paged.table, next = paged.table, others = paged.table;
      stale[b * 4 + i] = paged.foreign();                // a page that the sequence has given away
      next[b * 4 + i] = paged.table[b * 4 + i + 1];      // a page off by one
      others[b * 4 + i] = paged.table[(1 - b) * 4 + i];  // the other sequence's
      CHECK(is_found(b, stale));
      CHECK(is_found(b, next));
      if (i < 2) CHECK(is_found(b, others));  // both append to page 2
    }
}

TEST_CASE("persistent: pages of other sizes, and layers with different tables, are refused",
          "[gpu][persistent][pages][small]") {
  const HostLayers host(small_model(DType::f16, 2), {.batch = 1, .capacity = 64});
  const cuda::Context c = planned(Plans::own);
  DeviceLayers on(c, host);
  PagedLayers paged(c, on, host, 64, {64});
  const auto refused = [&](const std::vector<cuda::PersistentLayer>& layers, Code code, const char* what) {
    const auto kernel =
        PersistentKernel::create(c, cuda::persistent_model(on.config(), DType::f16), layers, on.sequences(), on.rope());
    return refusal_fault(kernel.status(), code, {what});
  };
  for (std::int64_t entries : {32, 65, 1088}) {
    std::vector<cuda::PersistentLayer> layers = paged.layers;
    for (cuda::PersistentLayer& l : layers) l.cache.k.shape[2] = l.cache.v.shape[2] = entries;
    CHECK(refused(layers, Code::unimplemented, "pages of a multiple of 64 entries up to 1024") == "");
  }
  const PagedLayers others(c, on, host, 64, {64});
  std::vector<cuda::PersistentLayer> layers = paged.layers;
  layers[1].page_table = others.layers[1].page_table;
  CHECK(refused(layers, Code::invalid_argument, "layer 1: expected the page table of the layers before") == "");
  layers[1].page_table = {};
  CHECK(refused(layers, Code::invalid_argument, "layer 1: expected the page table of the layers before") == "");
  layers[1] = paged.layers[1];
  layers[1].page_table.shape[1] += 1;
  CHECK(refused(layers, Code::invalid_argument, "'page_table'") == "");
}
