// The C API on a device: named in the execute options, tensors in buffers of it, errors with the status of a device. The device
// is the emulated one, whose memory the host cannot touch by accident.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
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

// Where the tensors lie, and with it where they are computed on.
enum class Where : std::uint8_t { cpu, device, streamed };

// Copies of host vectors in memory of the device, or, to be streamed, in pinned memory; on the CPU the vectors themselves.
class Placed {
 public:
  explicit Placed(Where where) : where_(where) {}
  ~Placed() {
    for (const auto& [buffer, host] : buffers_) ringspan_device_buffer_destroy(buffer);
  }
  float* place(std::vector<float>& host, bool streams = true) {
    if (where_ == Where::cpu) return host.data();
    const auto bytes = static_cast<std::int64_t>(host.size() * sizeof(float));
    ringspan_device_buffer* buffer = nullptr;
    const auto create =
        where_ == Where::streamed && streams ? ringspan_device_buffer_create_pinned : ringspan_device_buffer_create;
    EXPECT_EQ(create(kDevice, bytes, &buffer), RINGSPAN_OK) << ringspan_last_error();
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
  Where where_;
  std::list<std::pair<ringspan_device_buffer*, std::vector<float>*>> buffers_;
};

ringspan_options stream_pieces(std::int64_t rows) {
  auto options = make_struct<ringspan_options>();
  options.host_tensors = 1;
  options.bucket_rows = rows;
  return options;
}

void run(ringspan_comm* comm, int ranks, Tensors& t, Where where) {
  const ringspan_problem problem = make_problem(ranks);
  const ringspan_execute_options execute = on(where == Where::cpu ? nullptr : kDevice);
  const ringspan_options pieces = stream_pieces(7);
  const ringspan_options* const options = where == Where::streamed ? &pieces : nullptr;
  ringspan_attention* attention = nullptr;
  ASSERT_EQ(ringspan_attention_create(&problem, options, comm, &execute, &attention), RINGSPAN_OK) << ringspan_last_error();
  Placed placed(where);
  const auto rows = [&](std::vector<float>& data, int heads) -> ringspan_tensor {
    return {placed.place(data), 0, std::int64_t{heads} * kDim, kDim};
  };
  auto forward = make_struct<ringspan_forward_tensors>();
  forward.q = rows(t.q, kHeads);
  forward.k = rows(t.k, kKvHeads);
  forward.v = rows(t.v, kKvHeads);
  forward.o = rows(t.o, kHeads);
  forward.lse = {placed.place(t.lse), 0, 1, static_cast<std::int64_t>(t.lse.size()) / kHeads};
  forward.sinks = placed.place(t.sinks, false);
  ASSERT_EQ(ringspan_attention_forward(attention, &forward), RINGSPAN_OK) << ringspan_last_error();
  ringspan_backward_tensors backward = backward_after(forward);
  backward.d_out = rows(t.d_out, kHeads);
  backward.dq = rows(t.dq, kHeads);
  backward.dk = rows(t.dk, kKvHeads);
  backward.dv = rows(t.dv, kKvHeads);
  backward.dsinks = placed.place(t.dsinks, false);
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

std::vector<Tensors> run_all(int ranks, Where where, World world = World::host) {
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
      run(comms[rank], ranks, tensors[rank], where);
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

void expect_near(const std::vector<Tensors>& actual, const std::vector<Tensors>& expected) {
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

// The CPU is checked against the oracle elsewhere; the device must give the same within rounding.
TEST(CDevice, ForwardAndBackward) {
  for (const int ranks : {1, 2}) expect_near(run_all(ranks, Where::device), run_all(ranks, Where::cpu));
}

TEST(CDevice, TensorsOnTheHostStream) { expect_near(run_all(1, Where::streamed), run_all(1, Where::cpu)); }

TEST(CDevice, PlansOfStreamedTensors) {
  const ringspan_problem problem = make_problem(1);
  ringspan_options options = stream_pieces(7);
  options.device = "cuda";
  ringspan_plan* plan = nullptr;
  ASSERT_EQ(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_OK) << ringspan_last_error();
  std::int64_t in = 0, out = 0;
  ASSERT_EQ(ringspan_plan_host_bytes(plan, RINGSPAN_FORWARD, &in, &out), RINGSPAN_OK);
  EXPECT_EQ(out, kTokens * kHeads * (kDim + 1) * 4);
  EXPECT_GE(in, kTokens * (kHeads + 2 * kKvHeads) * kDim * 4);
  std::int64_t copies = 0, exposed = -1;
  ASSERT_EQ(ringspan_plan_host_nanoseconds(plan, RINGSPAN_FORWARD, &copies, &exposed), RINGSPAN_OK);
  EXPECT_GE(copies, exposed);
  EXPECT_NEAR(static_cast<double>(copies), static_cast<double>(in + out) / 25, 100);
  std::uint64_t count = 0;
  ASSERT_EQ(ringspan_plan_memory(plan, RINGSPAN_BACKWARD, nullptr, 0, &count), RINGSPAN_OK);
  std::vector<ringspan_memory_line> lines(count);
  ASSERT_EQ(ringspan_plan_memory(plan, RINGSPAN_BACKWARD, lines.data(), count, &count), RINGSPAN_OK);
  for (const ringspan_memory_line& line : lines) {
    const std::string component = line.component;
    EXPECT_EQ(line.pinned, line.in_arena == 0 && component != "task lists") << component;
  }
  ringspan_plan_destroy(plan);
  // Tensors on the device: nothing is copied, the plan books another memory.
  options.host_tensors = 0;
  options.bucket_rows = 0;
  ASSERT_EQ(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_OK) << ringspan_last_error();
  ASSERT_EQ(ringspan_plan_host_bytes(plan, RINGSPAN_FORWARD, &in, &out), RINGSPAN_OK);
  EXPECT_EQ(in + out, 0);
  ringspan_plan_destroy(plan);
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
  const std::vector<Tensors> expected = run_all(2, Where::device);
  for (const World world : {World::copies, World::nccl}) {
    const std::int64_t before = nccl_messages();
    const std::vector<Tensors> actual = run_all(2, Where::device, world);
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

// What asks for a library's kernels, and what of it the plan tells.
TEST(CDevice, NondeterministicAsksForALibrary) {
  ringspan_comm* world[1] = {nullptr};
  ASSERT_EQ(ringspan_comm_create_threads(1, world), RINGSPAN_OK);
  ringspan_problem problem = make_problem(1);
  problem.dtype = RINGSPAN_BFLOAT16;
  problem.sinks = 0;
  const auto plan_text = [&](int nondeterministic, const char* kernel, const char* partials = nullptr) -> std::string {
    ringspan_execute_options execute = on(kDevice);
    execute.nondeterministic = nondeterministic;
    auto options = make_struct<ringspan_options>();
    options.attend_kernel = kernel;
    options.attend_backward_kernel = kernel;
    options.partials = partials;
    ringspan_attention* attention = nullptr;
    if (ringspan_attention_create(&problem, &options, world[0], &execute, &attention) != RINGSPAN_OK)
      return ringspan_last_error();
    ringspan_plan* plan = nullptr;
    EXPECT_EQ(ringspan_attention_plan(attention, &plan), RINGSPAN_OK);
    const char* json = nullptr;
    EXPECT_EQ(ringspan_plan_json(plan, &json), RINGSPAN_OK);
    std::string text = json;
    ringspan_plan_destroy(plan);
    ringspan_attention_destroy(attention);
    return text;
  };
  EXPECT_NE(plan_text(0, nullptr).find("deterministic is true"), std::string::npos);
  EXPECT_NE(plan_text(1, nullptr).find("attend_backward_cudnn_emulated"), std::string::npos);
  EXPECT_NE(plan_text(0, "cudnn").find("attend_backward_cudnn_emulated"), std::string::npos);
  EXPECT_NE(plan_text(1, "own").find("attend_backward_kernel is 'own'"), std::string::npos);
  EXPECT_NE(plan_text(0, nullptr, "storage").find("none may compute"), std::string::npos);
  EXPECT_NE(plan_text(0, "cudnn", "half").find("unknown kind of partials 'half'"), std::string::npos);
  problem.pattern = "prefix:5";
  EXPECT_NE(plan_text(0, "cudnn").find("more than one call"), std::string::npos);
  EXPECT_NE(plan_text(0, "cudnn", "storage").find("attend_backward_cudnn_emulated"), std::string::npos);
  problem.pattern = nullptr;
  problem.softcap = 5;
  EXPECT_NE(plan_text(0, "cudnn").find("'cudnn' cannot compute this: fused calls have no softcap"), std::string::npos);
  ringspan_comm_destroy(world[0]);
}

TEST(CDevice, ErrorsOfStreamedTensors) {
  ringspan_problem problem = make_problem(1);
  ringspan_options options = stream_pieces(7);
  ringspan_plan* plan = nullptr;
  std::int64_t bytes = 0;
  expect_error(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_UNSUPPORTED, "this rank computes on the CPU");
  options.device = "gpu";
  expect_error(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_INVALID_ARGUMENT, "gpu");
  expect_error(ringspan_plan_host_bytes(nullptr, RINGSPAN_FORWARD, &bytes, &bytes), RINGSPAN_INVALID_ARGUMENT, "plan is null");
  ringspan_comm* comm = nullptr;
  ASSERT_EQ(ringspan_comm_create_threads(1, &comm), RINGSPAN_OK);
  ringspan_attention* attention = nullptr;
  options.device = nullptr;
  const ringspan_execute_options cpu = on(nullptr), device = on(kDevice);
  expect_error(ringspan_attention_create(&problem, &options, comm, &cpu, &attention), RINGSPAN_UNSUPPORTED,
               "this rank computes on the CPU");
  problem.dtype = RINGSPAN_BFLOAT16;
  expect_error(ringspan_attention_create(&problem, &options, comm, &device, &attention), RINGSPAN_UNSUPPORTED, "round_o = 1");
  options.round_o = 1;
  ASSERT_EQ(ringspan_attention_create(&problem, &options, comm, &device, &attention), RINGSPAN_OK) << ringspan_last_error();
  ringspan_attention_destroy(attention);
  problem.dtype = RINGSPAN_FLOAT32;
  // A struct of an older header: the tensors are memory of the device.
  options.struct_size = offsetof(ringspan_options, host_tensors);
  options.bucket_rows = 0;
  ASSERT_EQ(ringspan_attention_create(&problem, &options, comm, &device, &attention), RINGSPAN_OK) << ringspan_last_error();
  ringspan_attention_destroy(attention);
  // Pageable memory.
  options = stream_pieces(7);
  ASSERT_EQ(ringspan_attention_create(&problem, &options, comm, &device, &attention), RINGSPAN_OK) << ringspan_last_error();
  Tensors t(kTokens, 0);
  auto forward = make_struct<ringspan_forward_tensors>();
  forward.q = {t.q.data(), 0, kHeads * kDim, kDim};
  forward.k = forward.v = {t.k.data(), 0, kKvHeads * kDim, kDim};
  forward.o = {t.o.data(), 0, kHeads * kDim, kDim};
  forward.lse = {t.lse.data(), 0, 1, kTokens};
  forward.sinks = t.sinks.data();
  expect_error(ringspan_attention_forward(attention, &forward), RINGSPAN_INVALID_ARGUMENT, "q.data");
  expect_error(ringspan_attention_forward(attention, &forward), RINGSPAN_INVALID_ARGUMENT, "is not pinned host memory");
  ringspan_attention_destroy(attention);
  ringspan_comm_destroy(comm);
  ringspan_device_buffer* buffer = nullptr;
  expect_error(ringspan_device_buffer_create_pinned("cpu", 8, &buffer), RINGSPAN_INVALID_ARGUMENT, "other than the cpu");
}

TEST(CDevice, ErrorsOfWorlds) {
  ringspan_comm* comm = nullptr;
  const char* unknown = "gpu";
  expect_error(ringspan_comm_create_threads_on(nullptr, 1, &comm), RINGSPAN_INVALID_ARGUMENT, "devices is null");
  expect_error(ringspan_comm_create_threads_on(&unknown, 1, &comm), RINGSPAN_INVALID_ARGUMENT, "unknown device 'gpu'");
  expect_error(ringspan_comm_create_threads_on(&unknown, -1, &comm), RINGSPAN_INVALID_ARGUMENT,
               "ranks (-1) must be at least 1");
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

// A rank whose options cannot be read tells the others before they join NCCL.
TEST(CDevice, ErrorsOfOneRankThatJoinsNccl) {
  ringspan_comm* hosts[2];
  ASSERT_EQ(ringspan_comm_create_threads(2, hosts), RINGSPAN_OK);
  const auto join = [&](int rank) {
    auto options = make_struct<ringspan_nccl_options>();
    options.device = kDevice;
    options.library = STAND_IN;
    if (rank == 0) options.struct_size = 1;
    ringspan_comm* comm = nullptr;
    expect_error(ringspan_comm_create_nccl(hosts[rank], &options, &comm), RINGSPAN_INVALID_ARGUMENT, "options.struct_size (1)");
  };
  std::thread other(join, 1);
  join(0);
  other.join();
  for (ringspan_comm* host : hosts) ringspan_comm_destroy(host);
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
  for (const auto& [bytes, offset] : {std::pair<std::int64_t, std::int64_t>{8, INT64_MAX},
                                      {INT64_MAX, 8},
                                      {INT64_MAX, INT64_MAX},
                                      {8, -8},
                                      {-8, 8},
                                      {0, 9}}) {
    expect_error(ringspan_device_buffer_write(buffer, &data, bytes, offset), RINGSPAN_INVALID_ARGUMENT,
                 std::to_string(bytes) + " bytes from byte " + std::to_string(offset) + " are outside of a buffer of 8 bytes");
  }
  ringspan_device_buffer_destroy(buffer);
  ringspan_device_buffer_destroy(nullptr);
}

}  // namespace
}  // namespace ringspan
