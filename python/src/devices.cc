// Devices: what there is, and how tensors of the host become memory of the emulated one.
#include "ringspan/device.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "cuda/emulated_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {

void bind_devices(nb::module_& module) {
  module.attr("HAS_CUDA") = RINGSPAN_HAS_CUDA != 0;
  module.def("device_report", &device_report, nb::call_guard<nb::gil_scoped_release>(),
             "Driver, devices and libraries, and what will be used of them and why: one fact per line.");
  module.def(
      "on_emulated_device", [](Address address) { return address | cuda::kEmulatedTag; }, "address"_a,
      "Memory of the host as the emulated device names it.");
  module.def(
      "pin_on_emulated_device",
      [](Address address, std::int64_t bytes) { cuda::pin_on_emulated_device(reinterpret_cast<const void*>(address), bytes); },
      "address"_a, "bytes"_a, "The emulated device takes this memory of the host for pinned, until it is unpinned as often.");
  module.def(
      "unpin_on_emulated_device",
      [](Address address) { cuda::unpin_on_emulated_device(reinterpret_cast<const void*>(address)); }, "address"_a);
}

}  // namespace ringspan::python
