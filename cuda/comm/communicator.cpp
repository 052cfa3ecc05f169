#include "cuda/comm/communicator.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "cuda/comm/peers.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/memory.hpp"

namespace cf::cuda {
namespace {

Status refuse(Code code, std::string what) { return Status::error(code, "ranks: " + std::move(what)); }

struct FreePinned {
  void operator()(std::uint64_t* p) const { (void)cudaFreeHost(p); }
};

/// Gives the thread back the device that it had.
struct KeepDevice {
  KeepDevice() { (void)cudaGetDevice(&device); }
  KeepDevice(const KeepDevice&) = delete;
  KeepDevice& operator=(const KeepDevice&) = delete;
  ~KeepDevice() { (void)cudaSetDevice(device); }
  int device = 0;
};

/// Lets a device reach another one's memory, for as long as the process lives.
Status enable_access(int device, int peer) {
  int can = 0;
  CF_TRY(from_cuda(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer"));
  if (!can)
    return refuse(Code::unimplemented, "GPU " + std::to_string(device) + " has no access to the memory of GPU " +
                                           std::to_string(peer) + ", expected GPUs that reach each other's memory");
  CF_TRY(from_cuda(cudaSetDevice(device), "cudaSetDevice"));
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return {};
  }
  return from_cuda(enabled, "cudaDeviceEnablePeerAccess");
}

ExchangeLayout layout_of(int ranks, std::int64_t part_bytes, std::int64_t area_bytes) {
  const std::int64_t lanes = (part_bytes + kLaneBytes - 1) / kLaneBytes;
  return {.ranks = ranks,
          .one_shot_lanes = std::min(lanes, one_shot_bytes(ranks) / kLaneBytes),
          .slice_lanes = (lanes + ranks - 1) / ranks,
          .area_bytes = area_bytes};
}

/// What a rank's report says; ok where it is 0.
Status report_of(const Peers& peers) {
  const std::uint64_t report = *static_cast<const volatile std::uint64_t*>(peers.report);
  if (report == 0) return {};
  return Status::error(Code::device_error, "all_reduce: rank " + std::to_string(peers.rank) + " has waited " +
                                               std::to_string(peers.patience_ns / 1000000) + " ms for rank " +
                                               std::to_string(std::int64_t(report & 0xffffffff) - 1) +
                                               ", which has not come to exchange " + std::to_string(report >> 32));
}

}  // namespace

struct Communicator::State {
  ~State() {
    const KeepDevice keep;
    for (const Context& c : contexts) {
      (void)cudaSetDevice(c.device());
      (void)cudaDeviceSynchronize();
    }
  }
  std::vector<Context> contexts;
  std::vector<Peers> peers;  // the contexts refer to them
  std::vector<std::function<Status()>> meetings;
  std::vector<DeviceMemory> memory;
  std::unique_ptr<std::uint64_t, FreePinned> reports;
  std::atomic<std::int64_t> area_use{0};
};

Communicator::Communicator(std::unique_ptr<State> state) : state_(std::move(state)) {}
Communicator::~Communicator() = default;

Result<std::unique_ptr<Communicator>> Communicator::create(std::span<const int> devices, const Options& o) {
  const int ranks = int(devices.size());
  if (ranks < 2 || ranks > kMostRanks)
    return refuse(Code::invalid_argument,
                  "expected 2 to " + std::to_string(kMostRanks) + " GPUs, got " + std::to_string(ranks));
  if (o.part_bytes < 1)
    return refuse(Code::invalid_argument, "part_bytes must be at least 1, got " + std::to_string(o.part_bytes));
  const KeepDevice keep;
  auto state = std::make_unique<State>();
  State& s = *state;
  const ExchangeLayout layout = layout_of(ranks, o.part_bytes, o.area_bytes);
  for (int device : devices) {
    CF_TRY_ASSIGN(const Context context, Context::create(device));
    s.contexts.push_back(context);
    // What each rank computes whole, as a prompt's logits, must have the same bits on all.
    const Arch &own = context.arch(), &first = s.contexts.front().arch();
    if (own.tuning != first.tuning || to_string(own) != to_string(first))
      return refuse(Code::unimplemented, "GPU " + std::to_string(device) + " has " + to_string(own) +
                                             ", expected GPUs of one kind, as GPU " + std::to_string(devices[0]) +
                                             " with " + to_string(first));
  }
  void* reports = nullptr;
  // Each rank has two reports: 8 bytes about its exchanges, 4 about the kernels of its area.
  CF_TRY(from_cuda(cudaHostAlloc(&reports, 2 * std::size_t(ranks) * sizeof(std::uint64_t), cudaHostAllocPortable),
                   "cudaHostAlloc"));
  s.reports.reset(static_cast<std::uint64_t*>(reports));
  std::fill_n(s.reports.get(), 2 * ranks, 0);
  const bool share = std::set<int>(devices.begin(), devices.end()).size() < devices.size();
  for (const Context& context : s.contexts) {
    for (int peer : devices)
      if (peer != context.device()) CF_TRY(enable_access(context.device(), peer));
    CF_TRY_ASSIGN(DeviceMemory memory,
                  DeviceMemory::create(context, std::size_t(layout.bytes()), "exchanges of ranks"));
    CF_TRY(from_cuda(cudaMemset(memory.data(), 0, memory.bytes()), "cudaMemset"));
    const ExchangeState first{.epoch = 1, .failed = 0, .blocks = 0};
    CF_TRY(copy_to_device(context, memory.data(), &first, sizeof first));
    CF_TRY(from_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
    s.memory.push_back(std::move(memory));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    Peers peers{.rank = rank,
                .share_device = share,
                .layout = layout,
                .report = s.reports.get() + rank,
                .patience_ns = std::uint64_t(o.patience_s * 1e9),
                .area_reports = reinterpret_cast<std::uint32_t*>(s.reports.get() + ranks),
                .area_use = &s.area_use};
    for (int peer = 0; peer < ranks; ++peer) peers.memory[peer] = s.memory[std::size_t(peer)].data();
    s.peers.push_back(peers);
  }
  for (std::size_t rank = 0; rank < s.contexts.size(); ++rank) s.contexts[rank].set_peers(&s.peers[rank]);
  return std::unique_ptr<Communicator>(new Communicator(std::move(state)));
}

double Communicator::bytes(std::int64_t ranks, std::int64_t part_bytes, std::int64_t area_bytes) {
  return double(layout_of(int(ranks), part_bytes, area_bytes).bytes());
}
void Communicator::set_meetings(const std::function<Status(int rank)>& meet) {
  State& s = *state_;
  s.meetings.clear();
  for (int rank = 0; rank < ranks(); ++rank) s.meetings.emplace_back([meet, rank] { return meet(rank); });
  for (std::size_t rank = 0; rank < s.peers.size(); ++rank) s.peers[rank].meet = &s.meetings[rank];
}

int Communicator::ranks() const { return int(state_->contexts.size()); }
const Context& Communicator::context(int rank) const { return state_->contexts[std::size_t(rank)]; }
std::size_t Communicator::device_bytes() const { return state_->memory.front().bytes(); }
Status Communicator::status() const {
  for (const Peers& p : state_->peers) CF_TRY(report_of(p));
  return {};
}

Status meet_ranks(const Context& context) {
  const Peers* const peers = context.peers();
  return peers && peers->meet ? (*peers->meet)() : Status();
}

Status check_exchanges(const Context& context) { return context.peers() ? report_of(*context.peers()) : Status(); }

}  // namespace cf::cuda
