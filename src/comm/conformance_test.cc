// The conformance suite over the transports of this layer.
#include "comm_testing/conformance.h"

namespace ringspan::comm_testing {

INSTANTIATE_TEST_SUITE_P(Transports, ConformanceTest,
                         testing::Values(std::make_shared<const ThreadRanks>(), std::make_shared<const ForkedRanks>(),
                                         std::make_shared<const CallbackRanks>(), std::make_shared<const HostileRanks>(1)),
                         [](const auto& suite) { return suite.param->name(); });

}  // namespace ringspan::comm_testing
