// The conformance suite over the transports that take memory of devices.
#include "comm_testing/conformance.h"
#include "nccl/device_worlds.h"

namespace ringspan::comm_testing {

INSTANTIATE_TEST_SUITE_P(Devices, ConformanceTest,
                         testing::Values(std::make_shared<const DeviceThreadRanks>(),
                                         std::make_shared<const StreamThreadRanks>(true),
                                         std::make_shared<const StreamThreadRanks>(false),
                                         std::make_shared<const NcclThreadRanks>(), std::make_shared<const NcclForkedRanks>()),
                         [](const auto& suite) { return suite.param->name(); });

std::string text_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(StreamMessages, WhatDoesNotFitIsRefusedAndTheCommunicatorStaysUsable) {
  using testing::HasSubstr;
  EXPECT_EQ(make_thread_world(2)[0]->on_streams(), nullptr);
  const auto world = make_thread_world({"cuda-emulated", "cuda-emulated"});
  const auto runtime = cuda::make_emulated_runtime(1);
  StreamMessages& streams = *world[0]->on_streams();
  Bytes out(4, 7), in(4);
  const Message on_host = send_to(1, out);
  Message message = on_host;
  message.data = on_emulated_device(message.data);
  const auto post = [&](void* stream, const Message& what) { return streams.post(stream, 1, std::span(&what, 1)); };
  EXPECT_THAT(text_of([&] { post(nullptr, message); }), HasSubstr("rank 0/2: round 1: the stream is null"));
  EXPECT_THAT(text_of([&] { post(runtime->stream(), on_host); }), HasSubstr("which is not memory of cuda-emulated"));
  const Request on_stream = post(runtime->stream(), message);
  EXPECT_THAT(text_of([&] { world[0]->wait(on_stream, kPatience); }), HasSubstr("was posted in the order of a stream"));
  const Request received = post_one(*world[1], 1, receive_from(0, in));
  EXPECT_THAT(text_of([&] { world[1]->on_streams()->wait(runtime->stream(), received, kPatience); }),
              HasSubstr("was not posted in the order of a stream"));
  world[1]->wait(received, kPatience);
  streams.wait(runtime->stream(), on_stream, kPatience);
  EXPECT_EQ(in, out);
}

}  // namespace ringspan::comm_testing
