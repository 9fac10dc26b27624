// Random numbers that are the same on every machine (the standard distributions are not). Private to the oracle.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iterator>

namespace ringspan::oracle {

// SplitMix64 (Steele, Lea, Flood 2014), seeded by a pair.
class RandomSource {
 public:
  RandomSource(std::uint64_t seed, std::uint64_t index) : state_(mix(seed) ^ mix(index + 0x632be59bd9b4e019ULL)) {}

  std::uint64_t bits() { return mix(state_ += 0x9e3779b97f4a7c15ULL); }
  // Evenly in [low, high]; the bias of the remainder is below 2^-50 for the ranges used here.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double probability) { return unit() < probability; }

  template <typename Value>
  Value pick(std::initializer_list<Value> values) {
    return *std::next(values.begin(), integer(0, static_cast<std::int64_t>(values.size()) - 1));
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
};

}  // namespace ringspan::oracle
