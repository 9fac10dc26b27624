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

}  // namespace ringspan::comm_testing
