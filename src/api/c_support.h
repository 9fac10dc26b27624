// What the files of the C API share: errors become a status and the calling thread's text; nothing is thrown through it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>

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

// Of the caller's struct, in its version: with members to come, or without the latest.
template <typename Struct>
std::uint64_t size_of_struct(const Struct* given, const char* name) {
  const std::uint64_t size = require(given, name).struct_size;
  if (size < sizeof(std::uint64_t) || size > sizeof(Struct) * 16 || size % alignof(Struct) != 0) {
    throw InvalidArgument(std::string(name) + ".struct_size (" + std::to_string(size) + ") must be the size of the struct (" +
                          std::to_string(sizeof(Struct)) + ")");
  }
  return size;
}

// The caller's struct: members that it does not have are zero, and those that we do not have must be.
template <typename Struct>
Struct read(const Struct* given, const char* name) {
  const std::uint64_t size = size_of_struct(given, name);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::uint64_t at = sizeof(Struct); at < size; ++at) {
    if (bytes[at] == 0) continue;
    throw Unsupported(std::string(name) + " has something set at byte " + std::to_string(at) + " that this version (" +
                      ringspan_version() + ") does not know: its struct has " + std::to_string(sizeof(Struct)) + " bytes");
  }
  Struct copy;
  std::memset(&copy, 0, sizeof copy);
  std::memcpy(&copy, given, std::min<std::uint64_t>(size, sizeof copy));
  return copy;
}

template <typename Struct>
Struct read_optional(const Struct* given, const char* name) {
  if (given != nullptr) return read(given, name);
  Struct zero;
  std::memset(&zero, 0, sizeof zero);
  return zero;
}

}  // namespace ringspan::c_api
