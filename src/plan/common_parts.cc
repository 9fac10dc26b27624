#include "plan/common_parts.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "pattern/slice.h"

namespace ringspan::internal {
namespace {

constexpr std::size_t kMostOwners = std::size_t{1} << 18;  // of all parts: planning must not take longer than what it saves

// Progressions that together are the remainders of `period`, with strides that divide it: long ones first.
std::vector<Progression> progressions_of(std::set<std::int64_t> remainders, std::int64_t period) {
  std::vector<Progression> found;
  for (std::int64_t stride = 1; stride <= period; ++stride) {
    if (period % stride != 0) continue;
    for (std::int64_t first = 0; first < stride; ++first) {
      const Progression all{first, stride, period / stride};
      bool has_all = true;
      for (std::int64_t i = 0; i < all.count; ++i) has_all = has_all && remainders.contains(all.at(i));
      if (!has_all) continue;
      for (std::int64_t i = 0; i < all.count; ++i) remainders.erase(all.at(i));
      found.push_back(all);
    }
  }
  return found;
}

// What of [begin, end) has the remainder of the progression by its stride.
Progression between(const Progression& remainder, std::int64_t begin, std::int64_t end) {
  const std::int64_t skipped = ((remainder.first - begin) % remainder.stride + remainder.stride) % remainder.stride;
  const std::int64_t first = begin + skipped;
  return {first, remainder.stride, first < end ? (end - 1 - first) / remainder.stride + 1 : 0};
}

}  // namespace

std::optional<std::vector<std::vector<Progression>>> common_parts(std::span<const Progression> all) {
  std::int64_t period = 1;
  for (const Progression& p : all) {
    if (p.count > 1) period = std::lcm(period, p.stride);
    if (period < 1 || period > kMostPeriod) return std::nullopt;
  }
  using Owners = std::vector<std::size_t>;
  std::map<std::tuple<std::int64_t, std::int64_t, Owners>, std::set<std::int64_t>> shared;  // begin, end and who: remainders
  std::size_t owners_of_all = 0;
  for (std::int64_t remainder = 0; remainder < period; ++remainder) {
    std::map<std::int64_t, Owners> changes;  // where a progression with that remainder begins, or is over
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::int64_t stride = all[i].count > 1 ? all[i].stride : period;
      if (all[i].empty() || (remainder - all[i].first) % stride != 0) continue;
      changes[all[i].first].push_back(i);
      changes[all[i].end()].push_back(i);
    }
    std::set<std::size_t> inside;
    for (auto at = changes.begin(); at != changes.end(); ++at) {
      for (const std::size_t i : at->second) {
        if (inside.erase(i) == 0) inside.insert(i);
      }
      if (inside.empty()) continue;
      owners_of_all += inside.size();
      if (owners_of_all > kMostOwners) return std::nullopt;
      shared[{at->first, std::next(at)->first, {inside.begin(), inside.end()}}].insert(remainder);
    }
  }
  std::vector<std::vector<Progression>> parts(all.size());
  for (const auto& [where, remainders] : shared) {
    const auto& [begin, end, owners] = where;
    for (const Progression& remainder : progressions_of(remainders, period)) {
      Progression part = between(remainder, begin, end);
      if (part.empty()) continue;
      if (part.count == 1) part.stride = 1;
      for (const std::size_t i : owners) parts[i].push_back(part);
    }
  }
  return parts;
}

std::optional<Progression> written_kv_heads(const Progression& heads, int group) {
  const std::int64_t first = heads.first / group, last = heads.last() / group;
  if (heads.count == 1 || heads.stride <= group) return Progression{first, 1, last - first + 1};
  if (heads.stride % group != 0) return std::nullopt;
  return Progression{first, heads.stride / group, heads.count};
}

std::vector<Progression> query_heads_of(const Progression& heads, const Progression& kv_heads, int group) {
  if (kv_heads.count == 1 || kv_heads.stride == 1) return {clip(heads, kv_heads.first * group, (kv_heads.last() + 1) * group)};
  std::vector<Progression> found;
  for (int place = 0; place < group; ++place) {
    const Progression own = intersect(heads, {kv_heads.first * group + place, kv_heads.stride * group, kv_heads.count});
    if (!own.empty()) found.push_back(own);
  }
  return found;
}

}  // namespace ringspan::internal
