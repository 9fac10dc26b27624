#include "suggest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace ringspan::cli {
namespace {

// Levenshtein: the fewest insertions, deletions and replacements.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
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
