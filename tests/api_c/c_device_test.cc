// The C API on a device: named in the execute options, tensors in buffers of it, errors with the status of a device. The device
// is the emulated one, whose memory the host cannot touch by accident.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <list>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "api_c/structs.h"
#include "nccl/stand_in.h"
#include "ringspan/device.h"
#include "ringspan/ringspan_c.h"

namespace ringspan {
namespace {

constexpr const char* kDevice = "cuda-emulated";
constexpr int kTokens = 41;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kDim = 8;

ringspan_problem make_problem(int ranks) {
  auto problem = make_struct<ringspan_problem>();
  problem.tokens_q = problem.tokens_k = kTokens;
  problem.heads = kHeads;
  problem.kv_heads = kKvHeads;
  problem.head_dim = kDim;
  problem.ranks = ranks;
  problem.sinks = 1;
  problem.pattern = "causal";
  return problem;
}

ringspan_execute_options on(const char* device) {
  auto execute = make_struct<ringspan_execute_options>();
  execute.device = device;
  return execute;
}

// A rank's tensors, seeded by the rank: q, k, v, d_out, sinks are read, the others written.
struct Tensors {
  Tensors(std::size_t rows, int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, std::size_t count) {
      values.resize(count);
      for (float& value : values) value = normal(random);
    };
    for (auto* queries : {&q, &d_out}) fill(*queries, rows * kHeads * kDim);
    for (auto* keys : {&k, &v}) fill(*keys, rows * kKvHeads * kDim);
    std::mt19937 same(99);
    for (int head = 0; head < kHeads; ++head) sinks.push_back(normal(same));
    for (auto* output : {&o, &dq}) output->assign(q.size(), -1);
    for (auto* output : {&dk, &dv}) output->assign(k.size(), -1);
    lse.assign(rows * kHeads, -1);
    dsinks.assign(kHeads, -1);
  }
  std::vector<float> q, k, v, d_out, sinks, o, lse, dq, dk, dv, dsinks;
};

// Copies of host vectors in memory of the device; without a device, the vectors themselves.
class Placed {
 public:
  explicit Placed(bool on_device) : on_device_(on_device) {}
  ~Placed() {
    for (const auto& [buffer, host] : buffers_) ringspan_device_buffer_destroy(buffer);
  }
  float* place(std::vector<float>& host) {
    if (!on_device_) return host.data();
    const auto bytes = static_cast<std::int64_t>(host.size() * sizeof(float));
    ringspan_device_buffer* buffer = nullptr;
    EXPECT_EQ(ringspan_device_buffer_create(kDevice, bytes, &buffer), RINGSPAN_OK) << ringspan_last_error();
    EXPECT_EQ(ringspan_device_buffer_write(buffer, host.data(), bytes, 0), RINGSPAN_OK) << ringspan_last_error();
    buffers_.emplace_back(buffer, &host);
    void* data = nullptr;
    EXPECT_EQ(ringspan_device_buffer_data(buffer, &data), RINGSPAN_OK);
    return static_cast<float*>(data);
  }
  void copy_back() {
    for (const auto& [buffer, host] : buffers_) {
      const auto bytes = static_cast<std::int64_t>(host->size() * sizeof(float));
      EXPECT_EQ(ringspan_device_buffer_read(buffer, host->data(), bytes, 0), RINGSPAN_OK) << ringspan_last_error();
    }
  }

 private:
  bool on_device_;
  std::list<std::pair<ringspan_device_buffer*, std::vector<float>*>> buffers_;
};

void run(ringspan_comm* comm, int ranks, Tensors& t, const char* device) {
  const ringspan_problem problem = make_problem(ranks);
  const ringspan_execute_options execute = on(device);
  ringspan_attention* attention = nullptr;
  ASSERT_EQ(ringspan_attention_create(&problem, nullptr, comm, &execute, &attention), RINGSPAN_OK) << ringspan_last_error();
  Placed placed(device != nullptr);
  const auto rows = [&](std::vector<float>& data, int heads) -> ringspan_tensor {
    return {placed.place(data), 0, std::int64_t{heads} * kDim, kDim};
  };
  auto forward = make_struct<ringspan_forward_tensors>();
  forward.q = rows(t.q, kHeads);
  forward.k = rows(t.k, kKvHeads);
  forward.v = rows(t.v, kKvHeads);
  forward.o = rows(t.o, kHeads);
  forward.lse = {placed.place(t.lse), 0, 1, static_cast<std::int64_t>(t.lse.size()) / kHeads};
  forward.sinks = placed.place(t.sinks);
  ASSERT_EQ(ringspan_attention_forward(attention, &forward), RINGSPAN_OK) << ringspan_last_error();
  ringspan_backward_tensors backward = backward_after(forward);
  backward.d_out = rows(t.d_out, kHeads);
  backward.dq = rows(t.dq, kHeads);
  backward.dk = rows(t.dk, kKvHeads);
  backward.dv = rows(t.dv, kKvHeads);
  backward.dsinks = placed.place(t.dsinks);
  // Enqueued behind the forward pass, which nobody waited for.
  ASSERT_EQ(ringspan_attention_backward(attention, &backward), RINGSPAN_OK) << ringspan_last_error();
  ASSERT_EQ(ringspan_attention_wait(attention), RINGSPAN_OK) << ringspan_last_error();
  placed.copy_back();
  ringspan_attention_destroy(attention);
}

// How the ranks of a world meet: over the host, by copies between devices, or by NCCL (a stand-in).
enum class World : std::uint8_t { host, copies, nccl };

std::vector<ringspan_comm*> make_world(int ranks, World world) {
  std::vector<ringspan_comm*> comms(static_cast<std::size_t>(ranks));
  if (world == World::copies) {
    const std::vector<const char*> devices(comms.size(), kDevice);
    EXPECT_EQ(ringspan_comm_create_threads_on(devices.data(), ranks, comms.data()), RINGSPAN_OK) << ringspan_last_error();
  } else {
    EXPECT_EQ(ringspan_comm_create_threads(ranks, comms.data()), RINGSPAN_OK);
  }
  return comms;
}

// Collective; gives the rank's host communicator back, which the new one keeps alive.
ringspan_comm* over_nccl(ringspan_comm* host) {
  auto options = make_struct<ringspan_nccl_options>();
  options.device = kDevice;
  options.library = STAND_IN;
  ringspan_comm* comm = nullptr;
  EXPECT_EQ(ringspan_comm_create_nccl(host, &options, &comm), RINGSPAN_OK) << ringspan_last_error();
  ringspan_comm_destroy(host);
  return comm;
}

std::vector<Tensors> run_all(int ranks, const char* device, World world = World::host) {
  std::vector<Tensors> tensors;
  const ringspan_problem problem = make_problem(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    uint64_t rows = 0;
    EXPECT_EQ(ringspan_shard_positions(&problem, RINGSPAN_KEYS, rank, nullptr, 0, &rows), RINGSPAN_OK);
    tensors.emplace_back(rows, rank);
  }
  std::vector<ringspan_comm*> comms = make_world(ranks, world);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < comms.size(); ++rank) {
    threads.emplace_back([&, rank] {
      if (world == World::nccl) comms[rank] = over_nccl(comms[rank]);
      run(comms[rank], ranks, tensors[rank], device);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (ringspan_comm* comm : comms) ringspan_comm_destroy(comm);
  return tensors;
}

void expect_near(const std::vector<float>& actual, const std::vector<float>& expected, const char* name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  for (std::size_t index = 0; index < actual.size(); ++index) {
    ASSERT_NEAR(actual[index], expected[index], 3e-5F * std::max(1.0F, std::fabs(expected[index]))) << name << " " << index;
  }
}

// The CPU is checked against the oracle elsewhere; the device must give the same within rounding.
TEST(CDevice, ForwardAndBackward) {
  for (const int ranks : {1, 2}) {
    const std::vector<Tensors> expected = run_all(ranks, nullptr);
    const std::vector<Tensors> actual = run_all(ranks, kDevice);
    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
      EXPECT_NE(expected[rank].dk[0], -1.0F);
      expect_near(actual[rank].o, expected[rank].o, "o");
      expect_near(actual[rank].lse, expected[rank].lse, "lse");
      expect_near(actual[rank].dq, expected[rank].dq, "dq");
      expect_near(actual[rank].dk, expected[rank].dk, "dk");
      expect_near(actual[rank].dv, expected[rank].dv, "dv");
      expect_near(actual[rank].dsinks, expected[rank].dsinks, "dsinks");
    }
  }
}

// How many messages the stand-in for NCCL has moved in this process.
std::int64_t nccl_messages() {
  void* library = ::dlopen(STAND_IN, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return 0;
  const auto count = reinterpret_cast<StandInCountOf*>(::dlsym(library, "stand_in_count"))(kStandInMessages);
  ::dlclose(library);
  return count;
}

// However the messages go, the bits are the same.
TEST(CDevice, MessagesFromDeviceToDevice) {
  const std::vector<Tensors> expected = run_all(2, kDevice);
  for (const World world : {World::copies, World::nccl}) {
    const std::int64_t before = nccl_messages();
    const std::vector<Tensors> actual = run_all(2, kDevice, world);
    EXPECT_EQ(nccl_messages() > before, world == World::nccl);
    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
      EXPECT_EQ(actual[rank].o, expected[rank].o);
      EXPECT_EQ(actual[rank].lse, expected[rank].lse);
      EXPECT_EQ(actual[rank].dq, expected[rank].dq);
      EXPECT_EQ(actual[rank].dk, expected[rank].dk);
      EXPECT_EQ(actual[rank].dv, expected[rank].dv);
    }
  }
}

TEST(CDevice, ReportIsThatOfCpp) {
  uint64_t length = 0;
  ASSERT_EQ(ringspan_device_report(nullptr, 0, &length), RINGSPAN_OK);
  std::string expected;
  for (const std::string& line : device_report()) expected += line + "\n";
  EXPECT_EQ(length, expected.size());
  std::vector<char> text(length + 1, 'x');
  ASSERT_EQ(ringspan_device_report(text.data(), text.size(), &length), RINGSPAN_OK);
  EXPECT_EQ(text.data(), expected);
  char cut[5] = "....";
  ASSERT_EQ(ringspan_device_report(cut, sizeof cut, &length), RINGSPAN_OK);
  EXPECT_EQ(std::string(cut), expected.substr(0, 4));
  EXPECT_EQ(ringspan_device_report(cut, sizeof cut, nullptr), RINGSPAN_INVALID_ARGUMENT);
}

void expect_error(std::int32_t status, std::int32_t expected, const std::string& text) {
  EXPECT_EQ(status, expected) << ringspan_last_error();
  EXPECT_NE(std::string(ringspan_last_error()).find(text), std::string::npos) << ringspan_last_error();
}

TEST(CDevice, ErrorsOfAttentions) {
  const ringspan_problem problem = make_problem(1);
  ringspan_comm* comm = nullptr;
  ASSERT_EQ(ringspan_comm_create_threads(1, &comm), RINGSPAN_OK);
  ringspan_attention* attention = nullptr;
  const auto create = [&](const ringspan_execute_options& execute) {
    return ringspan_attention_create(&problem, nullptr, comm, &execute, &attention);
  };
  expect_error(create(on("gpu")), RINGSPAN_INVALID_ARGUMENT, "unknown device 'gpu'");
  ringspan_execute_options execute = on(kDevice);
  int here = 0;
  execute.stream = &here;
  expect_error(create(execute), RINGSPAN_INVALID_ARGUMENT, "stream is given");
  // A struct of an older header has neither device nor stream: it runs on the CPU.
  execute.struct_size = 24;
  ASSERT_EQ(create(execute), RINGSPAN_OK) << ringspan_last_error();
  Tensors t(kTokens, 0);
  ringspan_attention_destroy(attention);
  ASSERT_EQ(create(on(kDevice)), RINGSPAN_OK) << ringspan_last_error();
  auto forward = make_struct<ringspan_forward_tensors>();
  forward.q = forward.o = {t.q.data(), 0, kHeads * kDim, kDim};
  forward.k = forward.v = {t.k.data(), 0, kKvHeads * kDim, kDim};
  forward.o.data = t.o.data();
  forward.lse = {t.lse.data(), 0, 1, kTokens};
  forward.sinks = t.sinks.data();
  expect_error(ringspan_attention_forward(attention, &forward), RINGSPAN_INVALID_ARGUMENT, "is not memory of cuda-emulated");
  ringspan_attention_destroy(attention);
  expect_error(ringspan_attention_set_seed(nullptr, 1), RINGSPAN_INVALID_ARGUMENT, "attention is null");
  expect_error(ringspan_attention_wait(nullptr), RINGSPAN_INVALID_ARGUMENT, "attention is null");
  ringspan_comm_destroy(comm);
}

TEST(CDevice, ErrorsOfWorlds) {
  ringspan_comm* comm = nullptr;
  const char* unknown = "gpu";
  expect_error(ringspan_comm_create_threads_on(nullptr, 1, &comm), RINGSPAN_INVALID_ARGUMENT, "devices is null");
  expect_error(ringspan_comm_create_threads_on(&unknown, 1, &comm), RINGSPAN_INVALID_ARGUMENT, "unknown device 'gpu'");
  expect_error(ringspan_comm_create_nccl(nullptr, nullptr, &comm), RINGSPAN_INVALID_ARGUMENT, "host is null");
  ringspan_comm* host = nullptr;
  ASSERT_EQ(ringspan_comm_create_threads(1, &host), RINGSPAN_OK);
  ringspan_nccl_options options;
  std::memset(&options, 0, sizeof options);
  expect_error(ringspan_comm_create_nccl(host, &options, &comm), RINGSPAN_INVALID_ARGUMENT, "options.struct_size (0)");
  options.struct_size = sizeof options;
  options.device = kDevice;
  options.library = "/nowhere/libnccl.so.2";
  EXPECT_NE(ringspan_comm_create_nccl(host, &options, &comm), RINGSPAN_OK);
  EXPECT_NE(std::string(ringspan_last_error()).find("/nowhere/libnccl.so.2"), std::string::npos) << ringspan_last_error();
  EXPECT_EQ(comm, nullptr);
  ringspan_comm_destroy(host);
}

TEST(CDevice, ErrorsOfBuffers) {
  ringspan_device_buffer* buffer = nullptr;
  void* data = nullptr;
  expect_error(ringspan_device_buffer_create(nullptr, 8, &buffer), RINGSPAN_INVALID_ARGUMENT, "device is null");
  expect_error(ringspan_device_buffer_create("cpu", 8, &buffer), RINGSPAN_INVALID_ARGUMENT, "devices other than the cpu");
  expect_error(ringspan_device_buffer_create(kDevice, std::int64_t{1} << 60, &buffer), RINGSPAN_DEVICE_ERROR,
               "cannot allocate");
  expect_error(ringspan_device_buffer_data(nullptr, &data), RINGSPAN_INVALID_ARGUMENT, "buffer is null");
  ASSERT_EQ(ringspan_device_buffer_create(kDevice, 8, &buffer), RINGSPAN_OK) << ringspan_last_error();
  expect_error(ringspan_device_buffer_write(buffer, nullptr, 8, 0), RINGSPAN_INVALID_ARGUMENT, "source is null");
  expect_error(ringspan_device_buffer_read(buffer, nullptr, 8, 0), RINGSPAN_INVALID_ARGUMENT, "target is null");
  expect_error(ringspan_device_buffer_read(buffer, &data, 8, 1), RINGSPAN_INVALID_ARGUMENT, "outside of a buffer of 8 bytes");
  ringspan_device_buffer_destroy(buffer);
  ringspan_device_buffer_destroy(nullptr);
}

}  // namespace
}  // namespace ringspan
