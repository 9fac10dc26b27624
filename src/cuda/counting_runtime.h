// For tests and host_bench: a runtime of a device of capability 9.0 that does nothing but count, and whose memory is never read
// by it: that of the host where it is allocated here, any address elsewhere.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>

#include "cuda/runtime.h"

namespace ringspan::testing {

struct RuntimeCounts {
  std::int64_t launches = 0, copies = 0, events = 0;
  RuntimeCounts operator-(const RuntimeCounts& other) const {
    return {launches - other.launches, copies - other.copies, events - other.events};
  }
};

class CountingRuntime : public cuda::Runtime {
 public:
  explicit CountingRuntime(RuntimeCounts& counts) : counts_(counts) {}
  std::string name() const override { return "cuda-counting"; }
  bool holds(const void* /*data*/) const override { return true; }
  void* stream() override { return this; }
  void with_device(FunctionRef<void()> action) override { action(); }
  void reach(const Runtime& /*other*/) override {}
  int shared_bytes_per_block() const override { return 227 << 10; }
  bool has_warpgroups() const override { return true; }
  bool prefers_warpgroups() const override { return true; }
  std::int64_t residents() const override { return 132; }
  bool is_capturing() override { return false; }
  std::byte* allocate(std::int64_t bytes) override { return static_cast<std::byte*>(std::malloc(size(bytes))); }
  void release(std::byte* data) noexcept override { std::free(data); }
  std::byte* allocate_host(std::int64_t bytes) override { return static_cast<std::byte*>(std::malloc(size(bytes))); }
  void release_host(std::byte* data) noexcept override { std::free(data); }
  void copy(void* /*to*/, const void* /*from*/, std::int64_t /*bytes*/) override { ++counts_.copies; }
  void copy_at_once(void* /*to*/, const void* /*from*/, std::int64_t /*bytes*/) override { ++counts_.copies; }
  bool holds_pinned(const void* /*data*/) const override { return true; }
  void copies_wait() override {}
  void copy_beside(const cuda::BlockCopy& /*block*/) override { ++counts_.copies; }
  void wait_for_copies() override {}
  std::unique_ptr<cuda::FusedAttention> make_fused(std::string_view /*library*/) override { return nullptr; }
  void attend(const cuda::AttendArguments& /*arguments*/, std::int64_t /*blocks*/) override { ++counts_.launches; }
  void gradient(cuda::Gradient /*gradient*/, const cuda::AttendArguments& /*arguments*/, std::int64_t /*blocks*/) override {
    ++counts_.launches;
  }
  void rows(const cuda::RowArguments& /*arguments*/, std::int64_t /*blocks*/) override { ++counts_.launches; }
  void sink_gradient(const cuda::SinkArguments& /*arguments*/) override { ++counts_.launches; }
  void sum_sinks(const cuda::SinkArguments& /*arguments*/) override { ++counts_.launches; }
  Event record() override { return static_cast<Event>(++counts_.events); }
  bool is_complete(Event /*event*/) override { return true; }
  void wait(Event /*event*/, FunctionRef<void()> /*progress*/) override {}
  std::unique_ptr<StreamPoint> make_point() override { return nullptr; }
  void record(StreamPoint& /*point*/, void* /*stream*/) override { ++counts_.events; }
  void follow(const StreamPoint& /*point*/, void* /*stream*/) override {}
  void finish() noexcept override {}

 private:
  static std::size_t size(std::int64_t bytes) { return static_cast<std::size_t>(bytes > 0 ? bytes : 1); }
  RuntimeCounts& counts_;
};

}  // namespace ringspan::testing
