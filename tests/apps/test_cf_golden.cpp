// cf-golden as its users meet it: what it prints, where, and with which exit code.
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/apps/run_program.hpp"
#include "tests/golden/golden_sample.hpp"
#include "tests/golden/model_sample.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::test;
using Json = nlohmann::json;

namespace {

const std::string program = CF_GOLDEN_PROGRAM;

bool has(const std::string& text, std::string_view part) { return text.find(part) != text.npos; }

ProgramRun cf_golden(const std::string& arguments) { return run_program("'" + program + "' " + arguments); }

/// Bad input: exit code 2, nothing on stdout, one line on stderr that names the program and holds every part.
void check_refused(const ProgramRun& r, std::initializer_list<std::string_view> parts) {
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 2);
  CHECK(r.out.empty());
  CHECK(r.error_lines() == 1);
  CHECK(r.err.starts_with("cf-golden: "));
  for (std::string_view part : parts) {
    CAPTURE(part);
    CHECK(has(r.err, part));
  }
}

Json read_json(const std::string& path) { return Json::parse(read_file(path)); }

std::string write_sample_to(const std::string& path, const GoldenSample& s) {
  check_ok(write_sample(s, path));
  return path;
}

}  // namespace

TEST_CASE("help is no error") {
  for (const char* arguments : {"--help", "info --help", "run --help", "compare --help"}) {
    const ProgramRun r = cf_golden(arguments);
    CAPTURE(arguments);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "Usage"));
    CHECK(r.err.empty());
  }
}

TEST_CASE("usage errors are one line") {
  const TempDir dir;
  const std::string x = write_sample_to(dir / "x.h5", make_sample());
  const auto says = [](const std::string& arguments, const std::string& message) {
    const ProgramRun r = cf_golden(arguments);
    check_refused(r, {});
    CHECK(r.err == "cf-golden: " + message + "\n");
  };
  says("walk", "subcommand: expected info, run or compare, got 'walk'");
  says("info", "file: expected 1, got 0");
  says("run", "files: expected 1 or more, got 0");
  says("compare " + x, "files: expected 2, got 1");
  says("compare " + x + " " + x + " " + x, "files: expected 2, got 3");
  says("run " + x + " --dtype f16", "--dtype: expected float64 or float32 with --backend cpu, got 'float16'");
  says("run " + x + " --dtype f8", "--dtype: expected float16, bfloat16, float32 or float64, got 'f8'");
  says("run " + x + " --what", "--what: unknown option");
  says("run " + x + " --dtyp f32", "--dtyp: unknown option, did you mean --dtype?");
  says("run " + x + " --isolated --chained", "--isolated: expected without --chained");
  says("run " + x + " --backend tpu", "--backend: expected cpu or cuda, got 'tpu'");
  says("run " + x + " --impl graph", "--impl: expected unfused or layer, got 'graph'");
  says("run " + x + " --impl layer", "--impl layer: expected with --backend cuda and --chained");
  says("run " + x + " --json ''", "--json: expected a file's path, got ''");
  says("run " + x + " --json " + x, "--json: expected a file of its own, got '" + x + "' as for files");
  says("run --impl graph --json= --model ''",
       "--impl: expected unfused or layer, got 'graph'; --model: expected a text, got ''; --json: expected a file's "
       "path, got ''; files: expected 1 or more, got 0");
  check_refused(cf_golden("run " + x + " --site attention"), {"--site", "attention.context", "'attention'"});
  check_refused(cf_golden("run " + x + " --site ''"), {"--site", "attention.context", "''"});
  check_refused(run_program("CUDA_VISIBLE_DEVICES= '" + program + "' run " + x + " --backend cuda"),
                {"--backend cuda: "});
  check_refused(cf_golden("compare " + x + " " + x + " --variant-b float8"), {"float8", "float16_eager, float64"});
}

// AddressSanitizer needs more address space than the limit leaves.
#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("too few threads are one line") {
  const TempDir dir;
  const std::string x = write_sample_to(dir / "x.h5", make_sample());
  check_refused(run_program("ulimit -v 500000; OMP_NUM_THREADS=512 '" + program + "' run " + x),
                {"OMP_NUM_THREADS: expected a number of threads that this process can start, got 512"});
}
#endif

TEST_CASE("bad files are one line") {
  const TempDir dir;
  GoldenSample s = make_sample();
  const std::string x = write_sample_to(dir / "x.h5", s);
  write_file(dir / "cut.h5", read_file(x).substr(0, 5000));
  for (const char* command : {"info ", "run "}) {
    check_refused(cf_golden(command + (dir / "absent.h5")), {"absent.h5"});
    check_refused(cf_golden(command + (dir / "cut.h5")), {"cut.h5", "truncated", "got 4488"});
  }
  check_refused(cf_golden("compare " + x + " " + (dir / "absent.h5")), {"absent.h5"});
  check_refused(cf_golden("run " + x + " --model " + (dir / "no_model")), {"no_model"});

  s.taps["float64"].erase("attention.context");
  check_refused(cf_golden("run " + write_sample_to(dir / "tapless.h5", s)),
                {"tapless.h5", "/taps/float64/attention.context", "missing"});
  // Before the weights are made or read.
  s.meta.weights_checksum ^= 1;
  for (const char* mode : {"--isolated ", "--chained ", "--isolated --site attention.dense "})
    check_refused(cf_golden(std::string("run ") + mode + write_sample_to(dir / "tapless.h5", s)),
                  {"tapless.h5", "/taps/float64/attention.context", "missing"});
  s = make_sample();
  s.meta.weights_checksum ^= 1;
  check_refused(cf_golden("run " + write_sample_to(dir / "damaged.h5", s)), {"damaged.h5", "weights_checksum"});
  check_refused(cf_golden("compare " + x + " " + write_sample_to(dir / "longer.h5", make_sample({.kv_len = {6, 3}}))),
                {"k_cache", "(2, 4, 4, 8)", "(2, 4, 5, 8)"});
}

TEST_CASE("a file's control characters are escaped") {
  const TempDir dir;
  GoldenSample s = make_sample();
  s.meta.producer = "\x1b]0;owned\7\x1b[31mred\nsecond line\r\x7f";
  s.meta.model = "small\x1b[2J";
  s.variants["other\a"] = s.variants["float64"];
  s.variants["other\a"].name = "other\a";
  auto& taps = s.taps["other\a"];
  for (const auto& [name, tap] : s.taps["float64"]) taps[name] = tap.clone();
  taps["hf.\xc2\x9btap"] = Tensor(DType::f64, {1});
  const std::string x = write_sample_to(dir / "x.h5", s);
  GoldenSample plain = make_sample();
  plain.taps["float64"]["output"].as<double>()[0] += 1;
  const std::string y = write_sample_to(dir / "y.h5", plain);
  const auto shown = [](const ProgramRun& r) {
    CHECK(r.err == "");
    for (unsigned char c : r.out) CHECK((c >= ' ' || c == '\n'));
    CHECK_FALSE(has(r.out, "\x7f"));
    CHECK_FALSE(has(r.out, "\xc2\x9b"));
    return r.out;
  };
  const std::string info = shown(cf_golden("info " + x));
  CHECK(has(info, "| \\x1b]0;owned\\x07\\x1b[31mred\\x0asecond line\\x0d\\x7f "));
  CHECK(has(info, "| hf.\\xc2\\x9btap "));
  CHECK(has(info, "other\\x07 ("));
  CHECK(has(shown(cf_golden("run -v " + x)), "small\\x1b[2J layer 1"));
  const std::string compared = shown(cf_golden("compare " + x + " " + y + " --variant-a 'other\a'"));
  CHECK(has(compared, "only in " + x + ": hf.\\xc2\\x9btap\n"));
  CHECK(has(compared, "(other\\x07) against"));
}

// AddressSanitizer needs more address space than the limit leaves.
#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("a small file asks for little memory, however large the sizes that it names") {
  const TempDir dir;
  GoldenSample s = make_sample();
  s.meta.config.max_position_embeddings = 1 << 26;
  const std::string run = "ulimit -v 500000; OMP_NUM_THREADS=1 '" + program + "' run ";
  const ProgramRun r = run_program(run + write_sample_to(dir / "x.h5", s));
  CHECK(r.exit_code == 0);
  CHECK(r.err == "");
  // No taps: nothing is made.
  s = make_sample({.weights = "procedural"});
  s.meta.config.intermediate_size = 1 << 22;
  s.taps.clear();
  s.taps["float64"]["hf.more"] = Tensor(DType::f64, {1});
  check_refused(run_program(run + write_sample_to(dir / "y.h5", s)), {"/taps/float64/input_layernorm: missing"});
}
#endif

TEST_CASE("info tells what a file holds") {
  const TempDir dir;
  const ProgramRun r = cf_golden("info " + write_sample_to(dir / "x.h5", make_sample()));
  CHECK(r.exit_code == 0);
  CHECK(r.err.empty());
  for (const char* part :
       {"the tests", "small, layer 1 of 2", "hidden 32", "float16", "5, 3", "random", "stored", "18364758544493064720",
        "float16_eager (eager, cpu)", "float64 (sdpa, cpu)", "attention.rotary_emb.q", "token=2, head=4, d=8"}) {
    CAPTURE(part, r.out);
    CHECK(has(r.out, part));
  }
}

TEST_CASE("run passes on the oracle's own taps, isolated and chained, for every kind of file") {
  const TempDir dir;
  const SampleOptions options =
      GENERATE(SampleOptions{}, SampleOptions{.dtype = DType::bf16, .cache = "procedural", .weights = "procedural"},
               SampleOptions{.dtype = DType::f32, .q_len = 2, .kv_len = {9, 2, 5}},
               SampleOptions{.parallel_residual = false}, SampleOptions{.cache = "none", .q_len = 4, .kv_len = {4, 4}});
  const std::string x = write_sample_to(dir / "x.h5", make_sample(options));
  for (const char* mode : {"--isolated", "--chained"}) {
    const ProgramRun r = cf_golden("run " + x + " " + mode + " --json " + (dir / "x.json"));
    CAPTURE(r.out, r.err);
    CHECK(r.exit_code == 0);
    CHECK(r.err.empty());
    CHECK_FALSE(has(r.out, "FAIL"));
    CHECK_FALSE(has(r.out, "reproduce"));
    const Json json = read_json(dir / "x.json");
    CHECK(json["program"] == "cf-golden");
    CHECK(has(json["command"], mode));
    REQUIRE(json["rows"].size() == 24);
    for (const Json& row : json["rows"]) {
      CAPTURE(row.dump());
      CHECK(row["mode"] == std::string(mode).substr(2));
      CHECK(row["ok"] == true);
      CHECK(row["budget"] == (row["dtype"] == "float64" ? 1e-11 : 2e-6));
      CHECK(row["rel_l2"] <= row["budget"]);
      CHECK(row["non_finite"] == 0);
      CHECK(row["producer_rel_l2"]["float16_eager"] <= 0x1p-11);
    }
  }
}

TEST_CASE("run takes several files, one dtype, one site") {
  const TempDir dir;
  const std::string a = write_sample_to(dir / "a.h5", make_sample()),
                    b = write_sample_to(dir / "b.h5", make_sample({.dtype = DType::f32}));
  const ProgramRun r =
      cf_golden("run " + a + " " + b + " --dtype f32 --site attention.rotary_emb --json " + (dir / "x.json"));
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 0);
  CHECK(r.out.starts_with("2 files, 6 taps compared, 0 failed, worst error/budget 0.0"));
  CHECK(has(r.out, ".h5, attention.rotary_emb."));
  CHECK(has(r.out, ", float32, "));
  const Json rows = read_json(dir / "x.json")["rows"];
  REQUIRE(rows.size() == 6);
  CHECK(rows[0]["tap"] == "attention.rotary_emb.q");
  CHECK(rows[0]["site"] == "attention.rotary_emb");
  CHECK(rows[0]["dtype"] == "float32");
  CHECK(rows[5]["tap"] == "attention.rotary_emb.v");
  CHECK(rows[5]["file"] == b);
}

TEST_CASE("run names the guilty site, and its line reproduces the failure") {
  const TempDir dir;
  GoldenSample s = make_sample();
  s.taps["float64"]["attention.context"].as<double>()[32 + 2 * 8 + 5] += 1e-3;
  const std::string x = write_sample_to(dir / "x y.h5", s);
  const ProgramRun r = cf_golden("run '" + x + "' --json " + (dir / "x.json"));
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 1);
  CHECK(r.err.empty());
  CHECK(r.out.starts_with("FAIL " + x + ", attention.context, float64: rel L2 "));
  CHECK(has(r.out, ", budget 1.00e-11, worst at token=1, head=2, d=5\nreproduce: "));
  CHECK(has(r.out, "\n1 file, 24 taps compared, 4 failed, worst error/budget "));
  CHECK(std::count(r.out.begin(), r.out.end(), '\n') == 2 * 4 + 1);
  std::string sites;
  const Json json = read_json(dir / "x.json");
  for (const Json& row : json["rows"])
    if (row["ok"] == false) sites += row["site"].get<std::string>() + " " + row["dtype"].get<std::string>() + "\n";
  // The next site reads the wrong tensor. Isolated, that site is wrong too, and no other site is.
  CHECK(sites ==
        "attention.context float64\nattention.dense float64\nattention.context float32\nattention.dense float32\n");

  const std::string line = "reproduce: cf-golden run '" + x + "' --site attention.context --isolated --dtype float32";
  REQUIRE(has(r.out, line + "\n"));
  const ProgramRun again = cf_golden(line.substr(std::string("reproduce: cf-golden ").size()));
  CHECK(again.exit_code == 1);
  CHECK(has(again.out, line));
  CHECK_FALSE(has(again.out, "attention.dense"));
  CHECK(cf_golden("run '" + x + "' --site mlp.dense_4h_to_h").exit_code == 0);

  // Chained, only the tap itself differs: what follows was computed from the right one.
  const ProgramRun chained = cf_golden("run '" + x + "' --chained --dtype f64");
  CHECK(chained.exit_code == 1);
  CHECK(has(chained.out, "--site attention.context --chained --dtype float64\n"));
  CHECK_FALSE(has(chained.out, "--site attention.dense"));
}

TEST_CASE("a NaN fails") {
  const TempDir dir;
  GoldenSample s = make_sample();
  s.inputs["hidden"].as<std::uint16_t>()[0] = 0x7e00;
  const ProgramRun r = cf_golden("run " + write_sample_to(dir / "x.h5", s) + " --json " + (dir / "x.json"));
  CHECK(r.exit_code == 1);
  CHECK(has(r.out, "32 elements are not finite"));
  CHECK(has(r.out, "worst error/budget inf at "));
  CHECK(read_json(dir / "x.json")["rows"][0]["non_finite"] == 32);
}

TEST_CASE("run --verbose prints a table of at most 120 columns a file and dtype") {
  for (const char* name : {"neox-gptq-v2-kv17-b3", "neox-d128-kv128-b3"}) {
    const ProgramRun r = cf_golden("run " CF_DATA_DIR "/golden/" + std::string(name) + ".h5 -v");
    CAPTURE(r.out, r.err);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, ", isolated, cpu backend, unfused, float64 activations\n"));
    CHECK(has(r.out, ", isolated, cpu backend, unfused, float32 activations\n"));
    std::istringstream lines(r.out);
    int rows = 0;
    for (std::string line; std::getline(lines, line);)
      if (line.starts_with("|")) {
        CHECK(line.size() <= 120);
        ++rows;
      }
    CHECK(rows == 2 * (2 + 12 + (has(name, "gptq") ? 4 : 0)));
  }
}

TEST_CASE("a whole model's file is run from its ids on") {
  const std::string x = CF_DATA_DIR "/golden_model/neox-gptq-sym-16.h5";
  const ProgramRun r = cf_golden("run -v " + x);
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 0);
  CHECK(has(r.out, ", 17 ids, cpu backend, float64 activations; 12 of 12 greedy ids are the file's\n"));
  CHECK(has(r.out, "layers.1.output"));
  for (const char* option : {"--isolated", "--site attention.dense"})
    check_refused(cf_golden("run " + x + " " + option), {x, "run from its ids on: expected no --impl layer, --site"});
}

TEST_CASE("FAIL is red on a terminal alone, and NO_COLOR is honoured") {
  const TempDir dir;
  GoldenSample s = make_sample();
  s.taps["float64"]["output"].as<double>()[0] += 1;
  const std::string x = write_sample_to(dir / "x.h5", s), run = "'" + program + "' run -v " + x;
  const std::string red = "\x1b[31mFAIL";
  ProgramRun r = run_on_terminal(run, 100);
  CAPTURE(r.out);
  CHECK(r.exit_code == 1);
  CHECK(has(r.out, "| " + red));
  CHECK(has(r.out, "\n" + red));
  CHECK(has(run_on_terminal("NO_COLOR= " + run, 100).out, red));
  CHECK_FALSE(has(run_on_terminal("NO_COLOR=1 " + run, 100).out, red));
  CHECK_FALSE(has(run_program(run).out, "\x1b"));
  CHECK_FALSE(has(run_on_terminal(run + " | cat", 100).out, red));
}

TEST_CASE("the progress bar fits the terminal") {
  const TempDir dir;
  const std::string x = write_sample_to(dir / "a-file-with-a-long-name.h5", make_sample());
  const std::string clear = "\r\x1b[K";
  for (unsigned short columns : {200, 60, 30, 12}) {
    const ProgramRun r = run_on_terminal("'" + program + "' run " + x + " >/dev/null", columns);
    CAPTURE(columns, r.out);
    CHECK(r.exit_code == 0);
    CHECK(has(r.out, "100%"));
    int lines = 0;
    for (std::size_t from = r.out.find(clear); from != r.out.npos; ++lines) {
      const std::size_t next = r.out.find(clear, from + clear.size());
      CHECK(std::min(next, r.out.size()) - from - clear.size() < columns);
      from = next;
    }
    CHECK(lines > 10);
  }
}

TEST_CASE("run points at compare for a dump without the reference") {
  const TempDir dir;
  GoldenSample s = make_sample();
  s.taps.erase("float64");
  s.variants.erase("float64");
  const std::string x = write_sample_to(dir / "x.h5", s);
  check_refused(cf_golden("run " + x), {x, "'float64'", "got float16_eager", "'cf-golden compare " + x + " OTHER.h5'"});
  ModelSample model = make_model_sample();
  model.logits.erase("float64");
  model.taps.erase("float64");
  check_ok(write_sample(model, dir / "model.h5"));
  check_refused(cf_golden("run " + (dir / "model.h5")), {"model.h5", "'float64'", "got float16_eager"});
}

TEST_CASE("compare finds two dumps equal, near, or apart") {
  const TempDir dir;
  GoldenSample s = make_sample();
  const std::string a = write_sample_to(dir / "a.h5", s);
  ProgramRun r = cf_golden("compare " + a + " " + a + " --json " + (dir / "x.json"));
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 0);
  Json rows = read_json(dir / "x.json")["rows"];
  REQUIRE(rows.size() == 7 + 12);
  for (const Json& row : rows) CHECK(row["rel_l2"] == 0);

  r = cf_golden("compare " + a + " " + a + " --variant-b float16_eager --json " + (dir / "x.json"));
  CHECK(r.exit_code == 0);
  rows = read_json(dir / "x.json")["rows"];
  CHECK(rows[18]["dtypes"] == "float64, float16");
  CHECK(rows[18]["rel_l2"] > 1e-5);
  CHECK(rows[18]["budget"] < 2e-3);
  CHECK(rows[18]["budget"] > 1e-3);

  s.taps["float64"]["output"].as<double>()[40] += 1e-9;
  s.taps["float64"].erase("mlp.act");
  s.taps["float64"]["hf.extra"] = Tensor(DType::f64, {2});
  const std::string b = write_sample_to(dir / "b.h5", s);
  r = cf_golden("compare " + a + " " + b);
  CHECK(r.exit_code == 1);
  CHECK(r.err.empty());
  CHECK(has(r.out, "## " + a + " (float64) against " + b + " (float64)\n"));
  CHECK_FALSE(has(r.out, "inputs already differ"));
  CHECK(has(r.out, "token=1, hidden=8"));
  CHECK(has(r.out, "only in " + a + ": mlp.act\n"));
  CHECK(has(r.out, "only in " + b + ": hf.extra\n"));
  CHECK(has(r.out, "reproduce: cf-golden compare " + a + " " + b + " --variant-a float64 --variant-b float64\n"));

  GoldenSample other = make_sample();
  other.inputs["positions"].as<std::int32_t>()[1] = 3;
  r = cf_golden("compare " + a + " " + write_sample_to(dir / "c.h5", other) + " --json " + (dir / "x.json"));
  CHECK(r.exit_code == 1);
  CHECK(has(r.out, "the inputs already differ, so the taps are expected to differ, too: inputs/positions\n"));
  rows = read_json(dir / "x.json")["rows"];
  CHECK(rows[2]["tensor"] == "inputs/positions");
  CHECK(rows[2]["ok"] == false);
  CHECK(rows[3]["ok"] == true);

  // A procedural cache and a stored one are equal.
  r = cf_golden("compare " + a + " " + write_sample_to(dir / "d.h5", make_sample({.cache = "procedural"})));
  CHECK(r.exit_code == 0);
}

TEST_CASE("output that cannot be written is one line, and nothing stays") {
  const TempDir dir;
  const std::string x = write_sample_to(dir / "x.h5", make_sample());
  const ProgramRun early = cf_golden("run " + x + " --json " + (dir / "absent/x.json"));
  check_refused(early, {"absent/x.json", "cannot be written"});
  check_refused(cf_golden("compare " + x + " " + x + " --json " + dir.path()), {dir.path(), "cannot be written"});
  ProgramRun r = cf_golden("run " + x + " --json /dev/full");
  CHECK(r.exit_code == 2);
  CHECK(r.err == "cf-golden: /dev/full: cannot be written: No space left on device\n");
  r = run_program("trap '' XFSZ; ulimit -f 1; '" + program + "' run " + x + " --json " + (dir / "x.json") +
                  " | cat >/dev/null");
  CHECK(r.err == "cf-golden: " + (dir / "x.json") + ": cannot be written: File too large\n");
  r = cf_golden("run " + x + " >/dev/full");
  CHECK(r.exit_code == 2);
  CHECK(r.err == "cf-golden: standard output: cannot be written\n");
  CHECK(entries(dir.path()) == 1);
}

TEST_CASE("run shows what a quantised weight means, exactly") {
  const TempDir dir;
  // The third file lacks the dequantised weights.
  for (const char* name : {"neox-gptq-desc-act-kv17-b3", "neox-gptq-v2-kv17-b3", "neox-gptq-v2-q7-kv23"}) {
    const ProgramRun r =
        cf_golden("run " CF_DATA_DIR "/golden/" + std::string(name) + ".h5 --json " + (dir / "x.json"));
    CAPTURE(r.out, r.err);
    CHECK(r.exit_code == 0);
    std::size_t weights = 0;
    const Json json = read_json(dir / "x.json");
    for (const Json& row : json["rows"])
      if (row["tap"].get<std::string>().ends_with(".weight")) {
        CHECK(row["tap"] == row["site"].get<std::string>() + ".weight");
        CHECK(row["max_abs"] == 0);
        CHECK(row["budget"] == 0);
        ++weights;
      }
    CHECK(weights == (has(name, "q7") ? 0 : 2 * 4));
  }
  CHECK(has(cf_golden("info " CF_DATA_DIR "/golden/neox-gptq-v2-kv17-b3.h5").out, "out=192, in=64"));
}
