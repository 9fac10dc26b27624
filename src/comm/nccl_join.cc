// How an NCCL transport begins and ends: its ranks join, and leave. The rest is in nccl_transport.cc.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "base/fnv1a.h"
#include "comm/agree.h"
#include "comm/nccl_transport.h"
#include "comm/rounds.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

constexpr Communicator::Seconds kFarewell{10.0};  // for NCCL to end in good order
// Joining: the ranks agree on the library, whether there is an identifier, exchange it, tell each other what has come of it,
// and agree that all have joined.
constexpr std::uint64_t kLibraryRounds = kNcclRounds;
constexpr std::uint64_t kIdMadeRounds = kNcclRounds + 64;
constexpr std::uint64_t kIdRound = kNcclRounds + 128;
constexpr std::uint64_t kVerdictRound = kNcclRounds + 129;
constexpr std::uint64_t kJoinedRounds = kNcclRounds + 192;

Transport& transport_of(Communicator& host) {
  auto* transport = dynamic_cast<Transport*>(&host);
  if (transport != nullptr) return *transport;
  throw Unsupported(rank_prefix(host.rank(), host.size()) +
                    "an NCCL communicator needs a transport of this library beside it (threads, processes, torch.distributed), "
                    "not callbacks or a communicator around another");
}

}  // namespace

// What has come of joining on every rank. NCCL waits for ranks that will never join: whoever hears of one does not.
class NcclTransport::Verdicts {
 public:
  explicit Verdicts(Communicator& host) : host_(host), heard_(static_cast<std::size_t>(host.size())) {
    for (int peer = 0; peer < host_.size(); ++peer) {
      if (peer == host_.rank()) continue;
      const Message message{Message::Direction::receive, peer, &heard_[static_cast<std::size_t>(peer)], sizeof(Verdict)};
      waiting_.push_back({peer, host_.post(kVerdictRound, std::span(&message, 1))});
    }
  }
  ~Verdicts() {
    if (!waiting_.empty()) host_.abort("left while joining NCCL");  // what is posted is ours
  }
  Verdicts(const Verdicts&) = delete;
  Verdicts& operator=(const Verdicts&) = delete;

  // Whether a rank has said that it did not join.
  bool somebody_did_not() {
    bool any = false;
    std::erase_if(waiting_, [&](const Waiting& from) {
      if (!host_.test(from.request)) return false;
      host_.wait(from.request, Seconds(0));
      any = any || heard_[static_cast<std::size_t>(from.peer)] != Verdict::joined;
      return true;
    });
    return any;
  }

  // Tells all ranks, and hears the rest of theirs.
  void exchange(Verdict own, Seconds deadline) {
    heard_[static_cast<std::size_t>(host_.rank())] = own;
    std::vector<Message> batch;
    for (int peer = 0; peer < host_.size(); ++peer) {
      if (peer == host_.rank()) continue;
      batch.push_back({Message::Direction::send, peer, &heard_[static_cast<std::size_t>(host_.rank())], sizeof(Verdict)});
    }
    const Request request = host_.post(kVerdictRound, batch);
    for (const Waiting& from : waiting_) host_.wait(from.request, deadline);
    host_.wait(request, deadline);
    waiting_.clear();
  }
  bool has(Verdict verdict) const { return std::find(heard_.begin(), heard_.end(), verdict) != heard_.end(); }

 private:
  struct Waiting {
    int peer = 0;
    Request request = 0;
  };
  Communicator& host_;
  std::vector<Verdict> heard_;  // per rank
  std::vector<Waiting> waiting_;
};

NcclTransport::NcclTransport(Transport& host, const Setup& setup)
    : Transport(host.rank(), host.size()),
      host_(host),
      setup_(setup),
      greetings_sent_(static_cast<std::size_t>(host.size())),
      left_(static_cast<std::size_t>(host.size())),
      nccl_life_(Clock::now()) {}

std::unique_ptr<Communicator> NcclTransport::make(Communicator& host, const Setup& setup) {
  std::unique_ptr<NcclTransport> made(new NcclTransport(transport_of(host), setup));
  made->join();
  return made;
}

// What only this rank needs, so that it may fail here alone.
void NcclTransport::load() {
  if (!(setup_.deadline.count() > 0))
    throw InvalidArgument(fmt::format("deadline ({} s) must be positive", setup_.deadline.count()));
  nccl_ = &NcclLibrary::load(setup_.library);
  stream_ = setup_.make_stream();
  const std::size_t bytes = setup_.unique_id.size();
  if (bytes != 0 && bytes != NcclUniqueId::kBytes) {
    throw InvalidArgument(fmt::format("unique_id has {} bytes; NCCL's have {}", bytes, NcclUniqueId::kBytes));
  }
}

void NcclTransport::join() {
  const Seconds deadline = setup_.deadline.count() > 0 ? setup_.deadline : Seconds(60);  // load() refuses others, on all ranks
  std::exception_ptr own_error;
  try {
    load();
  } catch (const Error&) {
    own_error = std::current_exception();
  }
  Agreement agreement(host_);
  const std::array<AgreeField, 2> fields{
      AgreeField{"the version of NCCL", nccl_ == nullptr ? 0 : nccl_->version},
      AgreeField{"unique_id", setup_.unique_id.empty() ? 0 : fnv1a_field(setup_.unique_id.data(), setup_.unique_id.size()),
                 hexadecimal_text}};
  agreement.agree(fields, own_error, deadline, kLibraryRounds);
  const NcclUniqueId id = agree_on_id(deadline);
  Verdicts verdicts(host_);
  auto own = Verdict::failed;
  try {
    own = join_nccl(id, deadline, verdicts);
  } catch (const Error&) {
    own_error = std::current_exception();
  }
  // Whoever joined learns of whoever did not. That one is late follows from another's error, where there is one.
  try {
    if (own != Verdict::joined) abort_nccl();
    verdicts.exchange(own, deadline);
    if (own == Verdict::late && !verdicts.has(Verdict::failed)) {
      own_error = std::make_exception_ptr(CommError(fmt::format("NCCL did not join the ranks in {:g} s", deadline.count())));
    }
    agreement.agree_pass({}, own_error, deadline, kJoinedRounds);
  } catch (const Error&) {
    abort_nccl();
    throw;
  }
  subordinate(host_, true);
}

// Until NCCL has joined the ranks, or is known not to do so in time. Throws what it fails with.
NcclTransport::Verdict NcclTransport::join_nccl(const NcclUniqueId& id, Seconds deadline, Verdicts& verdicts) {
  NcclConfig config;
  int status = kNcclSuccess;
  stream_->with_device([&] { status = nccl_->comm_init_rank_config(&comm_, size(), id, rank(), &config); });
  for (Listening listening; status == kNcclInProgress;) {
    if (verdicts.somebody_did_not()) return Verdict::gave_up;
    listening.look();
    if (listening.so_far() >= deadline) return Verdict::late;
    host_.progress();
    std::this_thread::sleep_for(kPoll);
    if (const int asked = nccl_->comm_get_async_error(comm_, &status); asked != kNcclSuccess) status = asked;
  }
  if (status != kNcclSuccess) throw CommError("ncclCommInitRankConfig failed: " + error_text(status));
  return Verdict::joined;
}

NcclUniqueId NcclTransport::agree_on_id(Seconds deadline) {
  NcclUniqueId id{};
  if (!setup_.unique_id.empty()) {
    std::memcpy(id.internal, setup_.unique_id.data(), sizeof id.internal);
    return id;
  }
  std::exception_ptr own_error;
  if (rank() == 0) {
    if (const int status = nccl_->get_unique_id(&id); status != kNcclSuccess) {
      own_error = std::make_exception_ptr(CommError("ncclGetUniqueId failed: " + error_text(status)));
    }
  }
  Agreement(host_).agree_pass({}, own_error, deadline, kIdMadeRounds);
  std::vector<Message> batch;
  for (int peer = rank() == 0 ? 1 : 0; peer < (rank() == 0 ? size() : 1); ++peer) {
    batch.push_back(
        {rank() == 0 ? Message::Direction::send : Message::Direction::receive, peer, id.internal, sizeof id.internal});
  }
  host_.wait(host_.post(kIdRound, batch), deadline);
  return id;
}

NcclTransport::~NcclTransport() {
  if (!pending_.empty()) abort("left with requests outstanding");
  failed() ? abort_nccl() : leave();
  subordinate(host_, false);
}

// What was sent may still be on its way: NCCL is given time to deliver it.
void NcclTransport::leave() noexcept {
  if (comm_ == nullptr) return;
  int status = nccl_->comm_finalize(comm_);
  const TimePoint begin = Clock::now();
  while (status == kNcclInProgress && Clock::now() - begin < kFarewell) {
    std::this_thread::sleep_for(kPoll);
    if (const int asked = nccl_->comm_get_async_error(comm_, &status); asked != kNcclSuccess) status = asked;
  }
  if (status != kNcclSuccess) return abort_nccl();
  static_cast<void>(nccl_->comm_destroy(comm_));
  comm_ = nullptr;
}

void NcclTransport::abort_nccl() noexcept {
  if (comm_ != nullptr) static_cast<void>(nccl_->comm_abort(comm_));
  comm_ = nullptr;
}

std::unique_ptr<Communicator> NcclTransport::make_duplicate() {
  std::unique_ptr<Communicator> host = on_host([&] { return host_.duplicate(); });
  Setup setup = setup_;
  setup.unique_id.clear();  // one serves for one communicator
  std::unique_ptr<NcclTransport> made(new NcclTransport(transport_of(*host), setup));
  made->owned_host_ = std::move(host);
  made->join();
  return made;
}

}  // namespace ringspan
