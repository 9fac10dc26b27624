// ringspan capabilities: the table of what is implemented.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "capability_table.h"
#include "command.h"
#include "kernels/attend.h"

namespace ringspan::cli {
namespace {

const char* name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

// Reasons become footnotes, numbered as they appear.
class Footnotes {
 public:
  int number(const std::string& reason) {
    const auto [at, fresh] = numbers_.try_emplace(reason, static_cast<int>(reasons_.size()) + 1);
    if (fresh) reasons_.push_back(reason);
    return at->second;
  }
  const std::vector<std::string>& reasons() const { return reasons_; }

 private:
  std::map<std::string, int> numbers_;
  std::vector<std::string> reasons_;
};

struct Row {
  std::string pattern, option, where;  // where: dtypes and passes that it holds for
  std::vector<std::string> marks;
};

// Cells come strategy by strategy, then pass by pass, then dtype by dtype: what is the same for all of these is one row.
std::vector<Row> rows_of(const std::vector<Cell>& cells, std::size_t strategies, Footnotes& footnotes) {
  std::vector<Row> rows;
  const std::size_t group = strategies * 2 * 3;
  for (std::size_t begin = 0; begin < cells.size(); begin += group) {
    std::vector<Row> variants;
    for (std::size_t at = begin; at < begin + group; at += strategies) {
      Row row{cells[at].pattern, cells[at].option, fmt::format("{}, {}", to_string(cells[at].dtype), name_of(cells[at].pass)), {}};
      for (std::size_t s = 0; s < strategies; ++s) {
        const Cell& cell = cells[at + s];
        row.marks.push_back(cell.supported() ? "yes" : fmt::format("no [{}]", footnotes.number(cell.reason)));
      }
      variants.push_back(std::move(row));
    }
    const auto same = [](const Row& a, const Row& b) { return a.marks == b.marks; };
    const bool by_pass = same(variants[0], variants[2]) && same(variants[0], variants[4]) && same(variants[1], variants[3]) &&
                         same(variants[1], variants[5]);
    if (by_pass && same(variants[0], variants[1])) {
      variants[0].where = "all";
      rows.push_back(variants[0]);
    } else if (by_pass) {
      variants[0].where = "forward";
      variants[1].where = "backward";
      rows.insert(rows.end(), variants.begin(), variants.begin() + 2);
    } else {
      rows.insert(rows.end(), variants.begin(), variants.end());
    }
  }
  return rows;
}

std::vector<std::string> strategy_names(const std::vector<Cell>& cells) {
  std::vector<std::string> names;
  for (const Cell& cell : cells) {
    const std::string name(to_string(cell.strategy));
    if (std::find(names.begin(), names.end(), name) != names.end()) break;
    names.push_back(name);
  }
  return names;
}

void print_row(const Row& row, std::size_t widest) {
  fmt::print("{:<{}}{:<22}{:<10}", row.pattern, widest, row.option, row.where);
  for (const std::string& mark : row.marks) fmt::print("{:>12}", mark);
  fmt::print("\n");
}

int print_text(const std::vector<Cell>& cells) {
  const std::vector<std::string> strategies = strategy_names(cells);
  Footnotes footnotes;
  const std::vector<Row> rows = rows_of(cells, strategies.size(), footnotes);
  constexpr std::size_t kWidest = 30;
  print_row({"pattern", "option", "passes", strategies}, kWidest);
  std::string pattern;
  for (Row row : rows) {
    // A pattern's first row, and those of its options that differ from it.
    const bool first = row.pattern != pattern;
    pattern = row.pattern;
    if (!first) row.pattern.clear();
    print_row(row, kWidest);
  }
  fmt::print("\npasses: `all` is forward and backward, in float32, bfloat16 and float16\n");
  for (std::size_t i = 0; i < footnotes.reasons().size(); ++i) fmt::print("[{}] {}\n", i + 1, footnotes.reasons()[i]);
  fmt::print("\nkernels, best first\n");
  for (const auto& kernel : kernels::attend_kernels()) fmt::print("  {}\n", kernel.name);
  for (const auto& kernel : kernels::attend_backward_kernels()) fmt::print("  {}\n", kernel.name);
  return 0;
}

int print_json(const std::vector<Cell>& cells) {
  nlohmann::ordered_json json{{"version", 1}, {"cells", nlohmann::ordered_json::array()}};
  for (const Cell& cell : cells) {
    nlohmann::ordered_json entry{{"pattern", cell.pattern},         {"option", cell.option},
                                 {"dtype", to_string(cell.dtype)},  {"pass", name_of(cell.pass)},
                                 {"strategy", to_string(cell.strategy)}, {"supported", cell.supported()}};
    if (!cell.supported()) entry["reason"] = cell.reason;
    json["cells"].push_back(std::move(entry));
  }
  for (const auto& kernel : kernels::attend_kernels()) json["kernels"]["attend"].push_back(kernel.name);
  for (const auto& kernel : kernels::attend_backward_kernels()) json["kernels"]["attend_backward"].push_back(kernel.name);
  fmt::print("{}\n", json.dump(1));
  return 0;
}

}  // namespace

Body setup_capabilities(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  app.footer("The table is made by planning a small problem for every cell: the code that refuses is asked, nothing is written down twice.");
  app.add_flag("--json", *json, "every cell, with the reason where it is refused");
  return [json] {
    const std::vector<Cell> cells = capability_cells();
    return *json ? print_json(cells) : print_text(cells);
  };
}

}  // namespace ringspan::cli
