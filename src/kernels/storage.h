// Storage types of rows and their conversion to and from float32, by DType.
#pragma once

#include <cstdint>

#include "base/float16.h"
#include "ringspan/dtype.h"

namespace ringspan::kernels {

template <DType kType>
struct Storage;

template <>
struct Storage<DType::float32> {
  using Type = float;
  static constexpr float load(float value) { return value; }
  static constexpr float store(float value) { return value; }
};
template <>
struct Storage<DType::bfloat16> {
  using Type = std::uint16_t;
  static constexpr float load(std::uint16_t value) { return bfloat16_to_float(value); }
  static constexpr std::uint16_t store(float value) { return float_to_bfloat16(value); }
};
template <>
struct Storage<DType::float16> {
  using Type = std::uint16_t;
  static constexpr float load(std::uint16_t value) { return float16_to_float(value); }
  static constexpr std::uint16_t store(float value) { return float_to_float16(value); }
};

}  // namespace ringspan::kernels
