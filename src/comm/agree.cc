#include "comm/agree.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <string>

#include <fmt/format.h>

#include "base/check.h"
#include "base/cut_text.h"
#include "base/fnv1a.h"
#include "comm/batch_checker.h"
#include "comm/error_code.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

constexpr std::size_t kPassFields = 5;
constexpr std::int32_t kNoRank = std::numeric_limits<std::int32_t>::max();
// What a field that a rank does not have contributes: nothing.
constexpr AgreeExtent kAbsent{std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min(), kNoRank,
                              kNoRank};

struct ErrorSlot {
  std::int32_t rank = kNoRank;  // none
  ErrorCode code = ErrorCode::ok;
  char text[512] = {};  // ends with a zero
};

void merge(AgreeExtent& into, const AgreeExtent& from) {
  if (from.minimum < into.minimum || (from.minimum == into.minimum && from.minimum_rank < into.minimum_rank)) {
    into.minimum = from.minimum;
    into.minimum_rank = from.minimum_rank;
  }
  if (from.maximum > into.maximum || (from.maximum == into.maximum && from.maximum_rank < into.maximum_rank)) {
    into.maximum = from.maximum;
    into.maximum_rank = from.maximum_rank;
  }
}

// Of the names, in order, each with a zero behind it.
std::int64_t hash_names(std::span<const AgreeField> fields) {
  std::uint64_t hash = kFnv1aStart;
  for (const AgreeField& field : fields) hash = fnv1a("", 1, fnv1a(field.name.data(), field.name.size(), hash));
  return std::bit_cast<std::int64_t>(hash);
}

void set_error(ErrorSlot& slot, int rank, ErrorCode code, std::string_view text) {
  constexpr std::string_view kMore = "...";
  slot.rank = rank;
  slot.code = code;
  const std::size_t room = sizeof slot.text - 1;
  std::string shown(text);
  if (text.size() > room) shown = std::string(internal::cut_text(text, room - kMore.size())) += kMore;
  slot.text[shown.copy(slot.text, room)] = '\0';
}

std::string pass_text(std::int64_t backward) { return backward != 0 ? "backward" : "forward"; }

}  // namespace

std::string decimal_text(std::int64_t value) { return fmt::format("{}", value); }

std::string hexadecimal_text(std::int64_t value) { return fmt::format("{:#018x}", static_cast<std::uint64_t>(value)); }

// The version comes first and stays first: two versions must be able to read so much of each other.
struct Agreement::Packet {
  AgreeExtent version;
  AgreeExtent count;
  AgreeExtent names;
  ErrorSlot error;
  AgreeExtent fields[kMaxFields];
};

Agreement::Agreement(Communicator& communicator)
    : communicator_(communicator), known_(std::make_unique<Packet>()), heard_(std::make_unique<Packet>()) {}

Agreement::~Agreement() = default;

std::span<const AgreeExtent> Agreement::agree(std::span<const AgreeField> fields, const std::exception_ptr& own_error,
                                              Communicator::Seconds deadline, std::uint64_t first_round) {
  fill(fields, own_error);
  disseminate(message_bytes(), deadline, first_round);
  throw_if_different(fields);
  return {known_->fields, fields.size()};
}

void Agreement::agree_pass(const AgreePass& pass, const std::exception_ptr& own_error, Communicator::Seconds deadline,
                           std::uint64_t first_round) {
  const std::array<AgreeField, kPassFields> fields{
      AgreeField{"the plan (fingerprint)", std::bit_cast<std::int64_t>(pass.plan), hexadecimal_text},
      AgreeField{"which attention is called (its number)", std::bit_cast<std::int64_t>(pass.attention)},
      AgreeField{"the number of the execution", std::bit_cast<std::int64_t>(pass.execution)},
      AgreeField{"the pass", pass.backward ? 1 : 0, pass_text},
      AgreeField{"the seed of dropout", std::bit_cast<std::int64_t>(pass.seed), hexadecimal_text}};
  fill(fields, own_error);
  disseminate(pass_message_bytes(), deadline, first_round);
  throw_if_different(fields);
}

void Agreement::fill(std::span<const AgreeField> fields, const std::exception_ptr& own_error) {
  RINGSPAN_CHECK(fields.size() <= kMaxFields);
  const std::int32_t rank = communicator_.rank();
  const auto own = [&](std::int64_t value) { return AgreeExtent{value, value, rank, rank}; };
  known_->version = own(kVersion);
  known_->count = own(static_cast<std::int64_t>(fields.size()));
  known_->names = own(hash_names(fields));
  known_->error = {};
  if (own_error != nullptr) {
    const ErrorText error = describe_error(own_error);
    set_error(known_->error, rank, error.code, without_rank_prefix(error.text, rank, communicator_.size()));
  }
  for (std::size_t i = 0; i < kMaxFields; ++i) known_->fields[i] = i < fields.size() ? own(fields[i].value) : kAbsent;
}

void Agreement::disseminate(std::int64_t bytes, Communicator::Seconds deadline, std::uint64_t first_round) {
  const int size = communicator_.size();
  const int rank = communicator_.rank();
  const std::size_t fields = (static_cast<std::size_t>(bytes) - offsetof(Packet, fields)) / sizeof(AgreeExtent);
  for (int step = 0; step < steps(size); ++step) {
    const int distance = 1 << step;
    const std::array batch{Message{Message::Direction::send, (rank + distance) % size, known_.get(), bytes},
                           Message{Message::Direction::receive, (rank + size - distance) % size, heard_.get(), bytes}};
    try {
      communicator_.wait(communicator_.post(first_round + static_cast<std::uint64_t>(step), batch), deadline);
    } catch (...) {  // whatever it is: nothing may write into the packets any more, and the peers must hear of it
      communicator_.abort(describe_error(std::current_exception()).text);
      throw;
    }
    merge(known_->version, heard_->version);
    merge(known_->count, heard_->count);
    merge(known_->names, heard_->names);
    if (heard_->error.rank < known_->error.rank) known_->error = heard_->error;
    for (std::size_t i = 0; i < fields; ++i) merge(known_->fields[i], heard_->fields[i]);
  }
}

void Agreement::throw_if_different(std::span<const AgreeField> fields) const {
  const auto prefix = [&] { return rank_prefix(communicator_.rank(), communicator_.size()); };
  const auto check = [&](std::string_view name, const AgreeExtent& extent, AgreeText text) {
    if (extent.minimum == extent.maximum) return;
    std::string low = fmt::format("{} on rank {}", text(extent.minimum), extent.minimum_rank);
    std::string high = fmt::format("{} on rank {}", text(extent.maximum), extent.maximum_rank);
    if (extent.maximum_rank < extent.minimum_rank) std::swap(low, high);
    throw CommError(fmt::format("{}ranks disagree on {}: {}, {}", prefix(), name, low, high));
  };
  check("the version of the protocol", known_->version, decimal_text);
  if (const ErrorSlot& error = known_->error; error.rank != kNoRank) {
    const std::string where = error.rank == communicator_.rank() ? "" : fmt::format("on rank {}: ", error.rank);
    std::rethrow_exception(make_error(error.code, prefix() + where + error.text));
  }
  check("the number of fields to agree on", known_->count, decimal_text);
  check("the fields to agree on (hash of their names)", known_->names, hexadecimal_text);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (!fields[i].minimum_wins) check(fields[i].name, known_->fields[i], fields[i].text);
  }
}

int Agreement::steps(int ranks) { return std::bit_width(static_cast<unsigned>(ranks - 1)); }

std::int64_t Agreement::message_bytes() { return static_cast<std::int64_t>(sizeof(Packet)); }

std::int64_t Agreement::pass_message_bytes() {
  return static_cast<std::int64_t>(offsetof(Packet, fields) + kPassFields * sizeof(AgreeExtent));
}

}  // namespace ringspan
