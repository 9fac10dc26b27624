// Fused attentions that Python brings: two functions under a name, called with the GIL, and tensors that are views of where the
// library has them (DLPack), without a copy.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>

#include "bindings.h"
#include "cuda/provided_fused.h"
#include "ringspan/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

using cuda::FusedCall;
using cuda::FusedPlace;
using cuda::FusedShape;
using cuda::FusedStrides;

struct Extent {
  std::int64_t heads, rows;
  int width;  // 0: lse, (batch, heads, rows)
};

nb::object view(void* data, const FusedStrides& strides, const Extent& e, const FusedShape& shape, const FusedPlace& place) {
  if (data == nullptr) return nb::none();
  const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  const bool rows = e.width != 0;
  const std::array<std::size_t, 4> sizes = rows ? std::array{size(shape.batch), size(e.rows), size(e.heads), size(e.width)}
                                                : std::array{size(shape.batch), size(e.heads), size(e.rows), std::size_t{1}};
  const std::array<std::int64_t, 4> steps = rows ? std::array{strides.batch, strides.row, strides.head, std::int64_t{1}}
                                                 : std::array{strides.batch, strides.head, strides.row, std::int64_t{1}};
  const bool bfloat = rows && shape.dtype == DType::bfloat16;
  const auto code = static_cast<std::uint8_t>(bfloat ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float);
  const nb::dlpack::dtype dtype{code, static_cast<std::uint8_t>(rows ? 16 : 32), 1};
  const int device = place.on_host ? nb::device::cpu::value : nb::device::cuda::value;
  const nb::ndarray<> array(data, rows ? 4 : 3, sizes.data(), nb::handle(), steps.data(), dtype, device, place.device);
  return nb::cast(array, nb::rv_policy::reference);
}

nb::dict views(const FusedCall& call, const FusedPlace& place) {
  const FusedShape& s = call.shape;
  const Extent q{s.heads, s.queries, s.head_dim}, o{s.heads, s.queries, s.head_dim_v}, lse{s.heads, s.queries, 0};
  const Extent k{s.kv_heads, s.keys, s.head_dim}, v{s.kv_heads, s.keys, s.head_dim_v};
  nb::dict tensors;
  const auto add = [&](const char* name, void* data, const FusedStrides& strides, const Extent& extent) {
    tensors[name] = view(data, strides, extent, s, place);
  };
  add("q", call.q, s.q, q), add("k", call.k, s.k, k), add("v", call.v, s.v, v);
  add("o", call.o, s.o, o), add("lse", call.lse, s.lse, lse), add("do", call.d_out, s.d_out, o);
  add("dq", call.dq, s.dq, q), add("dk", call.dk, s.dk, k), add("dv", call.dv, s.dv, v);
  return tensors;
}

// Calls Python and throws its errors as the library's; Ctrl-C stays what it is.
template <typename Action>
auto with_python(const std::string& name, const Action& action) {
  const nb::gil_scoped_acquire gil;
  try {
    return action();
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    const std::string type = nb::cast<std::string>(error.type().attr("__name__"));
    throw DeviceError(fmt::format("{} failed: {}: {}", name, type, nb::str(error.value()).c_str()));
  }
}

void provide(const std::string& name, const nb::object& refusal, const nb::object& run) {
  // Never given back: the library keeps them longer than the interpreter lives.
  auto* const ask = new nb::object(refusal);
  auto* const call = new nb::object(run);
  cuda::provide_fused(name, {.refusal =
                                 [name, ask](const FusedShape& shape, const FusedPlace& place) {
                                   return with_python(name, [&] { return nb::cast<std::string>((*ask)(shape, place)); });
                                 },
                             .run =
                                 [name, call](const FusedCall& c, const FusedPlace& place) {
                                   with_python(name, [&] { (*call)(c.shape, place, views(c, place)); });
                                 }});
}

}  // namespace

void bind_fused(nb::module_& module) {
  nb::class_<FusedShape>(module, "FusedShape", "A call of a fused attention: query t sees key u where low <= u - t <= high.")
      .def_ro("backward", &FusedShape::backward)
      .def_ro("deterministic", &FusedShape::deterministic)
      .def_ro("queries", &FusedShape::queries)
      .def_ro("keys", &FusedShape::keys)
      .def_ro("head_dim", &FusedShape::head_dim)
      .def_ro("head_dim_v", &FusedShape::head_dim_v)
      .def_ro("scale", &FusedShape::scale)
      .def_prop_ro(
          "low", [](const FusedShape& s) { return s.has_low ? nb::cast(s.low) : nb::none(); }, "None: no bound.")
      .def_prop_ro("high", [](const FusedShape& s) { return s.has_high ? nb::cast(s.high) : nb::none(); }, "None: no bound.");
  nb::class_<FusedPlace>(module, "FusedPlace", "Where its tensors lie.")
      .def_ro("on_host", &FusedPlace::on_host)
      .def_ro("device", &FusedPlace::device)
      .def_ro("compute_capability", &FusedPlace::compute_capability)
      .def_prop_ro("stream", [](const FusedPlace& p) { return reinterpret_cast<Address>(p.stream); });
  module.def("provide_fused", &provide, "name"_a, "refusal"_a, "run"_a,
             "refusal(shape, place) -> why a call cannot be computed, \"\": it can; run(shape, place, {name: DLPack tensor}) "
             "computes it, o, lse, dq, dk, dv in place.");
}

}  // namespace ringspan::python
