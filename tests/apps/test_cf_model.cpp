// cf-model as its users meet it: what it prints, writes and refuses.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/model/config.hpp"
#include "core/resources.hpp"
#include "golden/checkpoint/token_file.hpp"
#include "golden/file/model_golden.hpp"
#include "tests/apps/run_cf_model.hpp"
#include "tests/checkpoint/npy_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using Json = nlohmann::json;

const std::string model_dir = "--model '" CF_DATA_DIR "/checkpoints/neox-d80' ";

// The models that golden/tools/train_small.py has trained, each with a GPTQ twin, and the text that they have not seen.
const std::string trained = CF_DATA_DIR "/checkpoints/", held_out = trained + "stdlib-4m/held_out.npy";

Json figures_of_held_out(const std::string& model, const std::string& more, const TempDir& dir) {
  cf_model_ok("eval --model '" + trained + model + "' --tokens '" + held_out + "' --context 512 --json '" +
              (dir / "x.json") + "' " + more);
  return Json::parse(read_file(dir / "x.json"))["figures"]["float32"];
}

void check_refusal(const std::string& arguments, const std::string& text) { check_cf_model_refusal(arguments, text); }

std::string list_of(const std::int32_t* ids, std::int64_t count) {
  std::string text;
  for (std::int64_t i = 0; i < count; ++i) text += (i ? "," : "") + std::to_string(ids[i]);
  return text;
}

/// A copy of a checkpoint with a tokenizer.json in which the token of id N is "wN".
void write_checkpoint_with_text(const TempDir& dir) {
  for (const char* file : {"config.json", "model.safetensors"})
    std::filesystem::copy_file(CF_DATA_DIR "/checkpoints/neox-d80/" + std::string(file), dir / file);
  Json vocab = Json::object();
  for (int id = 0; id < 128; ++id) vocab["w" + std::to_string(id)] = id;
  write_file(dir / "tokenizer.json", Json{{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}},
                                          {"decoder", {{"type", "ByteLevel"}}},
                                          {"added_tokens", Json::array()}}
                                         .dump());
}

}  // namespace

TEST_CASE("cf-model generate continues a prompt with the ids that Hugging Face chooses", "[cf_model]") {
  const auto file = golden::ModelGolden::open(CF_DATA_DIR "/golden_model/neox-d80-16.h5");
  REQUIRE(file);
  const auto ids = file->ids();
  REQUIRE(ids);
  const std::int64_t prompt = file->meta().prompt_len, count = file->meta().tokens - prompt;
  const std::int32_t* all = ids->as<std::int32_t>();
  const TempDir dir;
  const std::string expected = list_of(all + prompt, count);
  const std::string common = model_dir + "--stop none --max-new-tokens " + std::to_string(count);
  for (const char* more : {"", " --activation float64", " --chunk 3", " --slots 12 --threads 1"}) {
    const auto r = cf_model_ok("generate " + common + more + " --prompt-ids " + list_of(all, prompt));
    CAPTURE(more);
    CHECK(r.out == expected + "\n");
    CHECK(r.err.find(std::to_string(count) + " new tokens in ") != std::string::npos);
  }
  // The same prompt from a file of ids.
  REQUIRE(checkpoint::write_token_file(dir / "prompt.npy", std::span(all, std::size_t(prompt)), {prompt}));
  CHECK(cf_model_ok("generate " + common + " --prompt-ids '" + (dir / "prompt.npy") + "'").out == expected + "\n");
}

TEST_CASE("cf-model's threads sleep while they wait, unless the environment says how they wait", "[cf_model]") {
  struct Case {
    const char *said, *shown;
  };
  const std::string unset = "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT -u KMP_BLOCKTIME OMP_DISPLAY_ENV=VERBOSE ";
  for (const Case& c :
       {Case{"", "GOMP_SPINCOUNT = '1000'"}, Case{"OMP_WAIT_POLICY=ACTIVE ", "OMP_WAIT_POLICY = 'ACTIVE'"},
        Case{"GOMP_SPINCOUNT=77 ", "GOMP_SPINCOUNT = '77'"}}) {
    CAPTURE(c.said);
    const auto r = run_program(unset + c.said + CF_MODEL_PROGRAM " generate " + model_dir +
                               "--stop none --max-new-tokens 3 --prompt-ids 1,2,3");
    CHECK(r.exit_code == 0);
    CHECK(std::count(r.out.begin(), r.out.end(), ',') == 2);
    const std::size_t last = r.err.rfind("OPENMP DISPLAY ENVIRONMENT BEGIN");
    if (r.err.find("GOMP_SPINCOUNT") == r.err.npos) return;  // another OpenMP than GCC's
    CHECK(r.err.find(c.shown, last) != r.err.npos);
    // The words of the command line are the same in the program that is executed anew.
    CHECK(r.err.find("3 new tokens in ") != r.err.npos);
  }
}

TEST_CASE("cf-model generate: more prompts than slots wait, and each has the ids that it has alone", "[cf_model]") {
  const TempDir dir;
  const std::vector<std::string> prompts{"1,2,3", "4", "5,6,7,8,9,10,11", "3,3,3"};
  const std::string sampled =
      model_dir + "--stop none --max-new-tokens 9 --temperature 2 --top-k 40 --top-p 0.95 --seed 3 ";
  const auto r = cf_model_ok("generate " + sampled + "--slots 2 --prompt-ids '1,2,3;4;5,6,7,8,9,10,11;3,3,3' --json '" +
                             (dir / "x.json") + "'");
  const Json report = Json::parse(read_file(dir / "x.json"));
  REQUIRE(report["sequences"].size() == prompts.size());
  CHECK(report["sampling"] == "temperature 2, top_k 40, top_p 0.95, min_p 0, repetition_penalty 1, seed 3");
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const Json& sequence = report["sequences"][i];
    CHECK(sequence["finish"] == "length");
    CHECK(sequence["ids"].size() == 9);
    std::vector<std::int32_t> ids = sequence["ids"];
    CHECK(r.out.find(std::to_string(i) + ": " + list_of(ids.data(), 9) + "\n") != std::string::npos);
  }
  // The first prompt alone in as many slots.
  const auto alone = cf_model_ok("generate " + sampled + "--slots 2 --prompt-ids 1,2,3");
  std::vector<std::int32_t> first = report["sequences"][0]["ids"];
  CHECK(alone.out == list_of(first.data(), 9) + "\n");
  // Another seed makes other ids.
  const auto other = cf_model_ok("generate " + model_dir +
                                 "--stop none --max-new-tokens 9 --temperature 2 --seed 4 "
                                 "--prompt-ids 1,2,3");
  CHECK(other.out != alone.out);
}

TEST_CASE("cf-model generate prints text where the checkpoint has a vocabulary", "[cf_model]") {
  const TempDir dir;
  write_checkpoint_with_text(dir);
  const std::string common = "generate --model '" + dir.path() + "' --stop none --max-new-tokens 3 --prompt-ids 1,2,3";
  const auto ids = cf_model_ok(common + " --ids");
  std::string text = "w" + ids.out;
  for (std::size_t at = 0; (at = text.find(',', at)) != text.npos;) text[at] = 'w';
  CHECK(cf_model_ok(common).out == text);
  // A tokenizer of another kind leaves the ids.
  write_file(dir / "tokenizer.json", R"({"model": {"type": "Unigram", "vocab": []}})");
  const auto other = cf_model_ok(common);
  CHECK(other.out == ids.out);
  CHECK(other.err.find("ids are printed") != std::string::npos);
}

TEST_CASE("cf-model generate ends a sequence at the checkpoint's own stop ids", "[cf_model]") {
  const TempDir dir;
  write_checkpoint_with_text(dir);
  const std::string common = "generate --ids --model '" + dir.path() + "' --max-new-tokens 6 --prompt-ids 1,2,3";
  const std::string ids = cf_model_ok(common + " --stop none").out;
  const std::string first = ids.substr(0, ids.find(','));
  write_file(dir / "generation_config.json", "{\"eos_token_id\": " + first + "}");
  CHECK(cf_model_ok(common).out == first + "\n");
  CHECK(cf_model_ok(common + " --stop none").out == ids);
  CHECK(cf_model_ok(common + " --stop " + first).out == first + "\n");
  write_file(dir / "generation_config.json", R"({"eos_token_id": "two"})");
  check_refusal(common, "eos_token_id");
}

TEST_CASE("cf-model generate --check holds every prompt's logits against the oracle", "[cf_model]") {
  const auto r = cf_model_ok("generate " + model_dir + "--stop none --max-new-tokens 5 --prompt-ids '1,2,3;4' --check");
  for (const char* prompt : {"0", "1"})
    CHECK(r.out.find("check of prompt " + std::string(prompt) + " against the float64 oracle: relative L2 ") !=
          std::string::npos);
  CHECK(r.out.find("5 of 5 greedy ids are the oracle's: ok") != std::string::npos);
  check_refusal("generate " + model_dir + "--prompt-ids 1 --check --activation float64", "--check: expected with");
}

TEST_CASE("cf-model generate ends cleanly with what was made when it is interrupted", "[cf_model]") {
  const TempDir dir;
  // The signal comes once there is a first id, however fast the machine is.
  const std::string out = dir / "out.txt";
  const auto r = run_program("'" + std::string(CF_MODEL_PROGRAM) +
                             "' generate --preset pythia-14m --max-new-tokens 40000 --prompt-ids 1,2 --json '" +
                             (dir / "x.json") + "' >'" + out + "' & while kill -0 $! && ! [ -s '" + out +
                             "' ]; do sleep 0.1; done; kill -INT $!; wait $!");
  const std::string printed = read_file(out);
  CAPTURE(r.err);
  CHECK(r.exit_code == 130);
  CHECK(printed.ends_with("\n"));
  const Json report = Json::parse(read_file(dir / "x.json"));
  const std::vector<std::int32_t> ids = report["sequences"][0]["ids"];
  CHECK(report["sequences"][0]["finish"] == "interrupted");
  CHECK(printed == list_of(ids.data(), std::int64_t(ids.size())) + "\n");
}

TEST_CASE("cf-model generate says when a cache is full, and keeps what was made", "[cf_model]") {
  const auto r = cf_model("generate " + model_dir + "--stop none --max-new-tokens 20 --capacity 8 --prompt-ids 1,2,3");
  CHECK(r.exit_code == 2);
  CHECK(std::count(r.out.begin(), r.out.end(), ',') == 5);
  CHECK(r.err.find("the cache's capacity of 8 entries is reached after 6 new tokens") != std::string::npos);
  // Positions beyond the model's own are used, and said.
  const auto beyond =
      cf_model_ok("generate " + model_dir + "--stop none --max-new-tokens 4 --capacity 600 --prompt-ids 1");
  CHECK(beyond.err.find("positions beyond max_position_embeddings 512 are used as Hugging Face does, up to 600") !=
        std::string::npos);
}

TEST_CASE("cf-model eval scores every id once, whatever the windows and the way of feeding", "[cf_model]") {
  const TempDir dir;
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 150; ++i) ids.push_back((i * 37 + i * i) % 128);
  REQUIRE(checkpoint::write_token_file(dir / "text.npy", ids, {150}));
  const auto figures = [&](const std::string& more) {
    cf_model_ok("eval " + model_dir + "--tokens '" + (dir / "text.npy") + "' --json '" + (dir / "x.json") + "' " +
                more);
    return Json::parse(read_file(dir / "x.json"))["figures"]["float32"];
  };
  const Json whole = figures("");
  CHECK(whole["positions"] == 149);
  CHECK(std::log(double(whole["perplexity"]["mean"])) == Approx(double(whole["nll"]["mean"])));
  const Json prompt = figures("--feed prompt --chunk 32");
  CHECK(double(prompt["nll"]["mean"]) == Approx(double(whole["nll"]["mean"])).epsilon(1e-6));
  for (const char* windows : {"--context 50 --stride 10", "--context 50", "--context 149"}) {
    CAPTURE(windows);
    const Json one = figures(windows), many = figures(std::string("--feed prompt --slots 3 ") + windows);
    CHECK(many["positions"] == one["positions"]);
    CHECK(double(many["nll"]["mean"]) == Approx(double(one["nll"]["mean"])).epsilon(1e-6));
    CHECK(double(many["nll"]["error"]) == Approx(double(one["nll"]["error"])).epsilon(1e-6));
  }
  // Overlapping windows score every id but the first; separate ones leave out the first of each.
  CHECK(figures("--context 50 --stride 10")["positions"] == 149);
  CHECK(figures("--context 50")["positions"] == 147);
  CHECK(figures("--limit 20")["positions"] == 19);
  for (const char* windows : {"--context 50", "--context 50 --stride 10"}) {
    CAPTURE(windows);
    const Json beside = figures(std::string("--oracle ") + windows);
    CHECK(double(beside["kl"]["mean"]) < 1e-9);
    CHECK(double(beside["top_1_percent"]) == 100);
    CHECK(double(beside["logits_rel_l2"]) < 1e-5);
    CHECK(double(beside["reference_perplexity"]["mean"]) == Approx(double(beside["perplexity"]["mean"])).epsilon(1e-4));
  }
}

// AddressSanitizer needs more address space than the limit leaves.
#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("cf-model eval reads as many ids of a long file as --limit says", "[cf_model]") {
  const TempDir dir;
  const std::string bytes = npy(1, "<u2", "(1500000000,)", "");
  write_file(dir / "big.npy", bytes);
  std::filesystem::resize_file(dir / "big.npy", bytes.size() + 3'000'000'000);
  // The file is mapped; all of its ids would need twice as much.
  const ProgramRun r = run_program("ulimit -v 4000000; '" CF_MODEL_PROGRAM "' eval --threads 1 --model '" CF_DATA_DIR
                                   "/checkpoints/llama-gqa8' --limit 16 --context 8 --tokens '" +
                                   (dir / "big.npy") + "'");
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 0);
  CHECK(r.out.find("| positions                  | 14 ") != r.out.npos);
}
#endif

TEST_CASE("cf-model eval shows itself and Hugging Face's own runs beside float64", "[cf_model]") {
  const TempDir dir;
  const char* const file = GENERATE("neox-d80-16.h5", "neox-d80-512.h5");
  CAPTURE(file);
  const std::string common = "eval " + model_dir + "--feed prompt --json '" + (dir / "x.json") +
                             "' --reference '" CF_DATA_DIR "/golden_model/" + file + "' ";
  const auto r = cf_model_ok(common);
  for (const char* column : {"float32", "float16_eager", "float16_sdpa"})
    CHECK(r.out.find(column) != std::string::npos);
  const Json figures = Json::parse(read_file(dir / "x.json"))["figures"];
  REQUIRE(figures.size() == 3);
  for (const char* theirs : {"float16_eager", "float16_sdpa"}) {
    CAPTURE(theirs);
    CHECK(figures[theirs]["positions"] == figures["float32"]["positions"]);
    CHECK(double(figures["float32"]["kl"]["mean"]) < double(figures[theirs]["kl"]["mean"]));
    CHECK(double(figures["float32"]["logits_rel_l2"]) < double(figures[theirs]["logits_rel_l2"]));
  }
  CHECK(figures["float32"]["top_1_percent"] == 100);
  cf_model_ok(common + "--activation float64");
  const Json oracle = Json::parse(read_file(dir / "x.json"))["figures"]["float64"];
  CHECK(double(oracle["logits_rel_l2"]) < 1e-6);
  check_refusal("eval " + model_dir + "--reference '" CF_DATA_DIR "/golden/neox-d80-kv17-b1.h5'", "cf-golden-model");
  check_refusal(common + "--oracle", "--oracle");
}

TEST_CASE("cf-model eval gives trained models the loss on held-out text that torch gave them", "[cf_model]") {
  const std::string name = GENERATE("stdlib-4m", "stdlib-llama-2m");
  CAPTURE(name);
  const TempDir dir;
  // golden/tools/train_small.py scores the rounded weights in windows of 512 ids, and predicts all but a window's first
  // id.
  const Json figures = figures_of_held_out(name, "--feed prompt", dir);
  const Json about = Json::parse(read_file(trained + name + "/provenance.json"));
  CHECK(figures["positions"] == 128 * 511);
  CHECK(double(figures["nll"]["mean"]) ==
        Approx(double(about["held_out_loss_of_the_rounded_weights"])).epsilon(0).margin(1e-5));
}

TEST_CASE("cf-model on trained models: float64's ids, and codes of 4 bits cost little", "[cf_model]") {
  const std::string name = GENERATE("stdlib-4m", "stdlib-llama-2m");
  CAPTURE(name);
  const TempDir dir;
  double nll[2];
  for (const bool is_quantised : {false, true}) {
    const std::string model = name + (is_quantised ? "-gptq" : "");
    CAPTURE(model);
    const auto made = cf_model_ok("generate --model '" + trained + model +
                                  "' --stop none --max-new-tokens 24 --prompt-ids '308,71,12;5' --check");
    CHECK(made.out.find("check of prompt 1 against the float64 oracle: relative L2 ") != std::string::npos);
    const Json figures = figures_of_held_out(model, "--feed prompt --limit 2048 --oracle", dir);
    CHECK(figures["positions"] == 4 * 511);
    CHECK(double(figures["kl"]["mean"]) < 1e-9);
    CHECK(double(figures["logits_rel_l2"]) < 1e-5);
    nll[is_quantised] = figures["nll"]["mean"];
  }
  CHECK(nll[1] != nll[0]);
  CHECK(std::abs(nll[1] - nll[0]) < 0.05 * nll[0]);
}

TEST_CASE("cf-model bench reports every configuration as table, JSON and CSV", "[cf_model]") {
  const Json report = run_bench("--preset pythia-14m --prompt-len 4,9 --new-tokens 1,3 --slots 1-2 --runs 2").report;
  CHECK(report["capacity"] == 9 + 3 - 1);
  REQUIRE(report["results"].size() == 8);
  // Steps of two slots and of one read the weights once. They differ in the cache's bytes alone.
  const double one = report["results"][1]["decode_bytes"], two = report["results"][5]["decode_bytes"];
  CHECK(two > one);
  CHECK(two < 1.1 * one);
  // Whoever waits for a prompt that joins waits no longer than it takes to its first id.
  const BenchRun joined =
      run_bench("--preset pythia-14m --prompt-len 4 --new-tokens 1 --slots 2-3 --runs 2 --joiner-len 30");
  CHECK(joined.out.find("stall ms") != std::string::npos);
  CHECK(joined.report["joiner_len"] == 30);
  CHECK(joined.report["capacity"] == 4 + 30 + 8);
  REQUIRE(joined.report["results"].size() == 2);
  for (const Json& row : joined.report["results"]) {
    CHECK(double(row["stall_ms"]) > 0);
    CHECK(double(row["joiner_ttft_ms"]) > 0);
  }
}

TEST_CASE("cf-model bench --score reports the time of scores beside a prefill's", "[cf_model]") {
  const TempDir dir;
  const std::string json = dir / "x.json", csv = dir / "x.csv";
  const auto r =
      cf_model_ok("bench --preset pythia-14m --prompt-len 5,8 --score 1,3 --slots 2 --texts 3 --runs 1 --json '" +
                  json + "' --csv '" + csv + "'");
  CHECK(r.out.find("% of prefill") != std::string::npos);
  const Json report = Json::parse(read_file(json));
  CHECK(report["complete"] == true);
  CHECK(report["capacity"] == 8);
  REQUIRE(report["results"].size() == 4);
  for (const Json& row : report["results"]) {
    CAPTURE(row.dump());
    const double ids = 3 * double(row["prompt_len"]), score_ms = row["score_ms"], prefill_ms = row["prefill_ms"];
    CHECK(row["texts"] == 3);
    CHECK(double(row["score_ids_per_s"]) == Approx(1e3 * ids / score_ms));
    CHECK(double(row["prefill_ids_per_s"]) == Approx(1e3 * ids / prefill_ms));
    CHECK(double(row["percent_of_prefill"]) == Approx(100 * prefill_ms / score_ms));
  }
  const std::string lines = read_file(csv);
  CHECK(lines.starts_with("prompt_len,scored,slots,texts,score_ms,"));
  CHECK(std::count(lines.begin(), lines.end(), '\n') == 5);
}

TEST_CASE("cf-model info says what a model is and takes", "[cf_model]") {
  const auto r = cf_model_ok("info " + model_dir);
  for (const char* part : {"neox-d80", "0.660 M", "2 of 80, 20 turned by RoPE", "float16", "2.6 kB a token"})
    CHECK(r.out.find(part) != std::string::npos);
  CHECK(cf_model_ok("info --preset pythia-2.8b").out.find("2775.209 M") != std::string::npos);
  const std::string plan = cf_model_ok("info --preset pythia-2.8b --plan --gpu h100").out;
  CHECK(plan.starts_with("pythia-2.8b, one token, a cache of 2048 entries, layer 0 of 32 on h100\n"));
  CHECK(plan.find("\nembed_out: gemv, 258 MB; late\n") != std::string::npos);
  CHECK(cf_model_ok("info --preset pythia-2.8b --quant gptq").out.find("GPTQ of 4 bits, group 128") !=
        std::string::npos);
}

#ifdef CF_HAVE_CUDA
TEST_CASE("cf-model info says on how many GPUs a model fits, and why so many cannot share it", "[cf_model][ranks]") {
  const auto cells = [](const std::string& arguments) {
    std::map<std::string, std::string> of;
    std::istringstream lines(cf_model_ok("info " + arguments).out);
    for (std::string line; std::getline(lines, line);) {
      const std::size_t first = line.find("on "), bar = line.find(" | ");
      if (first == 2 && bar != line.npos) {
        std::string what = line.substr(first, bar - first), value = line.substr(bar + 3);
        what.erase(what.find_last_not_of(' ') + 1);
        of[what] = value.substr(0, value.find_last_not_of(" |") + 1);
      }
    }
    return of;
  };
  const auto large = cells("--preset llama-3.1-70b --gpu-memory 140 --capacity 8192");
  const ModelConfig m = *find_preset("llama-3.1-70b");
  const std::int64_t cache_token = 2 * 2 * m.num_hidden_layers * m.kv_heads() * m.head_dim();
  // The embedding, the head and the norms are whole on each rank.
  const std::int64_t whole = (2 * m.vocab_size + (2 * m.num_hidden_layers + 1)) * m.hidden_size;
  REQUIRE(large.size() == 4);
  for (const std::int64_t gpus : {1, 2, 4, 8}) {
    const std::string row = large.at(gpus == 1 ? "on one GPU" : "on each of " + std::to_string(gpus) + " GPUs");
    CAPTURE(gpus, row);
    CHECK(row.starts_with(gigabytes(2 * double((m.num_parameters() - whole) / gpus + whole)) + " of weights, "));
    char token[32];
    (void)std::snprintf(token, sizeof token, " %.1f kB of cache a token, ", double(cache_token / gpus) * 1e-3);
    CHECK(row.find(token + gigabytes(double(cache_token / gpus) * 8192) + " a slot, ") != row.npos);
    CHECK(row.ends_with(gpus == 1 ? ": does not fit" : " slots fit"));
  }
  // Half of a slot's cache beside half of the layers' weights: a GPU of more memory has room for more slots.
  CHECK(cells("--preset llama-3.1-70b --gpu-memory 200 --capacity 8192").at("on one GPU").ends_with(" slots fit"));
  const auto few = cells("--preset qwen2.5-7b --gpu-memory 80");
  CHECK(few.at("on each of 4 GPUs").ends_with(" slots fit"));
  CHECK(few.at("on each of 8 GPUs") == "model: 8 ranks must divide num_heads, got 28");
  CHECK(cells("--preset llama-3.2-3b --gpu-memory 80").at("on each of 8 GPUs").ends_with(" slots fit"));
  CHECK(cells("--preset qwen3-4b --quant gptq --group 128 --gpu-memory 24").at("on each of 2 GPUs").ends_with(" fit"));
  CHECK(cells("--preset pythia-14m").empty());
}
#else
TEST_CASE("cf-model info refuses to count a GPU's bytes without the CUDA backend", "[cf_model][ranks]") {
  check_refusal("info --preset pythia-14m --gpu-memory 80", "--gpu-memory: this build has no CUDA support");
}
#endif

TEST_CASE("cf-model takes a backend, and of each the options that are its own", "[cf_model]") {
  for (const char* command : {"generate", "eval", "bench", "info"}) {
    CAPTURE(command);
    const std::string help = cf_model_ok(std::string(command) + " --help").out;
    for (const char* option : {"--backend", "--impl"}) CHECK(help.find(option) != std::string::npos);
  }
  const std::string prompt = "generate " + model_dir + "--prompt-ids 1 ";
  for (const char* option : {"--backend", "--device"})
    CHECK(cf_model_ok(prompt + option + " cpu").out == cf_model_ok(prompt).out);
  check_refusal(prompt + "--impl graph", "--impl: expected with --backend cuda");
  check_refusal(prompt + "--gpus 2", "--gpus: expected with --backend cuda");
  check_refusal(prompt + "--backend gpu", "--backend: expected cpu or cuda, got 'gpu'");
  check_refusal(prompt + "--backend cuda --impl fast",
                "--impl: expected auto, unfused, graph, split, layer or persistent, got 'fast'");
  for (const char* own : {"--activation float32", "--threads 1"}) {
    const std::string name = std::string(own).substr(0, std::string(own).find(' '));
    check_refusal(prompt + "--backend cuda " + own, name + ": expected with --backend cpu");
  }
#ifndef CF_HAVE_CUDA
  for (const std::string& command : {prompt, "eval " + model_dir + "--tokens x.npy ",
                                     std::string("bench --preset pythia-14m "), "info " + model_dir})
    check_refusal(command + "--backend cuda", "--backend cuda: this build has no CUDA support");
#endif
}

TEST_CASE("cf-model generate --prompt names the command that encodes text", "[cf_model]") {
  const std::string command = "command python3 -m cf_ops generate --model x --prompt ";
  check_refusal("generate --model x --prompt 'it'\\''s'", command + "'it'\\''s'\n");
  check_refusal("generate --model x --prompt 'two\nlines'", command + "TEXT\n");
  check_refusal("generate --preset pythia-14m --prompt x",
                "--prompt: expected with --model: a preset has no tokenizer\n");
  check_refusal("generate --model x", "--prompt-ids: required, not given\n");
}

TEST_CASE("cf-model reports name the backend", "[cf_model]") {
  const TempDir dir;
  cf_model_ok("generate " + model_dir + "--prompt-ids 1 --max-new-tokens 2 --json '" + (dir / "x.json") + "'");
  const Json report = Json::parse(read_file(dir / "x.json"));
  CHECK(report["backend"] == "cpu");
  CHECK(report["activation_dtype"] == "float32");
  CHECK_FALSE(report["cpu"].get<std::string>().empty());
  CHECK_FALSE(report.contains("gpu"));
}

TEST_CASE("cf-model refuses bad input in one line", "[cf_model]") {
  const TempDir dir;
  check_refusal("generate " + model_dir, "--prompt-ids");
  check_refusal("generate --prompt-ids 1", "--model");
  check_refusal("generate " + model_dir + "--prompt-ids 1,,2", "expected ids such as 1,2,3");
  check_refusal("generate " + model_dir + "--prompt-ids '1;'", "expected ids such as 1,2,3");
  check_refusal("generate " + model_dir + "--prompt-ids 1,128", "prompt[1]: expected an id of 0 to 127, got 128");
  check_refusal("generate " + model_dir + "--prompt-ids missing.npy", "missing.npy");
  check_refusal("generate " + model_dir + "--prompt-ids 1,2,3 --capacity 2", "expected at most 2 ids");
  check_refusal("generate " + model_dir + "--prompt-ids 1 --temperature -1", "temperature");
  check_refusal("generate " + model_dir + "--prompt-ids 1 --temperature x", "--temperature: expected a number");
  check_refusal("generate " + model_dir + "--prompt-ids 1 --top-p 0.5", "top_p");
  check_refusal("generate " + model_dir + "--prompt-ids 1 --stop 1,x", "--stop");
  check_refusal("generate " + model_dir + "--prompt-ids 1 --slots 1025", "--slots: expected 1 to 1024");
  check_refusal("generate --preset pythia-12b --prompt-ids 1 --slots 64 --capacity 1000000", "of memory that are free");
  check_refusal("generate --model /nowhere --prompt-ids 1", "/nowhere");
  write_file(dir / "bad.npy", "not numpy");
  check_refusal("eval " + model_dir + "--tokens '" + (dir / "bad.npy") + "'", "bad.npy");
  REQUIRE(checkpoint::write_token_file(dir / "one.npy", std::vector<std::int32_t>{5}, {1}));
  check_refusal("eval " + model_dir + "--tokens '" + (dir / "one.npy") + "'", "expected at least 2 ids, got 1");
  REQUIRE(checkpoint::write_token_file(dir / "big.npy", std::vector<std::int32_t>{5, 128}, {2}));
  check_refusal("eval " + model_dir + "--tokens '" + (dir / "big.npy") + "'", "id 1: expected 0 to 127, got 128");
  check_refusal("eval " + model_dir + "--tokens '" + (dir / "big.npy") + "' --context 8 --stride 9",
                "--stride: expected");
  check_refusal("eval " + model_dir + "--tokens '" + (dir / "big.npy") + "' --slots 2",
                "--slots: expected with --feed prompt");
  check_refusal("eval " + model_dir + "--tokens '" + (dir / "big.npy") + "' --feed prompt --slots 2 --oracle",
                "--slots: expected without --oracle");
  check_refusal("bench --preset pythia-14m --slots 0", "--slots");
  check_refusal("bench --preset pythia-14m --prompt-len 4,9 --score 1-5",
                "--score: expected at most the 4 ids of the shortest prompt, got '5'");
  check_refusal("bench --preset pythia-14m --score 0", "--score: expected");
  check_refusal("bench --preset pythia-14m --texts 5", "--texts: expected with --score");
  check_refusal("bench --preset pythia-14m --score 1 --new-tokens 2", "--score: expected without --new-tokens");
  check_refusal("bench --preset pythia-14m --slots 1,4 --joiner-len 8",
                "--slots: expected at least 2 with --joiner-len, got '1'");
}
