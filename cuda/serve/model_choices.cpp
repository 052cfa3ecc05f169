#include <algorithm>
#include <cstring>

#include "core/model/taps.hpp"
#include "core/scores.hpp"
#include "cuda/comm/communicator.hpp"
#include "cuda/serve/model_state.hpp"

namespace cf::cuda {

Status Model::State::prepare_choice(LogitsBuffer from, std::span<const Draw> draws) {
  std::vector<SlotSampling> wanted(std::size_t(options.slots), SlotSampling{});
  for (const Draw& d : draws) {
    const bool penalises = d.sampling.repetition_penalty != 1;
    wanted[std::size_t(d.slot)] = {
        .rule = d.sampling.rule(), .sequence = d.sequence, .chooses = 1, .penalises = penalises ? 1 : 0};
    if (!penalises) continue;
    // The sampler marks the ids that it chooses. A history that grew in another way is copied to the device.
    const std::int64_t words = seen_words(spec.shape.vocab_size);
    std::size_t& known = seen_size[std::size_t(d.slot)];
    if (known == 0 || d.history.size() != known + 1 || d.history.back() != pipeline.chosen(d.slot)) {
      std::vector<std::uint32_t> bits(std::size_t(words), 0);
      CF_TRY(check_ids("sample", "history", d.history, spec.shape.vocab_size));
      for (std::int32_t id : d.history) bits[std::size_t(id) / 32] |= 1u << (id % 32);
      CF_TRY(copy_async(seen.data + d.slot * words, bits.data(), bits.size() * sizeof(std::uint32_t),
                        cudaMemcpyHostToDevice, stream.get()));
      CF_TRY(from_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize"));
    }
    known = d.history.size();
  }
  volatile std::int32_t* const choices = told.get();
  for (const Draw& d : draws) choices[d.slot] = kNotChosen;
  std::vector<SlotSampling>& has = sent[std::size_t(from)];
  const std::size_t bytes = wanted.size() * sizeof(SlotSampling);
  static_assert(sizeof(SlotSampling) % sizeof(std::int32_t) == 0);
  if (std::memcmp(has.data(), wanted.data(), bytes) == 0) return {};
  has = wanted;
  return copy_async(settings[std::size_t(from)].data, has.data(), bytes, cudaMemcpyHostToDevice, stream.get());
}

Status Model::State::choose(LogitsBuffer from) {
  return sample[std::size_t(from)].submit(stream.get(), {.early = context.overlap()});
}

Status Model::State::await(std::span<const Draw> draws, std::span<std::int32_t> ids) {
  const volatile std::int32_t* const choices = told.get();
  return await_ids(draws, ids, [&](const Draw& d) -> std::optional<std::int32_t> {
    const std::int32_t id = choices[d.slot];
    return id == kNotChosen ? std::nullopt : std::optional(id);
  });
}

Status Model::State::await_launched(unsigned number, std::span<const Draw> draws, std::span<std::int32_t> ids) {
  return await_ids(draws, ids, [&](const Draw& d) { return whole->made(number, d.slot); });
}

Status Model::State::take_report() {
  CF_TRY(check_exchanges(context));
  CF_TRY(executor.take_report());
  return whole ? whole->take_report() : Status();
}

std::vector<Result<std::int32_t>> Model::choose(std::span<const Draw> draws) {
  State& s = *state_;
  std::vector<Result<std::int32_t>> ids;
  const Status chosen = s.pipeline.choose(draws);
  for (const Draw& d : draws) ids.push_back(chosen ? s.chosen_id(d) : Result<std::int32_t>(chosen));
  return ids;
}

Result<std::int32_t> Model::State::chosen_id(const Draw& d) {
  const std::int32_t id = pipeline.chosen(d.slot);
  if (id != kNoToken) return id;
  CF_TRY_ASSIGN(const Tensor row, fetch_logits(d.slot));
  std::vector<float> wide;
  for (std::int64_t i = 0; i < spec.shape.vocab_size; ++i)
    wide.push_back(float(load_element(row.data(), row.dtype(), i)));
  Status why = scores_of<float>(std::span<const float>(wide), d.sampling, d.history).status();
  if (why) return Status::error(Code::device_error, "sample: no token was chosen among valid logits");
  const std::string site = first_nan(d.slot);
  return site.empty() ? why
                      : Status::error(why.code(), why.message() + "; the first NaN of this token is made by " + site);
}

std::string Model::State::first_nan(std::int64_t slot) {
  // A step that runs ahead uses the same activations. The copies below wait for its end, and it is run again later.
  pipeline.give_up();
  std::string found;
  const std::int64_t position = pipeline.lengths()[slot] - 1;
  const std::int32_t staged[] = {pipeline.last_id(slot), std::int32_t(position), std::int32_t(position + 1)};
  const StepArrays arrays = prompt_arrays(1);
  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(slot, {}, arrays, rows_of(prompt_logits, 0), caches);
  const auto look = [&]() -> Status {
    const Run last{.sequence = slot, .first_position = position};
    CF_TRY_ASSIGN(const std::vector<PagePool::Copy> copies, pages.reserve(std::span(&last, 1)));
    CF_TRY(update_pages(copies));
    CF_TRY(copy_to_device(context, arrays.ids.data, staged, sizeof *staged));
    CF_TRY(copy_to_device(context, arrays.positions.data, staged + 1, sizeof *staged));
    CF_TRY(copy_to_device(context, arrays.kv_len.data, staged + 2, sizeof *staged));
    CF_TRY(make_rope_rows(arrays.positions));
    return walk(t, [&](const ModelSite& site, std::span<const SiteTensor> made) -> Status {
      for (SiteTensor tensor : made) {
        if (tensor.role != Role::output || !found.empty()) continue;
        std::vector<std::byte> values(std::size_t(tensor.bytes()));
        CF_TRY(copy_to_host(context, values.data(), tensor.data, values.size()));
        tensor.data = values.data();
        if (has_nan(tensor)) found = site.name();
      }
      return {};
    });
  };
  return look() ? found : "";
}

Result<Tensor> Model::State::fetch_logits(std::int64_t slot) {
  CF_TRY(pipeline.restore(slot));
  CF_TRY(gather_logits(pipeline.buffer_of(slot), slot));
  Tensor row(workspace.activation(), {spec.shape.vocab_size});
  CF_TRY(copy_to_host(context, row.data(), logits_of_slot(slot).data, std::size_t(row.size_bytes())));
  return row;
}

Result<Tensor> Model::logits(std::int64_t slot) {
  CF_TRY(state_->pipeline.read_logits(std::span(&slot, 1)));
  return state_->fetch_logits(slot);
}

Status Model::State::copy_logits(std::span<const std::int64_t> slots, std::span<const AnyView<2>> rows,
                                 bool on_device) {
  if (slots.empty()) return {};
  CF_TRY(pipeline.read_logits(slots));
  // Neighbours whose logits lie in one buffer are copied as one.
  for (std::size_t i = 0, end; i < slots.size(); i = end) {
    const AnyView<2> first = logits_of_slot(slots[i]);
    for (end = i + 1; end < slots.size(); ++end) {
      const auto next = std::int64_t(end - i);
      if (slots[end] != slots[i] + next || logits_of_slot(slots[end]).data != rows_of(first, next).data ||
          rows[end].data != rows_of(rows[i], next).data)
        break;
    }
    const auto count = std::int64_t(end - i);
    CF_TRY(gather_logits(pipeline.buffer_of(slots[i]), slots[i], count));
    CF_TRY(copy_rows(rows[i], rows_of(first, 0, count), on_device));
  }
  return {};
}

Status Model::copy_logits(std::span<const std::int64_t> slots, AnyView<2> logits) {
  State& s = *state_;
  const std::int64_t vocab = s.spec.shape.vocab_size;
  if (logits.shape[0] != std::int64_t(slots.size()))
    return bad_argument(kModelName, "logits: expected a row for each of " + std::to_string(slots.size()) +
                                        " slots, got " + std::to_string(logits.shape[0]));
  if (logits.shape[1] != vocab || logits.dtype != activation())
    return bad_argument(kModelName, "logits: expected rows of " + std::to_string(vocab) + " " +
                                        std::string(to_string(activation())) + ", got " +
                                        std::to_string(logits.shape[1]) + " " + std::string(to_string(logits.dtype)));
  std::vector<AnyView<2>> rows;
  for (std::size_t i = 0; i < slots.size(); ++i) rows.push_back(rows_of(logits, std::int64_t(i)));
  return s.copy_logits(slots, rows, true);
}

}  // namespace cf::cuda
