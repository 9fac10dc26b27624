// What the files of the C API share: errors become a status and the calling thread's text; nothing is thrown through it.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "comm/error_code.h"
#include "ringspan/error.h"
#include "ringspan/ringspan_c.h"

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
    last_error().clear();
    body();
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

template <typename T>
T& require(T* pointer, const char* name) {
  if (pointer == nullptr) throw InvalidArgument(std::string(name) + " is null");
  return *pointer;
}

}  // namespace ringspan::c_api
