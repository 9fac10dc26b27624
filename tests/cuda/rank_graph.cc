#include "cuda/rank_graph.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace ringspan::testing {
namespace {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}
cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

// What is enqueued on `later` from now on comes after what is on `earlier` now.
void order(void* earlier, void* event, void* later) {
  check(cudaEventRecord(as_event(event), as_stream(earlier)), "cudaEventRecord");
  check(cudaStreamWaitEvent(as_stream(later), as_event(event), 0), "cudaStreamWaitEvent");
}

}  // namespace

RankGraph::RankGraph(int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    streams_.push_back(stream);
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    events_.push_back(event);
  }
}

RankGraph::~RankGraph() {
  give_up();
  for (void* event : events_) static_cast<void>(cudaEventDestroy(as_event(event)));
  for (void* stream : streams_) static_cast<void>(cudaStreamDestroy(as_stream(stream)));
}

void RankGraph::give_up() noexcept {
  if (graph_ != nullptr) static_cast<void>(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_)));
  graph_ = nullptr;
}

// Relaxed: several threads enqueue, and each allocates memory of its task lists.
void RankGraph::begin() {
  give_up();
  check(cudaStreamBeginCapture(as_stream(streams_[0]), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  check(cudaEventRecord(as_event(events_[0]), as_stream(streams_[0])), "cudaEventRecord");
  for (std::size_t rank = 1; rank < streams_.size(); ++rank) {
    check(cudaStreamWaitEvent(as_stream(streams_[rank]), as_event(events_[0]), 0), "cudaStreamWaitEvent");
  }
}

void RankGraph::end() {
  for (std::size_t rank = 1; rank < streams_.size(); ++rank) order(streams_[rank], events_[rank], streams_[0]);
  cudaGraph_t captured = nullptr;
  check(cudaStreamEndCapture(as_stream(streams_[0]), &captured), "cudaStreamEndCapture");
  cudaGraphExec_t graph = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&graph, captured, 0);
  static_cast<void>(cudaGraphDestroy(captured));
  check(status, "cudaGraphInstantiate");
  graph_ = graph;
}

void RankGraph::launch_and_wait() {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), as_stream(streams_[0])), "cudaGraphLaunch");
  check(cudaStreamSynchronize(as_stream(streams_[0])), "cudaStreamSynchronize");
}

}  // namespace ringspan::testing
