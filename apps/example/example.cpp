// Continues "def read(self" with a checkpoint: example data/checkpoints/stdlib-4m
#include <cf/cpu_ref/model.hpp>
#include <cf/golden/checkpoint/checkpoint.hpp>
#include <cf/golden/checkpoint/vocabulary.hpp>
#include <cstdio>

cf::Status run(const std::string& directory) {
  CF_TRY_ASSIGN(const auto files, cf::checkpoint::Checkpoint::open(directory));
  CF_TRY_ASSIGN(const auto loaded, files.model());
  CF_TRY_ASSIGN(const auto vocabulary, cf::checkpoint::Vocabulary::open(directory + "/tokenizer.json"));
  CF_TRY_ASSIGN(auto model,
                cf::cpu_ref::Model::create(files.config(), loaded.weights, loaded.storage, {.capacity = 64}));
  cf::Decoder decoder(std::move(model));
  CF_TRY_ASSIGN(const auto sequence, decoder.add(std::vector{486, 856, 8, 278}, {.max_new_tokens = 32}));
  while (decoder.active()) {
    CF_TRY_ASSIGN(const auto tokens, decoder.decode());
    for (const auto& token : tokens) std::printf("%s", std::string(vocabulary.bytes(token.id)).c_str());
  }
  return decoder.status(sequence);
}

int main(int, char** argv) {
  const cf::Status status = run(argv[1] ? argv[1] : "data/checkpoints/stdlib-4m");
  if (!status) std::fprintf(stderr, "example: %s\n", status.message().c_str());
  return status ? 0 : 2;
}
