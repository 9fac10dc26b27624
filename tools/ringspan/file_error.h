// FileError: a file cannot be read, written or understood (exit code 6).
#pragma once

#include "ringspan/error.h"

namespace ringspan::cli {

class FileError : public Error {
 public:
  using Error::Error;
};

}  // namespace ringspan::cli
