// What the files of the C API share: errors become a status and the calling thread's text; nothing is thrown through it.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "comm/c_struct.h"
#include "comm/error_code.h"
#include "ringspan/communicator.h"
#include "ringspan/error.h"
#include "ringspan/ringspan_c.h"

struct ringspan_comm {
  std::shared_ptr<ringspan::Communicator> communicator;
};

namespace ringspan::c_api {

// Of the calling thread.
inline std::string& last_error() {
  thread_local std::string text;
  return text;
}

// Runs the body; what it throws becomes a status and the thread's last error.
template <typename Body>
std::int32_t guard(const Body& body) noexcept {
  try {
    body();
    last_error().clear();  // not before: the caller may have passed its text
    return RINGSPAN_OK;
  } catch (...) {
    try {
      ErrorText error = describe_error(std::current_exception());
      last_error() = std::move(error.text);
      return static_cast<std::int32_t>(error.code);
    } catch (...) {
      last_error().clear();  // not even memory for the text
      return RINGSPAN_INTERNAL_ERROR;
    }
  }
}

template <typename Struct>
Struct read_optional(const Struct* given, const char* name) {
  if (given != nullptr) return read(given, name);
  Struct zero;
  std::memset(&zero, 0, sizeof zero);
  return zero;
}

}  // namespace ringspan::c_api
