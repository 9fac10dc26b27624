// What `ringspan tune` measured on this machine: tiles of the CPU's kernels and the fewest rows of a bucket, by dtype and
// head_dim.
//
// They lie in a file: $RINGSPAN_TUNE_FILE, else $XDG_CACHE_HOME/ringspan/tune.json, else ~/.cache/ringspan/tune.json. Where
// RINGSPAN_TUNE_FILE is empty, or the folder of the cache may not be entered, there is none, and nothing is read. A file may
// hold measurements of several machines: those of another processor, other instruction sets, other kernels or another version
// of the library do not count.
//
// make_plan() is pure and reads no file. Attention(problem, options, communicator) and the fronts (the program, C, Python) plan
// with with_tuned_sizes(problem, options). Any thread. Cost: one small file is read.
#pragma once

#include <string>

#include "ringspan/plan.h"

namespace ringspan {

// Where measurements are kept; "": nowhere. Whether there is such a file is another matter.
std::string tuning_file();

// `options` with `tuned` filled in: unchanged where it was filled in before, where there is no file, and where it has nothing
// for this machine and problem. Throws InvalidArgument that names the file if it cannot be read or understood.
PlanOptions with_tuned_sizes(const Problem& problem, PlanOptions options);

}  // namespace ringspan
