// Checksums of checkpoints, and what is wrong with the revisions of a model.
#include "golden/checkpoint/revisions.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "golden/checkpoint/safetensors.hpp"
#include "golden/checkpoint/sha256.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/taken.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

const std::string kCheckpoints = CF_DATA_DIR "/checkpoints/";

std::string sum_of(std::string_view text, std::size_t piece, bool fast) {
  Sha256 sum(fast);
  for (std::size_t at = 0; at < text.size(); at += piece) {
    const std::string_view part = text.substr(at, piece);
    sum.update(part.data(), part.size());
  }
  return hex_of(sum.finish());
}

/// A revision of a matrix that walks on with its steps, and of a vector.
Revision revision(std::int64_t step) {
  std::vector<std::uint8_t> bytes;
  for (int i = 0; i < 16; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(float(i) + 0.01f * float(step) * float(i % 3 + 1));
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(std::uint8_t(bits >> shift));
  }
  const std::string own = std::to_string(step);
  Revision r{.name = "r" + own, .step = step};
  r.identity.config = R"({"hidden_size": 4, "dtype": "float32"})";
  r.identity.tensors = {{"layers.0.a", "F32[4, 4] a" + own}, {"layers.1.a", "F32[4, 4] b" + own}, {"norm", "F32[4] n"}};
  r.identity.sha256 = "sum " + own;
  r.identity.elements = hex_of(bytes);
  return r;
}

/// "r3: what is wrong" of each fault, a line each.
std::string faults(const std::vector<Revision>& revisions) {
  std::string lines;
  for (const RevisionFault& fault : faults_of(revisions)) lines += fault.revision + ": " + fault.what + "\n";
  return lines;
}

}  // namespace

TEST_CASE("SHA-256 gives the digests of NIST's examples, with and without instructions for it, in any pieces",
          "[sha256]") {
  struct Example {
    std::string text, digest;
  };
  // FIPS 180-2, appendix B, and the empty message of NIST's SHA256ShortMsg.rsp.
  const Example examples[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrst"
       "u",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
      {std::string(1000000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
  for (const Example& e : examples)
    for (bool fast : {true, false})
      for (std::size_t piece : {1, 7, 55, 56, 63, 64, 65, 1000, 1 << 20}) {
        CAPTURE(e.text.size(), fast, piece);
        CHECK(sum_of(e.text, piece, fast) == e.digest);
      }
  // Every length of the last block, where a mistake in what is added behind the text would show.
  for (std::size_t length = 0; length < 200; ++length) {
    const std::string text(length, 'x');
    CHECK(sum_of(text, 200, true) == sum_of(text, 13, false));
  }
  CHECK(sha256_of("abc", 3) == examples[1].digest);
}

TEST_CASE("a checkpoint's identity has the checksums of its files and tensors, on any number of threads",
          "[revisions]") {
  for (const char* name : {"neox-tanh", "neox-d64-sharded", "neox-gptq-sym"}) {
    CAPTURE(name);
    const std::string directory = kCheckpoints + name;
    const Identity made = taken(identify(directory, 3)), alone = taken(identify(directory, 1));
    CHECK(made.tensors == alone.tensors);
    CHECK(made.files_sha256 == alone.files_sha256);
    CHECK(made.sha256 == alone.sha256);
    CHECK(made.elements == alone.elements);
    std::string all;
    std::size_t tensors = 0;
    for (const auto& [file, bytes] : made.files) {
      const std::string content = read_file(directory + "/" + file);
      CHECK(bytes == std::int64_t(content.size()));
      CHECK(made.files_sha256.at(file) == sha256_of(content.data(), content.size()));
      const SafetensorsFile opened = taken(SafetensorsFile::open(directory + "/" + file));
      tensors += opened.tensors().size();
      for (const TensorEntry& t : opened.tensors())
        CHECK(made.tensors.at(t.name).ends_with("] " + sha256_of(t.data, std::size_t(t.bytes))));
    }
    CHECK(made.tensors.size() == tensors);
    for (const auto& [tensor, described] : made.tensors) all += tensor + " " + described + "\n";
    CHECK(made.sha256 == sha256_of(all.data(), all.size()));
    CHECK(made.elements.size() % 8 == 0);
    CHECK(made.elements.size() > std::size_t(8 * 1000));
    CHECK(made.config.find("\"hidden_size\":") != std::string::npos);
  }
  const Identity tanh = taken(identify(kCheckpoints + "neox-tanh", 2));
  CHECK(tanh.tensors.at("gpt_neox.layers.0.mlp.dense_h_to_4h.weight").starts_with("F32[256, 64] "));
}

TEST_CASE("a checkpoint that is damaged or gone has no identity, and a check ends the work", "[revisions]") {
  const TempDir dir;
  std::filesystem::copy(kCheckpoints + "neox-tanh", dir / "cut");
  std::filesystem::resize_file(dir / "cut/model.safetensors", 1000);
  CHECK(refusal_fault(identify(dir / "cut", 2).status(), Code::invalid_file,
                      {"cut/model.safetensors: truncated: the header asks for"}) == "");
  CHECK(refusal_fault(identify(dir / "none", 2).status(), Code::not_found, {"none: no such directory"}) == "");
  const auto ended = [] { return Status::error(Code::io_error, "ended"); };
  CHECK(refusal_fault(identify(kCheckpoints + "neox-tanh", 2, ended).status(), Code::io_error, {"ended"}) == "");
}

TEST_CASE("the step of a revision is what its name says", "[revisions]") {
  CHECK(step_of("step1000", 7) == 1000);
  CHECK(step_of("a/pythia-70m-step-20/", 7) == 20);
  CHECK(step_of("a-step_3-of-9", 7) == 3);
  CHECK(step_of("steps/last-12b", 7) == 12);
  CHECK(step_of("step1/main", 7) == 7);
  CHECK(step_of("", 7) == 7);
  CHECK(step_of("stepped-to-step8", 7) == 8);
  CHECK(step_of("step99999999999999999999", 7) == 7);
}

TEST_CASE("revisions of one training have no faults, and each kind of fault is named", "[revisions]") {
  const std::vector<Revision> steps{revision(4), revision(0), revision(2), revision(6)};
  CHECK(faults(steps) == "");
  CHECK(faults({}) == "");
  const auto with = [&](const Revision& r) {
    std::vector<Revision> all = steps;
    all.push_back(r);
    return faults(all);
  };
  Revision r = revision(8);
  r.error = "r8/model.safetensors: truncated";
  CHECK(with(r) == "r8: r8/model.safetensors: truncated\n");

  r = revision(8);
  r.identity.config = R"({"hidden_size": 8, "dtype": "float16", "use_cache": true})";
  CHECK(with(r) ==
        "r8: config.json says hidden_size 8, that of r0 4\n"
        "r8: config.json says use_cache true, that of r0 null\n");

  r = revision(8);
  r.identity = revision(2).identity;
  CHECK(with(r) == "r8: all tensors are those of r2\n");

  r = revision(8);
  r.identity.tensors["layers.1.a"] = revision(4).identity.tensors["layers.1.a"];
  CHECK(with(r) == "r8: 1 of 2 matrices are those of r4, such as layers.1.a\n");

  // Two layers that have changed places, in a revision of its own and beside the right one.
  r = revision(8);
  std::swap(r.identity.tensors["layers.0.a"], r.identity.tensors["layers.1.a"]);
  CHECK(with(r) == "");
  Revision right = revision(8);
  right.name = "right";
  right.step = 7;
  std::vector<Revision> both = steps;
  both.push_back(right);
  both.push_back(r);
  both.back().identity.sha256 = "swapped";
  CHECK(faults(both) == "r8: layers.0.a has the elements of layers.1.a in right, and 1 more are as wrong\n");
  r = revision(8);
  r.identity.tensors["layers.1.a"] = r.identity.tensors["layers.0.a"];
  CHECK(with(r) == "r8: layers.1.a has the elements of layers.0.a in r8\n");
  // Tied embeddings and vectors of ones are none.
  r = revision(8);
  r.identity.tensors["head"] = r.identity.tensors["embed"] = "F32[4, 4] tied";
  r.identity.tensors["layers.0.norm"] = r.identity.tensors["layers.1.norm"] = "F32[4] ones";
  CHECK(with(r) == "");
}

TEST_CASE("weights beside the line of training are named by where they lie", "[revisions]") {
  std::vector<Revision> line;
  for (std::int64_t step = 0; step < 12; step += 2) line.push_back(revision(step));
  const auto moved = [&](std::size_t at, std::int64_t to) {
    std::vector<Revision> all = line;
    all[at].identity.elements = revision(to).identity.elements;
    return faults(all);
  };
  CHECK(moved(3, 60) == "r6: its weights lie farther from those of r4 and r8 than these lie from each other\n");
  CHECK(moved(5, 4).find("r10: its weights lie nearest to those of r4, which is no neighbour\n") != std::string::npos);
  // What is no number, or not whole, is not compared.
  std::vector<Revision> all = line;
  all[3].identity.elements = std::string(all[3].identity.elements.size() - 8, '0') + "0000c07f";
  CHECK(faults(all) == "");
  all[3].identity.elements = "00";
  CHECK(faults(all) == "");
}
