// FileError: a file cannot be read, written or understood (exit code 6).
#pragma once

#include "ringspan/error.h"

namespace ringspan::cli {

class FileError : public Error {
 public:
  using Error::Error;
};

// io knows files only, and so throws plain errors.
template <typename Action>
auto as_file_error(Action action) {
  try {
    return action();
  } catch (const Error& error) {
    throw FileError(error.what());
  }
}

}  // namespace ringspan::cli
