// ringspan capabilities: the table of what is implemented.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capability_table.h"
#include "command.h"
#include "kernels/attend.h"
#include "text.h"

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
  std::string pattern, option;
  std::string where;  // the passes and dtypes that it holds for
  std::vector<std::string> marks;
  bool operator==(const Row&) const = default;
};
using Rows = std::vector<Row>;

// The cells of one pattern and option, in the order dtype, pass, strategy, as few rows as say the same.
Rows rows_of(const Cell* cells, std::size_t strategies, Footnotes& footnotes) {
  constexpr std::size_t kVariants = 3 * 2;
  Rows variants;
  for (std::size_t v = 0; v < kVariants; ++v, cells += strategies) {
    Row row{cells->pattern, cells->option, fmt::format("{} {}", to_string(cells->dtype), name_of(cells->pass)), {}};
    for (std::size_t s = 0; s < strategies; ++s) {
      row.marks.push_back(cells[s].supported() ? "yes" : fmt::format("no [{}]", footnotes.number(cells[s].reason)));
    }
    variants.push_back(std::move(row));
  }
  const auto same = [&](std::size_t a, std::size_t b) { return variants[a].marks == variants[b].marks; };
  if (!same(0, 2) || !same(0, 4) || !same(1, 3) || !same(1, 5)) return variants;
  variants.resize(same(0, 1) ? 1 : 2);
  variants[0].where = variants.size() == 1 ? "" : "forward";
  variants.back().where = variants.size() == 1 ? "" : "backward";
  return variants;
}

void print_row(const std::string& name, const Row& row) {
  fmt::print("{:<34}{:<20}", name, row.where);
  for (const std::string& mark : row.marks) fmt::print("{:>12}", mark);
  fmt::print("\n");
}

// Whether two patterns say the same about an option.
bool same_marks(const Rows& a, const Rows& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Row& x, const Row& y) { return x.where == y.where && x.marks == y.marks; });
}

void print_kernels(const char* title, std::span<const kernels::AttendKernel> list) {
  fmt::print("\n{}, best first\n", title);
  for (const kernels::AttendKernel& kernel : list) {
    bool usable = false;
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      kernels::AttendShape shape;
      shape.dtype = dtype;
      shape.head_dim = shape.head_dim_v = 64;
      usable = usable || kernel.supports(shape);
    }
    fmt::print("  {}{}\n", kernel.name, !usable ? "  (not on this machine)" : kernel.is_default() ? "" : "  (when named)");
  }
}

// First every pattern by itself; then every option, for all patterns at once but for those that differ.
int print_text(const std::vector<Cell>& cells) {
  constexpr std::size_t kStrategies = 6;
  Footnotes footnotes;
  std::vector<std::vector<Rows>> table;  // by pattern, then option
  for (const Cell* cell = cells.data(); cell != cells.data() + cells.size(); cell += kStrategies * 6) {
    if (table.empty() || table.back().front().front().pattern != cell->pattern) table.emplace_back();
    table.back().push_back(rows_of(cell, kStrategies, footnotes));
  }
  Row heading;
  for (std::size_t s = 0; s < kStrategies; ++s) heading.marks.emplace_back(to_string(cells[s].strategy));
  print_row("pattern", heading);
  for (const auto& options : table) {
    for (const Row& row : options.front()) print_row(row.pattern, row);
  }
  fmt::print("\n");
  print_row("with any of these patterns", heading);
  for (std::size_t o = 1; o < table.front().size(); ++o) {
    const Rows& common = table.front()[o];
    for (const Row& row : common) print_row(row.option, row);
    for (const auto& options : table) {
      if (same_marks(options[o], common)) continue;
      for (const Row& row : options[o]) print_row("  and " + row.pattern, row);
    }
  }
  fmt::print(
      "\nEverything holds for float32, bfloat16 and float16, forward and backward, where a row does not say otherwise.\n");
  for (std::size_t i = 0; i < footnotes.reasons().size(); ++i) fmt::print("[{}] {}\n", i + 1, footnotes.reasons()[i]);
  print_kernels("forward kernels", kernels::attend_kernels());
  print_kernels("backward kernels", kernels::attend_backward_kernels());
  return kOk;
}

int print_json(const std::vector<Cell>& cells) {
  nlohmann::ordered_json json{{"version", 1}, {"cells", nlohmann::ordered_json::array()}};
  for (const Cell& cell : cells) {
    nlohmann::ordered_json entry{{"pattern", cell.pattern},
                                 {"option", cell.option},
                                 {"dtype", to_string(cell.dtype)},
                                 {"pass", name_of(cell.pass)},
                                 {"strategy", to_string(cell.strategy)},
                                 {"supported", cell.supported()}};
    if (!cell.supported()) entry["reason"] = cell.reason;
    json["cells"].push_back(std::move(entry));
  }
  for (const auto& kernel : kernels::attend_kernels()) json["kernels"]["attend"].push_back(kernel.name);
  for (const auto& kernel : kernels::attend_backward_kernels()) json["kernels"]["attend_backward"].push_back(kernel.name);
  fmt::print("{}\n", json_text(json));
  return kOk;
}

}  // namespace

Body setup_capabilities(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  app.footer(
      "The table is made by planning a small problem for every cell: the code that refuses is asked,\nnothing is written down "
      "twice.");
  app.add_flag("--json", *json, "every cell, with the reason where it is refused");
  return [json] {
    const std::vector<Cell> cells = capability_cells();
    return *json ? print_json(cells) : print_text(cells);
  };
}

}  // namespace ringspan::cli
