// RINGSPAN_CHECK: internal invariants. A failure is a bug of ours, thrown as std::logic_error so that no caller loses data.
#pragma once

#include <stdexcept>
#include <string>

namespace ringspan::internal {
[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) {
  throw std::logic_error(std::string("internal error: ") + condition + " at " + file + ":" + std::to_string(line));
}
}  // namespace ringspan::internal

#define RINGSPAN_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::ringspan::internal::check_failed(#condition, __FILE__, __LINE__))
