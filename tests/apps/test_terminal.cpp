// What the programs show on a terminal.
#include "apps/cli/table.hpp"
#include "apps/cli/terminal.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace cf::apps;

TEST_CASE("a progress line fits every width") {
  const std::string label = "data/golden/\u00e9t\u00e9-kv2048.h5";
  for (int percent : {0, 1, 50, 99, 100})
    for (std::size_t columns = 0; columns <= 200; ++columns) {
      const std::string line = progress_line(label, percent, columns);
      CAPTURE(columns, line);
      CHECK(line.size() <= columns + 2);  // each of two characters has two bytes
      if (columns >= 4) CHECK(line.ends_with(std::to_string(percent) + "%"));
      if (columns >= 26) CHECK(line.find(".h5 [") != line.npos);
    }
  CHECK(progress_line("x.h5", 50, 80) == "x.h5 [###############...............]  50%");
  CHECK(progress_line("x.h5", 100, 26) == "x.h5 [##############] 100%");
  CHECK(progress_line("a-long-name.h5", 0, 26) == "...me.h5 [..........]   0%");
  CHECK(progress_line("x.h5", 7, 10) == "  7%");
  CHECK(progress_line("x.h5", 7, 3) == "");
}

TEST_CASE("control characters of a text are escaped, and no others") {
  CHECK(visible("a \u00e9 \u20ac |~") == "a \u00e9 \u20ac |~");
  CHECK(visible("\x1b[2J\n\t\x7f") == "\\x1b[2J\\x0a\\x09\\x7f");
  CHECK(visible("\u0080\u009b\u00a0\xc2") == "\\xc2\\x80\\xc2\\x9b\u00a0\xc2");
}

TEST_CASE("a table in a file has no colour, and every line the same width") {
  const cf::test::TempDir dir;
  Table table({"tap", "rel L2", "verdict"});
  table.add({"output", "1.0e-03", "FAIL"});
  table.add({"m\nlp", "-", "ok"});
  std::FILE* const file = std::fopen((dir / "x").c_str(), "w");
  REQUIRE(file);
  table.print(file);
  std::fclose(file);
  CHECK(cf::test::read_file(dir / "x") ==
        "| tap     |  rel L2 | verdict |\n| ------- | ------: | ------- |\n| output  | 1.0e-03 | FAIL    |\n"
        "| m\\x0alp |       - | ok      |\n");
}
