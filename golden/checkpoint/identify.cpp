#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "core/philox.hpp"
#include "golden/checkpoint/cast.hpp"
#include "golden/checkpoint/checkpoint.hpp"
#include "golden/checkpoint/json.hpp"
#include "golden/checkpoint/mapped_file.hpp"
#include "golden/checkpoint/revisions.hpp"
#include "golden/checkpoint/safetensors.hpp"
#include "golden/checkpoint/sha256.hpp"

namespace cf::checkpoint {
namespace {

constexpr std::size_t kElements = 2048;

/// Bytes whose SHA-256 is asked for, and where it goes.
struct Sum {
  const void* data;
  std::uint64_t bytes;
  std::string* to;
};

/// Makes the sums, the largest first, on several threads.
Status make_sums(std::vector<Sum> sums, int threads, const std::function<Status()>& check) {
  constexpr std::uint64_t piece = std::uint64_t(1) << 24;  // bytes between two looks at whether to go on
  std::stable_sort(sums.begin(), sums.end(), [](const Sum& a, const Sum& b) { return a.bytes > b.bytes; });
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> ended = false;
  const auto work = [&](auto&& go_on) {
    for (std::size_t i = next++; i < sums.size(); i = next++) {
      Sha256 sum;
      for (std::uint64_t at = 0; at < sums[i].bytes; at += piece) {
        if (!go_on()) return;
        sum.update(static_cast<const char*>(sums[i].data) + at, std::min(piece, sums[i].bytes - at));
      }
      *sums[i].to = hex_of(sum.finish());
    }
  };
  Status status;
  std::atomic<int> running = 0;
  std::vector<std::jthread> others;
  try {
    for (int i = 1; i < threads; ++i) {
      others.emplace_back([&] {
        work([&] { return !ended; });
        --running;
      });
      ++running;
    }
  } catch (const std::system_error&) {  // there are no more: those that are there do it
  }
  const auto go_on = [&] {
    if (check && status) status = check();
    return bool(status);
  };
  work(go_on);
  while (running > 0 && go_on()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ended = !status;
  others.clear();
  return status;
}

/// Elements of the matrices, at the same places in each revision.
std::string some_elements(const std::map<std::string, const TensorEntry*>& tensors) {
  std::vector<std::pair<DType, const TensorEntry*>> matrices;
  for (const auto& [name, t] : tensors)
    if (const auto dtype = float_dtype(t->stored_dtype); dtype && t->shape.size() == 2 && t->bytes > 0)
      matrices.emplace_back(*dtype, t);
  std::vector<std::uint8_t> bytes;
  for (std::uint32_t number = 0; number < matrices.size(); ++number) {
    const auto& [dtype, t] = matrices[number];
    const auto size = std::uint64_t(element_count(t->shape));
    const std::uint64_t count = std::min<std::uint64_t>(size, (kElements + matrices.size() - 1) / matrices.size());
    for (std::uint32_t i = 0; i < count; ++i) {
      const PhiloxBlock random = philox4x32_10({{i, number, 0, 0}}, {{0, 0}});
      const std::uint64_t place = (std::uint64_t(random.word[1]) << 32 | random.word[0]) % size;
      float x = 0;
      cast_elements(dtype, static_cast<const char*>(t->data) + place * size_bytes(dtype), 1, DType::f32, &x);
      for (int shift = 0; shift < 32; shift += 8)
        bytes.push_back(std::uint8_t(std::bit_cast<std::uint32_t>(x) >> shift));
    }
  }
  return hex_of(bytes);
}

/// "F16[128, 48]".
std::string described(const TensorEntry& t) {
  std::string text = t.stored_dtype + "[";
  for (std::size_t i = 0; i < t.shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(t.shape[i]);
  return text + "]";
}

}  // namespace

Result<Identity> identify(const std::string& directory, int threads, const std::function<Status()>& check) {
  CF_TRY_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(directory));
  Identity made;
  {
    const std::string path = checkpoint.path_of("config.json");
    CF_TRY_ASSIGN(const MappedFile file, map_file(path));
    CF_TRY_ASSIGN(const Json config, parse_json_object(file.text(), path));
    made.config = one_line(config);
    CF_TRY(file.check());
  }
  std::vector<MappedFile> files;
  std::vector<SafetensorsFile> stored;
  std::map<std::string, const TensorEntry*> tensors;
  std::vector<Sum> sums;
  for (const std::string& name : checkpoint.files()) {
    const std::string path = checkpoint.path_of(name);
    CF_TRY_ASSIGN(MappedFile file, map_file(path));
    CF_TRY_ASSIGN(SafetensorsFile opened, SafetensorsFile::open(path));
    made.files[name] = std::int64_t(file.size_bytes());
    sums.push_back({file.text().data(), file.size_bytes(), &made.files_sha256[name]});
    files.push_back(std::move(file));
    stored.push_back(std::move(opened));
  }
  for (const SafetensorsFile& file : stored)
    for (const TensorEntry& t : file.tensors()) tensors[t.name] = &t;
  for (const auto& [name, t] : tensors) sums.push_back({t->data, std::uint64_t(t->bytes), &made.tensors[name]});
  CF_TRY(make_sums(std::move(sums), threads, check));
  Sha256 all;
  for (auto& [name, sum] : made.tensors) {
    sum = described(*tensors.at(name)) + " " + sum;
    const std::string line = name + " " + sum + "\n";
    all.update(line.data(), line.size());
  }
  made.sha256 = hex_of(all.finish());
  made.elements = some_elements(tensors);
  for (const MappedFile& file : files) CF_TRY(file.check());
  for (const SafetensorsFile& file : stored) CF_TRY(file.check_file());
  return made;
}

}  // namespace cf::checkpoint
