#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"

namespace cf::checkpoint {

/// What the files of a checkpoint hold, in checksums. SHA-256 stands as 64 hexadecimal digits.
struct Identity {
  std::string config{};                               // config.json, as JSON text in one line
  std::map<std::string, std::int64_t> files{};        // the bytes of each file that holds tensors, by its name
  std::map<std::string, std::string> files_sha256{};  // of these files, as the Hugging Face hub has it
  std::map<std::string, std::string> tensors{};       // by name: "F16[128, 48] " and the SHA-256 of the elements
  std::string sha256{};                               // of a line "name description\n" for each tensor, by name
  /// Some elements of the matrices, about 2048 of large ones, whose places are the same in all revisions: float32,
  /// little-endian, in hexadecimal digits.
  std::string elements{};
};

/// Reads every byte of a checkpoint's tensors, on up to `threads` threads. `check` is called now and then, on the
/// caller's thread: its error ends the work. Refuses what Checkpoint::open() refuses; a file of tensors that cannot be
/// read or is damaged; one that became shorter meanwhile.
Result<Identity> identify(const std::string& directory, int threads, const std::function<Status()>& check = {});

/// A revision of a model: the weights of one training step.
struct Revision {
  std::string name;
  std::int64_t step = 0;
  Identity identity{};                 // whose sha256 is empty where nothing was read
  std::optional<std::string> error{};  // why it could not be measured
};

/// The training step that a revision's name says: the number behind the first "step", "step-" or "step_", else the last
/// number; `place` where there is none that 63 bits hold. Of a path the last folder's name counts.
std::int64_t step_of(std::string_view name, std::int64_t place);

/// Something that is wrong with a revision, or that it shares with another.
struct RevisionFault {
  std::string revision;  // its name
  std::string what;
};

/// What is wrong with revisions of one model, by kind, each kind by step:
///   1. errors;
///   2. another config than the first step's, but for what says nothing of the model (dtype, version, name);
///   3. all tensors, or some matrices, of an earlier step;
///   4. matrices under another name, in the same revision or an earlier one. Vectors begin as ones or zeros, and those
///      outside of layers may be tied: these are not looked at;
///   5. weights that lie beside the line of training, where each step lies near the ones before and after it: 1.5 times
///      as far from both neighbours as these are from each other, or 1.1 times nearer to another step than to a
///      neighbour. The distance is the L2 norm over Identity::elements. Equal revisions are left out, and those whose
///      elements are not finite.
std::vector<RevisionFault> faults_of(std::span<const Revision> revisions);

}  // namespace cf::checkpoint
