#include "suggest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace ringspan::cli {
namespace {

// The fewest insertions, deletions, replacements and swaps of neighbours.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1);  // row i - 2
  std::vector<std::size_t> above(b.size() + 1);   // row i - 1
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before.swap(above);
    above.swap(row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row.back();
}

}  // namespace

std::string did_you_mean(std::string_view typed, std::span<const std::string> known) {
  const std::size_t tolerated = typed.size() < 4 ? 1 : std::max<std::size_t>(2, typed.size() / 3);
  std::size_t nearest = tolerated + 1;
  std::string_view best;
  for (const std::string& name : known) {
    const std::size_t d = distance(typed, name);
    if (d < nearest) {
      nearest = d;
      best = name;
    }
  }
  if (best.empty()) return {};
  return "; did you mean " + std::string(best) + "?";
}

}  // namespace ringspan::cli
