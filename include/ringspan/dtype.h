// Storage types of tensors. Arithmetic inside kernels is float32 whatever the storage type.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ringspan {

enum class DType : std::uint8_t { float32, bfloat16, float16 };

// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// "float32", "bfloat16", "float16".
std::string_view to_string(DType dtype);

// Accepts the names above and f32, bf16, f16; throws InvalidArgument naming the value otherwise.
DType parse_dtype(std::string_view name);

}  // namespace ringspan
