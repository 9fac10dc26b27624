// Phases of blocks with roles: what a block spends its cycles on, by clock reads. The first warpgroup of each role says what it
// begins (M::note); a phase ends where the next one begins. Other builds than those with RINGSPAN_CUDA_PHASES, which are for
// nothing else, have none of it (device_phases.h).
#pragma once

#include <cstdint>

namespace ringspan::cuda {

enum class Phase : std::uint8_t {
  // who multiplies
  wait_for_work,
  load,
  wait_for_rows,
  first_tile,  // forward, its wait included
  wait_for_tile,
  other_tiles,
  last_sums,
  store,
  // who finds out
  wait_for_slot,
  enter,
  look_at_rows,
  tell,
  // who copies
  wait_for_task,
  copy_rows,
  wait_for_buffer,
  copy,
  look_at_values,
  none,
};
inline constexpr const char* kPhaseNames[] = {
    "wait for work", "load",      "wait for rows",   "first tile", "wait for tile", "other tiles",
    "last sums",     "store",     "wait for slot",   "enter",      "look at rows",  "tell",
    "wait for task", "copy rows", "wait for buffer", "copy",       "look at values"};
inline constexpr int kPhases = static_cast<int>(Phase::none);
static_assert(sizeof kPhaseNames / sizeof *kPhaseNames == kPhases);

}  // namespace ringspan::cuda
