// Structs of the C API, as a careful caller makes them.
#pragma once

#include <cstring>

#include "ringspan/ringspan_c.h"

namespace ringspan {

// All zero but for its size.
template <typename Struct>
Struct make_struct() {
  Struct made;
  std::memset(&made, 0, sizeof made);
  made.struct_size = sizeof made;
  return made;
}

// With what the forward pass had too.
inline ringspan_backward_tensors backward_after(const ringspan_forward_tensors& forward) {
  auto backward = make_struct<ringspan_backward_tensors>();
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.o = forward.o;
  backward.lse = forward.lse;
  backward.sinks = forward.sinks;
  return backward;
}

}  // namespace ringspan
