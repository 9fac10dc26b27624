// Which tensors of torch's are what lies in their memory, and what nobody else wants to see.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace ringspan::python {

// Asks torch through what it is given: two calls per tensor. Needs the GIL.
class Ordinary {
 public:
  // types: exact classes; keys_of(tensor).raw_repr(): the dispatcher's keys as bits, of which only those in `allowed` may be
  // set; quiet: callables that return None, False or 0 while no mode, transform or tracer wants to see what is done with
  // tensors.
  Ordinary(const nanobind::tuple& types, nanobind::callable keys_of, std::uint64_t allowed, const nanobind::tuple& quiet);

  bool is_quiet() const;
  bool has(nanobind::handle tensor) const;

 private:
  std::vector<nanobind::object> types_, quiet_;
  nanobind::callable keys_of_;
  nanobind::object raw_repr_;  // a name
  std::uint64_t allowed_;
};

}  // namespace ringspan::python
