// Measures what one rank's passes touch of an arena that is poisoned: twice, with different poisons, so that a byte counts as
// touched when it differs from either.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "api_testing/world.h"
#include "comm/agree.h"
#include "plan/plan_data.h"

namespace ringspan::testing {

constexpr std::array<unsigned char, 2> kPoisons{0xa5, 0x5a};

struct PassMeasure {
  std::map<std::string, std::int64_t> components;  // high-water mark of each component: that of its regions, summed
  std::vector<std::int64_t> outside;               // bytes touched that are in no region
  std::vector<PeerTraffic> traffic;                // counted by the transport, the handshake included
};

struct RankMeasure {
  PassMeasure passes[2];
};

class PoisonedArena {
 public:
  explicit PoisonedArena(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>((bytes + 63) / 64 * 64)), memory_(std::aligned_alloc(64, bytes_ + 64), std::free) {}
  std::span<std::byte> span() const { return {data(), bytes_}; }
  std::byte* data() const { return static_cast<std::byte*>(memory_.get()); }

  // All but the saved regions: a pass may count on nothing else of the pass before.
  void poison(unsigned char value, const internal::Program* keep = nullptr) {
    std::vector<internal::Region> saved;
    if (keep != nullptr) {
      std::copy_if(keep->regions.begin(), keep->regions.end(), std::back_inserter(saved),
                   [](const auto& region) { return region.component == internal::Component::saved; });
    }
    std::sort(saved.begin(), saved.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
    std::int64_t end = 0;
    for (const internal::Region& region : saved) {
      std::memset(data() + end, value, static_cast<std::size_t>(region.offset - end));
      end = region.offset + region.bytes;
    }
    std::memset(data() + end, value, bytes_ + 64 - static_cast<std::size_t>(end));
  }

 private:
  std::size_t bytes_;
  std::unique_ptr<void, decltype(&std::free)> memory_;
};

// High-water marks of the regions after a pass, over both poisons, and what was touched outside of them.
class Touched {
 public:
  void add(const PoisonedArena& arena, unsigned char poison, const internal::Program& program) {
    const auto is_touched = [&](std::int64_t x) { return arena.data()[x] != std::byte{poison}; };
    std::vector<internal::Region> regions = program.regions;
    std::sort(regions.begin(), regions.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
    high_.resize(regions.size());
    std::int64_t end = 0;  // of the region before
    for (std::size_t index = 0; index < regions.size(); ++index) {
      const internal::Region& region = regions[index];
      for (std::int64_t x = end; x < region.offset; ++x) note_outside(x, is_touched(x));
      end = region.offset + region.bytes;
      std::int64_t high = region.bytes;
      while (high > 0 && !is_touched(region.offset + high - 1)) --high;
      high_[index] = {std::string(to_string(region.component)), std::max(high_[index].second, high)};
    }
    for (auto x = end; x < static_cast<std::int64_t>(arena.span().size()) + 64; ++x) note_outside(x, is_touched(x));
  }

  void store(PassMeasure& measure) const {
    for (const auto& [component, high] : high_) measure.components[component] += high;
    measure.outside = outside_;
  }

 private:
  void note_outside(std::int64_t x, bool touched) {
    if (touched) outside_.push_back(x);
  }

  std::vector<std::pair<std::string, std::int64_t>> high_;
  std::vector<std::int64_t> outside_;
};

inline std::vector<PeerTraffic> operator-(std::vector<PeerTraffic> after, std::span<const PeerTraffic> before) {
  for (std::size_t peer = 0; peer < after.size(); ++peer) {
    after[peer].sent_bytes -= before[peer].sent_bytes;
    after[peer].received_bytes -= before[peer].received_bytes;
    after[peer].sent_messages -= before[peer].sent_messages;
    after[peer].received_messages -= before[peer].received_messages;
  }
  return after;
}

// Forward and backward of every rank.
inline std::vector<RankMeasure> measure(const Case& test, const Whole& whole) {
  std::vector<RankTensors> tensors;
  for (int rank = 0; rank < test.problem.ranks; ++rank) tensors.emplace_back(test, whole, rank);
  std::vector<RankMeasure> result(tensors.size());
  run_thread_ranks(test.problem.ranks, [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const Plan plan = make_plan(test.problem, test.options, communicator.rank());
    PoisonedArena arena(plan.arena_bytes());
    Attention attention(plan, communicator, test.execute, arena.span());
    Touched touched[2];
    const auto copy = [&] { return std::vector<PeerTraffic>(communicator.traffic().begin(), communicator.traffic().end()); };
    for (const unsigned char poison : kPoisons) {
      arena.poison(poison);
      const auto start = copy();
      attention.forward(tensors[rank].forward());
      touched[0].add(arena, poison, plan.data().forward);
      const auto middle = copy();
      if (test.options.backward) {
        arena.poison(poison, &plan.data().backward);
        attention.backward(tensors[rank].backward());
        touched[1].add(arena, poison, plan.data().backward);
      }
      result[rank].passes[0].traffic = middle - start;
      result[rank].passes[1].traffic = copy() - middle;
    }
    for (int pass = 0; pass < 2; ++pass) touched[pass].store(result[rank].passes[pass]);
  });
  return result;
}

// What the agreement before every pass adds to the traffic of a rank.
inline std::vector<PeerBytes> handshake_traffic(int ranks, int rank) {
  std::vector<PeerBytes> traffic(static_cast<std::size_t>(ranks));
  for (int step = 0; step < Agreement::steps(ranks); ++step) {
    const int distance = 1 << step;
    PeerBytes& to = traffic[static_cast<std::size_t>((rank + distance) % ranks)];
    PeerBytes& from = traffic[static_cast<std::size_t>((rank + ranks - distance) % ranks)];
    to.sent_bytes += Agreement::pass_message_bytes();
    to.sent_messages += 1;
    from.received_bytes += Agreement::pass_message_bytes();
    from.received_messages += 1;
  }
  return traffic;
}

}  // namespace ringspan::testing
