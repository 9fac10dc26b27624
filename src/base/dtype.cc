#include "ringspan/dtype.h"

#include "ringspan/error.h"

namespace ringspan {

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float16:
      return "float16";
  }
  return "unknown";
}

DType parse_dtype(std::string_view name) {
  if (name == "float32" || name == "f32") return DType::float32;
  if (name == "bfloat16" || name == "bf16") return DType::bfloat16;
  if (name == "float16" || name == "f16") return DType::float16;
  throw InvalidArgument("unknown dtype '" + std::string(name) + "': expected float32, bfloat16 or float16");
}

}  // namespace ringspan
