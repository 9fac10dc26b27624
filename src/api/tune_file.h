// The file that `ringspan tune` writes: JSON, measurements of one or several machines.
//
//   {"schema": 1, "machines": [{"processor", "instructions", "version", "entries": [{"dtype", "head_dim", "date",
//     "attend": {"kernel", "tile_queries", "tile_keys"}, "attend_backward": {...}, "bucket_rows"}]}]}
// A size of 0: the default is as fast.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringspan/plan.h"

namespace ringspan::internal {

// What was measured for one dtype and head_dim (of q, k and v).
struct TuneEntry {
  DType dtype = DType::float32;
  int head_dim = 0;
  std::string date;  // "2026-11-21"
  std::string attend_kernel, attend_backward_kernel;
  Tile attend_tile, attend_backward_tile;
  std::int64_t bucket_rows = 0;
  bool operator==(const TuneEntry&) const = default;
};

// Measurements are compared by these three.
struct TuneMachine {
  std::string processor;     // processor_name()
  std::string instructions;  // the implementations of kernels that run here
  std::string version;       // of the library
  bool operator==(const TuneMachine&) const = default;
};
TuneMachine this_machine();

// InvalidArgument that names the file, what is wrong with it and how to do without it.
[[noreturn]] void refuse_tune_file(const std::string& path, const std::string& why);

// The entries of a machine; none where there is no file. Throws InvalidArgument if the file cannot be read or understood.
std::vector<TuneEntry> read_tune_file(const std::string& path, const TuneMachine& machine);

// Refuses a file that cannot be read, or not be written, before there is anything to write; makes the folders. Throws as
// write_tune_entry().
void prepare_tune_file(const std::string& path);

// Puts an entry into the file, in place of the machine's entry for the same dtype, head_dim and kernels; keeps everything
// else, also what another process puts there at the same time (FILE.lock, which stays). Makes the folders. The file is replaced
// as a whole, so that a reader sees the old one or the new one; a link stays, and what it points to is replaced. Throws as
// read_tune_file(), and Error if it cannot be written.
void write_tune_entry(const std::string& path, const TuneMachine& machine, const TuneEntry& entry);

}  // namespace ringspan::internal
