// For tests: a rank's tensors in the memory of a device, and the script that runs a case there.
#pragma once

#include <cmath>
#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "api_testing/world.h"
#include "exec/bindings.h"
#include "ringspan/device.h"

namespace ringspan::testing {

// Copies host tensors to the device as they are asked for, and written ones back; with PlanOptions::host_tensors to pinned
// memory instead, but for slopes and sinks.
class DeviceTensors {
 public:
  DeviceTensors(const std::string& device, const internal::PlanData& plan) : device_(device), plan_(plan) {}

  ConstTensor input(internal::TensorKind kind, const ConstTensor& host) {
    return {place(host.data, span_bytes(kind, host.batch_stride, host.token_stride, host.head_stride), false, of_tensors()),
            host.batch_stride, host.token_stride, host.head_stride};
  }
  Tensor output(internal::TensorKind kind, const Tensor& host) {
    return {place(host.data, span_bytes(kind, host.batch_stride, host.token_stride, host.head_stride), true, of_tensors()),
            host.batch_stride, host.token_stride, host.head_stride};
  }
  const float* input(const float* host, std::int64_t count) {
    return reinterpret_cast<const float*>(place(host, count * 4, false, DeviceBuffer::Place::device));
  }
  float* output(float* host, std::int64_t count) {
    return reinterpret_cast<float*>(place(host, count * 4, true, DeviceBuffer::Place::device));
  }

  void copy_in() {
    for (Placed& placed : placed_) placed.buffer.copy_from_host(placed.host, placed.buffer.bytes());
  }
  void zero_inputs() {
    for (Placed& placed : placed_) {
      const std::vector<std::byte> zeros(static_cast<std::size_t>(placed.buffer.bytes()));
      if (!placed.is_output) placed.buffer.copy_from_host(zeros.data(), placed.buffer.bytes());
    }
  }
  void copy_back() const {
    for (const Placed& placed : placed_) {
      if (placed.is_output) placed.buffer.copy_to_host(placed.host, placed.buffer.bytes());
    }
  }

 private:
  struct Placed {
    DeviceBuffer buffer;
    void* host;
    bool is_output;
  };

  // From the first to the last element; the tests' strides are not negative.
  std::int64_t span_bytes(internal::TensorKind kind, std::int64_t batch, std::int64_t token, std::int64_t head) const {
    const internal::TensorShape shape = internal::shape_of(plan_, kind);
    if (shape.batch * shape.rows * shape.heads == 0) return 0;
    return ((shape.batch - 1) * batch + (shape.rows - 1) * token + (shape.heads - 1) * head + shape.width) *
           size_of(shape.dtype);
  }
  DeviceBuffer::Place of_tensors() const {
    return plan_.options.host_tensors ? DeviceBuffer::Place::pinned_host : DeviceBuffer::Place::device;
  }
  std::byte* place(const void* host, std::int64_t bytes, bool is_output, DeviceBuffer::Place place) {
    if (host == nullptr || bytes == 0) return nullptr;
    placed_.push_back({DeviceBuffer(device_, bytes, place), const_cast<void*>(host), is_output});
    placed_.back().buffer.copy_from_host(host, bytes);
    return placed_.back().buffer.data();
  }

  std::string device_;
  const internal::PlanData& plan_;
  std::list<Placed> placed_;
};

inline ForwardTensors on_device(DeviceTensors& device, const Problem& problem, const ForwardTensors& host) {
  using Kind = internal::TensorKind;
  ForwardTensors tensors = host;
  tensors.q = device.input(Kind::q, host.q);
  tensors.k = device.input(Kind::k, host.k);
  tensors.v = device.input(Kind::v, host.v);
  tensors.o = device.output(Kind::o, host.o);
  tensors.lse = device.output(Kind::lse, host.lse);
  tensors.sinks = device.input(host.sinks, problem.heads);
  const std::int64_t slopes = host.alibi_batch_stride == 0 ? problem.heads : problem.batch * problem.heads;
  tensors.alibi_slopes = device.input(host.alibi_slopes, slopes);
  return tensors;
}

inline BackwardTensors on_device(DeviceTensors& device, const Problem& problem, const BackwardTensors& host) {
  using Kind = internal::TensorKind;
  BackwardTensors tensors = host;
  tensors.q = device.input(Kind::q, host.q);
  tensors.k = device.input(Kind::k, host.k);
  tensors.v = device.input(Kind::v, host.v);
  tensors.o = device.input(Kind::o, host.o);
  tensors.lse = device.input(Kind::lse, host.lse);
  tensors.d_out = device.input(Kind::d_out, host.d_out);
  tensors.dlse = device.input(Kind::dlse, host.dlse);
  tensors.dq = device.output(Kind::dq, host.dq);
  tensors.dk = device.output(Kind::dk, host.dk);
  tensors.dv = device.output(Kind::dv, host.dv);
  tensors.sinks = device.input(host.sinks, problem.heads);
  tensors.dsinks = device.output(host.dsinks, problem.heads);
  const std::int64_t slopes = host.alibi_batch_stride == 0 ? problem.heads : problem.batch * problem.heads;
  tensors.alibi_slopes = device.input(host.alibi_slopes, slopes);
  return tensors;
}

// Forward and, where planned, backward, on tensors of the device.
inline RankScript device_script(const std::string& device) {
  return [device](Attention& attention, const RankTensors& rank) {
    const internal::PlanData& plan = attention.plan().data();
    DeviceTensors forward(device, plan);
    attention.forward(on_device(forward, plan.problem, rank.forward()));
    attention.wait();
    forward.copy_back();
    if (!plan.has_backward) return;
    DeviceTensors backward(device, plan);
    attention.backward(on_device(backward, plan.problem, rank.backward()));
    attention.wait();
    backward.copy_back();
  };
}

// The device that these programs test: RINGSPAN_TEST_DEVICE, or the emulated one.
inline std::string test_device() {
  const char* device = std::getenv("RINGSPAN_TEST_DEVICE");
  return device != nullptr ? device : "cuda-emulated";
}

inline Outputs run_on_device(Case test, const Whole& whole) {
  test.execute.device = test_device();
  return run(test, whole, device_script(test.execute.device));
}
inline std::string judge_on_device(const Case& test) {
  const Whole whole(test);
  const std::string failures = judge(test, whole, run_on_device(test, whole));
  return failures.empty() ? "" : "on " + test_device() + ": " + failures;
}

}  // namespace ringspan::testing
