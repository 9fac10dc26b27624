// Errors as numbers, to cross a process, a rank or the C boundary, and back. The values are those of ringspan_status.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace ringspan {

enum class ErrorCode : std::int32_t {
  ok = 0,
  invalid_argument = 1,
  unsupported = 2,
  comm_error = 3,
  out_of_budget = 4,
  device_error = 5,
  error = 6,         // any other ringspan::Error
  internal = 7,      // anything else: a bug of ours, or an exception of the caller's own
  peer_failure = 8,  // a CommError that began in another rank
};

struct ErrorText {
  ErrorCode code = ErrorCode::ok;
  std::string text;
};

// Of an exception that was thrown; ok for null. Memory that was not to be had (std::bad_alloc) is out_of_budget.
ErrorText describe_error(const std::exception_ptr& error);
// An exception of the class that the code names; null for ok. Unknown codes and `internal` make an Error.
std::exception_ptr make_error(ErrorCode code, const std::string& text);

}  // namespace ringspan
