#include "ringspan/attention.h"

namespace ringspan {

Tensor dense_bshd(void* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  return {data, tokens * heads * dim, heads * dim, dim};
}

ConstTensor dense_bshd(const void* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  return {data, tokens * heads * dim, heads * dim, dim};
}

Tensor dense_bhsd(void* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  return {data, tokens * heads * dim, dim, tokens * dim};
}

ConstTensor dense_bhsd(const void* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  return {data, tokens * heads * dim, dim, tokens * dim};
}

}  // namespace ringspan
