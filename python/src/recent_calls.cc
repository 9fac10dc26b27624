// RecentCalls: what the first of many equal calls of attention has found out, for those after it. Equal are calls whose tensors
// q, k and v differ in nothing but their strides and values, with equal options. That a call is equal to one before is found
// out without Python, which would take longer than a short attention.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "bindings.h"
#include "ordinary.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

// 1 is not True, and 0.0 not -0.0. Comparing what may be kept runs no code of Python's.
bool are_same(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) {
    const double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (!PyTuple_CheckExact(a)) {
    const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal < 0) nb::raise_python_error();
    return equal == 1;
  }
  if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i) {
    if (!are_same(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
  }
  return true;
}

class RecentCalls {
 public:
  RecentCalls(Ordinary ordinary, const nb::tuple& unchanging, std::size_t size) : ordinary_(std::move(ordinary)), size_(size) {
    for (const nb::handle type : unchanging) unchanging_.push_back(nb::borrow(type));
  }

  nb::object find(nb::handle q, nb::handle k, nb::handle v, const nb::tuple& options) {
    if (!ordinary_.is_quiet() || !ordinary_.has(q) || !ordinary_.has(k) || !ordinary_.has(v)) return nb::none();
    const std::optional<Seen> seen = see(q, k, v);
    if (!seen) return nb::none();
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      Call& call = calls_[(latest_ + i) % calls_.size()];
      if (call.seen != *seen || !are_same(call.options.ptr(), options.ptr())) continue;
      latest_ = (latest_ + i) % calls_.size();
      call.used = ++uses_;
      return call.known;
    }
    return nb::none();
  }

  void keep(nb::handle q, nb::handle k, nb::handle v, nb::tuple options, nb::object known) {
    const std::optional<Seen> seen = see(q, k, v);
    if (!seen || size_ == 0 || !never_changes(options)) return;
    Call call{*seen, std::move(options), std::move(known), ++uses_};
    if (calls_.size() < size_) {
      calls_.push_back(std::move(call));
      latest_ = calls_.size() - 1;
    } else {
      const auto oldest = std::ranges::min_element(calls_, {}, &Call::used);
      latest_ = static_cast<std::size_t>(oldest - calls_.begin());
      std::swap(*oldest, call);  // what ends with the other one ends when this is in order
    }
  }

  void clear() {
    const std::vector<Call> gone = std::move(calls_);  // what ends with them may call this
    calls_.clear();
    latest_ = 0;
  }

 private:
  using Seen = std::array<SeenTensor, 3>;
  struct Call {
    Seen seen;
    nb::tuple options;
    nb::object known;
    std::uint64_t used;  // when, in uses
  };

  static std::optional<Seen> see(nb::handle q, nb::handle k, nb::handle v) {
    Seen seen{};
    if (see_tensor(q, seen[0]) && see_tensor(k, seen[1]) && see_tensor(v, seen[2])) return seen;
    return std::nullopt;
  }
  bool never_changes(nb::handle object) const {
    if (PyTuple_CheckExact(object.ptr())) {
      const auto items = nb::borrow<nb::tuple>(object);
      return std::all_of(items.begin(), items.end(), [&](nb::handle item) { return never_changes(item); });
    }
    return std::any_of(unchanging_.begin(), unchanging_.end(), [&](const nb::object& type) { return object.type().is(type); });
  }

  Ordinary ordinary_;
  std::vector<nb::object> unchanging_;  // types
  std::size_t size_, latest_ = 0;
  std::uint64_t uses_ = 0;
  std::vector<Call> calls_;
};

}  // namespace

void bind_recent_calls(nb::module_& module) {
  nb::class_<RecentCalls>(module, "RecentCalls", "What was found out about the latest calls of attention.")
      .def(nb::init<Ordinary, const nb::tuple&, std::size_t>(), "ordinary"_a, "unchanging"_a, "size"_a,
           "unchanging: types of options that do not change")
      .def("find", &RecentCalls::find, "q"_a.none(), "k"_a.none(), "v"_a.none(), "options"_a,
           "What was kept for an equal call of ordinary tensors, or None.")
      .def("keep", &RecentCalls::keep, "q"_a, "k"_a, "v"_a, "options"_a, "known"_a,
           "For later calls, unless an option might change meanwhile.")
      .def("clear", &RecentCalls::clear);
}

}  // namespace ringspan::python
