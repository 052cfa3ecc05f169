#include <algorithm>
#include <cstring>

#include "core/model/taps.hpp"
#include "core/scores.hpp"
#include "cuda/model/model_state.hpp"

namespace cf::cuda {

Status Model::State::enqueue_settings(Where place, std::span<const Draw> draws) {
  std::vector<SlotSampling> wanted(std::size_t(options.slots), SlotSampling{});
  for (const Draw& d : draws) {
    const bool penalises = d.sampling.repetition_penalty != 1;
    wanted[std::size_t(d.slot)] = {
        .rule = d.sampling.rule(), .sequence = d.sequence, .chooses = 1, .penalises = penalises ? 1 : 0};
    if (!penalises) continue;
    // The sampler marks what it chooses; a history that grew in another way is copied.
    const std::int64_t words = seen_words(spec.shape.vocab_size);
    std::size_t& known = seen_size[std::size_t(d.slot)];
    if (known == 0 || d.history.size() != known + 1 || d.history.back() != last_chosen[std::size_t(d.slot)]) {
      std::vector<std::uint32_t> bits(std::size_t(words), 0);
      CF_TRY(check_ids("sample", "history", d.history, spec.shape.vocab_size));
      for (std::int32_t id : d.history) bits[std::size_t(id) / 32] |= 1u << (id % 32);
      CF_TRY(copy_async(seen.data + d.slot * words, bits.data(), bits.size() * sizeof(std::uint32_t),
                        cudaMemcpyHostToDevice, stream.get()));
      CF_TRY(from_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize"));
    }
    known = d.history.size();
  }
  std::vector<SlotSampling>& has = sent[std::size_t(place)];
  const std::size_t bytes = wanted.size() * sizeof(SlotSampling);
  static_assert(sizeof(SlotSampling) % sizeof(std::int32_t) == 0);
  if (std::memcmp(has.data(), wanted.data(), bytes) == 0) return {};
  has = wanted;
  return copy_async(settings[std::size_t(place)].data, has.data(), bytes, cudaMemcpyHostToDevice, stream.get());
}

std::vector<Result<std::int32_t>> Model::choose(std::span<const Draw> draws) {
  State& s = *state_;
  if (draws.empty()) return {};
  const auto all = [&](const Status& status) {
    return std::vector<Result<std::int32_t>>(draws.size(), Result<std::int32_t>(status));
  };
  for (const Draw& d : draws) {
    if (Status known = s.lengths.check(d.slot, 0, 1); !known) return all(known);
    if (Status valid = d.sampling.validate(); !valid) return all(valid);
    if (d.position != s.lengths[d.slot])
      return all(bad_argument(kModelName, "slot " + std::to_string(d.slot) + ": expected a choice for position " +
                                              std::to_string(s.lengths[d.slot]) + ", got " +
                                              std::to_string(d.position)));
  }
  const auto enqueue = [&]() -> Status {
    const bool were_chosen = s.last_token && std::all_of(draws.begin(), draws.end(), [&](const Draw& d) {
                               return s.made_by[std::size_t(d.slot)] == s.last_token;
                             });
    if (were_chosen && s.kernel_chooses(draws)) return s.take_choices(draws);
    s.end_launch();
    for (const Draw& d : draws) CF_TRY(s.restore_logits(d.slot));
    std::array<std::vector<Draw>, kPlaces> by_place;
    for (const Draw& d : draws) by_place[std::size_t(s.where[std::size_t(d.slot)])].push_back(d);
    for (std::size_t place = 0; place < kPlaces; ++place)
      if (!by_place[place].empty()) CF_TRY(s.enqueue_settings(Where(place), by_place[place]));
    volatile std::int32_t* const told = s.told.get();
    for (const Draw& d : draws) told[d.slot] = kNotChosen;
    // The next step needs nothing from the host: it runs while the host reads the ids.
    if (by_place[std::size_t(s.last_step)].size() == draws.size() && s.can_follow && s.knows_next(draws) &&
        !s.kernel_chooses(draws)) {
      CF_TRY(s.run_next(draws, Start::chooses));
    } else {
      for (std::size_t place = 0; place < kPlaces; ++place)
        if (!by_place[place].empty()) CF_TRY(s.sample[place].submit(s.stream.get(), {.early = s.context.overlap()}));
      CF_TRY(s.run_ahead(draws));
    }
    return s.await_choices(draws, [&](const Draw& d) -> std::optional<std::int32_t> {
      const std::int32_t id = told[d.slot];
      return id == kNotChosen ? std::nullopt : std::optional(id);
    });
  };
  if (Status enqueued = enqueue(); !enqueued) return all(enqueued);
  for (Token& t : s.ahead) t.id = s.last_chosen[std::size_t(t.slot)];
  if (s.next_token != s.end_token) {  // the launch has ended these sequences by itself
    for (const Draw& d : draws)
      if (s.has_stopped(d)) std::erase_if(s.ahead, [&](const ModelRunner::Token& t) { return t.slot == d.slot; });
    if (s.ahead.empty()) s.end_launch();
  }
  std::vector<Result<std::int32_t>> ids;
  for (const Draw& d : draws) ids.push_back(s.chosen_id(d));
  return ids;
}

Result<std::int32_t> Model::State::chosen_id(const Draw& d) {
  const std::int32_t id = last_chosen[std::size_t(d.slot)];
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
  end_launch();
  ahead.clear();
  std::string found;
  const std::int64_t position = lengths[slot] - 1;
  const std::int32_t staged[] = {last_ids[std::size_t(slot)], std::int32_t(position), std::int32_t(position + 1)};
  const StepArrays arrays = prompt_arrays(1);
  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(slot, 1, 1, arrays, prompt_logits, caches);
  const auto look = [&]() -> Status {
    CF_TRY(copy_to_device(context, arrays.ids.data, staged, sizeof *staged));
    CF_TRY(copy_to_device(context, arrays.positions.data, staged + 1, sizeof *staged));
    CF_TRY(copy_to_device(context, arrays.kv_len.data, staged + 2, sizeof *staged));
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
  CF_TRY(restore_logits(slot));
  Tensor row(workspace.activation(), {spec.shape.vocab_size});
  CF_TRY(copy_to_host(context, row.data(), logits_of_slot(slot).data, std::size_t(row.size_bytes())));
  return row;
}

Result<Tensor> Model::logits(std::int64_t slot) {
  state_->logits_asked = true;
  CF_TRY(state_->lengths.check(slot, 0, 1));
  return state_->fetch_logits(slot);
}

Status Model::copy_logits(std::span<const std::int64_t> slots, AnyView<2> logits) {
  State& s = *state_;
  CF_TRY(s.check_logits(logits));
  if (logits.shape[0] != std::int64_t(slots.size()))
    return bad_argument(kModelName, "logits: expected a row for each of " + std::to_string(slots.size()) +
                                        " slots, got " + std::to_string(logits.shape[0]));
  for (std::int64_t slot : slots) CF_TRY(s.lengths.check(slot, 0, 1));
  s.logits_asked = true;
  for (std::int64_t slot : slots) CF_TRY(s.restore_logits(slot));
  // Neighbours whose logits lie in one place are copied as one.
  for (std::size_t i = 0, end; i < slots.size(); i = end) {
    const AnyView<2> from = s.logits_of_slot(slots[i]);
    for (end = i + 1; end < slots.size(); ++end)
      if (slots[end] != slots[end - 1] + 1 || s.where[std::size_t(slots[end])] != s.where[std::size_t(slots[i])]) break;
    CF_TRY(copy_async(rows_of(logits, std::int64_t(i)).data, from.data, (end - i) * std::size_t(from.bytes()),
                      cudaMemcpyDeviceToDevice, s.stream.get()));
  }
  return {};
}

}  // namespace cf::cuda
