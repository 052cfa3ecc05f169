// cf-model: tokens from a whole model, with their quality and their time.
#include "apps/cli/options.hpp"
#include "apps/cli/program.hpp"
#include "apps/model/commands.hpp"
#include "golden/checkpoint/checkpoint.hpp"

namespace cf::apps {
namespace {

int main(int argc, char** argv) {
  CommandLine line("Makes tokens with a whole model, scores texts, and times both, on the CPU or a GPU.",
                   std::string("cf-model ") + CF_VERSION);
  CommandLine& generate_line = line.subcommand("generate", "Continue prompts");
  CommandLine& stream_line = line.subcommand("stream", "Continue a prompt without end, in constant memory");
  CommandLine& eval_line = line.subcommand("eval", "Score the ids of a text, beside the oracle if asked to");
  CommandLine& memorize_line =
      line.subcommand("memorize", "Compare sequences with how the model continues their beginnings");
  CommandLine& sweep_line = line.subcommand("sweep", "Measure the revisions of a model, and name those that are wrong");
  CommandLine& bench_line = line.subcommand("bench", "Time prompts and tokens");
  CommandLine& info_line = line.subcommand("info", "Print a model's sizes and what fits this machine");
  Generate generate(generate_line);
  Stream stream(stream_line);
  Evaluate evaluate(eval_line);
  Memorize memorize(memorize_line);
  Sweep sweep(sweep_line);
  Bench bench(bench_line);
  Info info(info_line);
  line.example("Continue token ids and print text",
               "cf-model generate --model data/checkpoints/stdlib-4m --prompt-ids 486,856,8");
  line.example("What a model of 7 B takes", "cf-model info --preset llama-2-7b");
  if (const auto exit_code = line.parse(argc, argv)) return *exit_code;
  const std::string command = shell_command(argc, argv);
  if (generate_line.chosen()) return generate.run(command);
  if (stream_line.chosen()) return stream.run(command);
  if (eval_line.chosen()) return evaluate.run(command);
  if (memorize_line.chosen()) return memorize.run(command);
  if (sweep_line.chosen()) return sweep.run(command);
  if (bench_line.chosen()) return bench.run(command);
  return info.run();
}

}  // namespace
}  // namespace cf::apps

int main(int argc, char** argv) {
  cf::checkpoint::guard_mapped_files();
  return cf::apps::run_main([&] { return cf::apps::main(argc, argv); });
}
