#include "core/model/tap_reader.hpp"

#include <algorithm>
#include <utility>

#include "core/model/taps.hpp"
#include "core/resources.hpp"
#include "core/tensor.hpp"

namespace cf {
namespace {

constexpr std::size_t kMostKept = 3;  // one that the device writes, one that is read, one in between

Status refused(std::string what) { return Status::error(Code::invalid_argument, "taps: " + std::move(what)); }

}  // namespace

Result<std::shared_ptr<std::byte[]>> TapReader::memory(ModelRunner& runner, std::size_t bytes) {
  for (const Memory& m : kept_)
    if (m.bytes >= bytes && m.data.use_count() == 1) return m.data;
  std::erase_if(kept_, [](const Memory& m) { return m.data.use_count() == 1; });
  CF_TRY(check_free_memory(double(bytes), "the taps need " + gigabytes(double(bytes))));
  CF_TRY_ASSIGN(std::shared_ptr<std::byte[]> made, runner.host_memory(bytes));
  if (kept_.size() < kMostKept) kept_.push_back({made, bytes});
  return made;
}

Result<TapBlock> TapReader::read(std::span<const std::vector<std::int32_t>> prompts) {
  CF_TRY_ASSIGN(ModelRunner* const runner, slots_->runner());
  if (prompts.empty() || std::int64_t(prompts.size()) > slots_->slots())
    return refused("expected 1 to " + std::to_string(slots_->slots()) + " prompts, one a slot, got " +
                   std::to_string(prompts.size()));
  std::vector<Run> runs;
  std::vector<std::int32_t> ids;
  for (const std::vector<std::int32_t>& prompt : prompts) {
    const auto slot = std::int64_t(runs.size());
    runs.push_back({.sequence = (*slots_)[slot], .first_position = 0, .count = std::int64_t(prompt.size())});
    ids.insert(ids.end(), prompt.begin(), prompt.end());
  }
  const auto tokens = std::int64_t(ids.size());
  const DType dtype = runner->activation();

  // The values lie one behind the other, each from a multiple of 64 bytes on.
  TapBlock block;
  std::map<std::string, TapMemory> memory_of;
  std::size_t bytes = 0;
  const auto bytes_of = [&](const Tap& tap) {
    const std::size_t size = std::size_t(tokens * element_count(tap.shape)) * size_bytes(dtype);
    return (size + 63) / 64 * 64;
  };
  for (const Tap& tap : taps_) bytes += bytes_of(tap);
  CF_TRY_ASSIGN(const std::shared_ptr<std::byte[]> data, memory(*runner, std::max<std::size_t>(bytes, 64)));
  std::byte* next = data.get();
  for (const Tap& tap : taps_) {
    Shape shape = tap.shape;
    shape.insert(shape.begin(), tokens);
    block.taps[tap.name] = {next, dtype, shape};
    memory_of[tap.name] = {.to = next, .dtype = dtype, .shape = std::move(shape)};
    next += bytes_of(tap);
  }
  block.owner = data;

  // The last norm and the head make rows where logits are asked for.
  const ModelNames& names = names_of(runner->model());
  const bool has_logits = memory_of.contains(std::string(names.embed_out.tap));
  Tensor logits;
  std::vector<std::int64_t> head_rows;
  StepLogits wanted{.own = false};
  if (has_logits || memory_of.contains(std::string(names.final_layer_norm.tap))) {
    for (const Run& r : runs) head_rows.push_back(r.count);
    const std::int64_t vocab = runner->model().shape.vocab_size;
    if (has_logits) logits = Tensor(dtype, {tokens, vocab});
    wanted.rows = head_rows;
    wanted.to = {has_logits ? logits.data() : data.get(), {tokens, vocab}, dtype};
    wanted.norm_alone = !has_logits;
  }
  runner->watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) {
    const auto find = [&](const std::string& name) {
      const auto found = memory_of.find(name);
      return found == memory_of.end() ? nullptr : &found->second;
    };
    return append_taps(site, tensors, find,
                       [&](const ModelRunner::SiteTensor& t, void* to) { return runner->fetch_later(t, to); });
  });
  const Status ran = runner->run(runs, ids, wanted);
  runner->watch({});
  Result<ModelRunner::Await> await = runner->fetched();
  if (!ran) {
    if (await) (void)(*await)();  // the memory may be written until then
    return ran;
  }
  CF_TRY(await.status());
  block.await = std::move(*await);
  return block;
}

}  // namespace cf
