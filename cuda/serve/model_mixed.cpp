#include <algorithm>
#include <array>
#include <utility>

#include "core/call_groups.hpp"
#include "core/model/passes.hpp"
#include "cuda/serve/model_state.hpp"
#include "cuda/step/capture.hpp"

namespace cf::cuda {
namespace {

/// Passes whose launches are kept, one for each number of tokens. A long prompt that joins is read in steps of one number
/// of tokens, and of another in the last one.
constexpr std::size_t kMostMixed = 4;

/// Attention of the first `running` rows, which are runs of one, and of the others. `others` holds the runs of these.
std::array<ops::Attention::Args, 2> apart(const ops::Attention::Args& all, std::int64_t running,
                                          std::vector<RowRun>& others) {
  for (RowRun run : all.runs.subspan(std::size_t(running))) {
    run.first_row -= running;
    others.push_back(run);
  }
  const auto rows = [&](std::int64_t first, std::int64_t count, RowRuns runs) {
    ops::Attention::Args part = all;
    part.q = part_of(all.q, first, count);
    part.y = part_of(all.y, first, count);
    if (all.q_sinks) part.q_sinks = part_of(all.q_sinks, first, count);
    part.runs = runs;
    return part;
  };
  return {rows(0, running, all.runs.first(std::size_t(running))), rows(running, all.q.shape[0] - running, others)};
}

/// Whether a call's launches depend on the runs of its step, and not on the number of its rows alone.
bool has_runs(const Node& node) {
  return std::visit(
      [](const auto& args) {
        return requires { args.runs; };
      },
      node.call);
}

}  // namespace

Status Model::State::wait_for(CUstream_st* waits, CUstream_st* goes_first) {
  CF_TRY(from_cuda(cudaEventRecord(crossing.get(), goes_first), "cudaEventRecord"));
  return from_cuda(cudaStreamWaitEvent(waits, crossing.get()), "cudaStreamWaitEvent");
}

Status Model::State::submit(const MixedPass& pass, std::size_t i) {
  const PassPart& part = pass.parts[i];
  if (part.is_beside) {
    CF_TRY(wait_for(side.get(), stream.get()));
    return part.launches.submit(side.get());
  }
  CF_TRY(part.launches.submit(stream.get(), {.early = context.overlap()}));
  return i > 0 && pass.parts[i - 1].is_beside ? wait_for(stream.get(), side.get()) : Status();
}

Status Model::State::put_mixed(const ModelTensors& t, std::int64_t running) {
  const std::int64_t tokens = t.ids.shape[0];
  MixedPass pass{.tokens = tokens, .running = running, .runs = {t.layer.runs.begin(), t.layer.runs.end()}};
  bool has_same_runs = false;
  if (const auto known = std::ranges::find(mixed, tokens, &MixedPass::tokens); known != mixed.end()) {
    has_same_runs = known->running == running && known->runs == pass.runs;
    pass.parts = std::move(known->parts);
    mixed.erase(known);
  }
  std::size_t part = 0;
  // Prepares a part if it is not known, and puts it onto its stream, so that the device need not wait for the others.
  const auto put_part = [&](bool depends_on_runs, bool is_beside, const auto& fill) -> Status {
    const bool is_known = part < pass.parts.size();
    if (!is_known || depends_on_runs) {
      LaunchList launches(context, workspace.scratch());
      launches.trust_addresses();  // the model's own, which its steps have checked
      CF_TRY(fill(launches));
      if (is_known)
        pass.parts[part].launches = std::move(launches);
      else
        pass.parts.push_back({std::move(launches), is_beside});
    }
    return submit(pass, part++);
  };
  const auto add = [](const Node& node, const auto& args, LaunchList& launches) -> Status {
    launches.set_label(node.at.site.name.data());  // a literal, which ends in a zero byte
    return name_site(node.at, prepare(args, launches));
  };
  const auto put_layer = [&](const Program& layer) -> Status {
    const auto& nodes = layer.nodes;
    for (auto node = nodes.begin(), end = node; node != nodes.end(); node = end) {
      if (node->at.site.id == SiteId::context) {
        // Each of many running rows reads a cache of its own, and few rows of a prompt leave most of the device idle:
        // the two run beside each other.
        std::vector<RowRun> others;
        const auto [of_running, of_others] = apart(std::get<ops::Attention::Args>(node->call), running, others);
        CF_TRY(put_part(true, true, [&](LaunchList& launches) { return add(*node, of_running, launches); }));
        CF_TRY(put_part(true, false, [&](LaunchList& launches) { return add(*node, of_others, launches); }));
        end = std::next(node);
        continue;
      }
      const bool depends_on_runs = has_runs(*node);
      const auto is_other = [&](const Node& n) {
        return has_runs(n) != depends_on_runs || n.at.site.id == SiteId::context;
      };
      end = std::find_if(node, nodes.end(), is_other);
      CF_TRY(put_part(depends_on_runs, false, [&](LaunchList& launches) -> Status {
        for (auto n = node; n != end; ++n) CF_TRY(add(*n, *n, launches));
        return {};
      }));
    }
    return {};
  };
  if (has_same_runs) {
    for (; part < pass.parts.size(); ++part) CF_TRY(submit(pass, part));
  } else {
    Program layer;
    const auto put = [&] { return put_layer(with_rope_append(with_all_reduce(std::exchange(layer, {}), spec))); };
    CF_TRY(
        for_each_model_site(spec, weights.model_weights(), t, [&](const ModelSite& site, const auto& args) -> Status {
          if (!layer.nodes.empty() && layer.nodes.back().at.layer != site.layer) CF_TRY(put());
          layer.nodes.push_back(make_node(site, args));
          return {};
        }));
    CF_TRY(put());
  }
  mixed.insert(mixed.begin(), std::move(pass));
  if (mixed.size() > kMostMixed) mixed.pop_back();
  return {};
}

}  // namespace cf::cuda
